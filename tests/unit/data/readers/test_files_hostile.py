"""Files made to do harm, or merely very odd: refused in one line, or read within bounds."""

import gzip
import io
import json
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.sparse import coo_matrix, csr_matrix, save_npz

from elias.data import load_corpus
from elias.data.load import TextFile
from elias.data.readers import files
from elias.data.readers import xmc as npz_reader
from elias.errors import DataError
from elias.inference.prediction_io import read_predictions
from elias.text.batches import positives_of

MEBIBYTE = 1 << 20


def refusal(path, read=load_corpus):
    """Return the one line with which a path is refused."""
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def refusal_and_peak(path, read=load_corpus):
    """Return the refusal of a path, and the most memory that Python objects took while reading it.

    The path is read twice, and only the second time is measured: the first time may import modules
    and fill caches, unless earlier tests of this process have done so.
    """
    refusal(path, read)
    tracemalloc.start()
    try:
        return refusal(path, read), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def small_limits(monkeypatch):
    """Lower the bounds, so that a test need not write hundreds of megabytes."""
    monkeypatch.setattr(files, "RATIO_CHECK_BYTES", MEBIBYTE)
    monkeypatch.setattr(files, "MAX_LINE", MEBIBYTE)


def gzip_bomb(path, first, n_bytes):
    with gzip.open(path, "wb") as out:
        out.write(first)
        for _ in range(n_bytes // MEBIBYTE):
            out.write(b"a" * MEBIBYTE)
    return path


@pytest.mark.parametrize("first", [b"text,labels\ncod,fish\n", b'{"text": "', b"0\tcod\n1\t"])
@pytest.mark.usefixtures("small_limits")
def test_a_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path, first):
    path = gzip_bomb(tmp_path / "bomb.gz", first, 64 * MEBIBYTE)

    message, peak = refusal_and_peak(path)

    assert "unpacks from" in message or "longer than" in message
    assert peak < 16 * MEBIBYTE


@pytest.mark.slow
@pytest.mark.usefixtures("small_limits")
def test_a_gzip_bomb_of_many_short_lines_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "bomb.csv.gz"
    with gzip.open(path, "wb") as out:
        out.write(b"text,labels\n")
        for _ in range(64):
            out.write(b"cod,fish\n" * (MEBIBYTE // 9))

    monkeypatch.setattr(files, "MAX_RATIO", 100)  # lines pack less tightly than a single byte

    message, peak = refusal_and_peak(path)

    assert "bytes or more, which is implausible" in message
    assert peak < 32 * MEBIBYTE


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("long.csv", b"text,labels\ncod,"),
        ("quoted.csv", b'text,labels\ncod,"'),
        ("long.tsv", b"text\tlabels\ncod\t"),
        ("long.jsonl", b'{"text": "cod", "labels": ["fish"]}\n{"text": "'),
        ("long.txt", b"1 3 2\n0 0:1 1:"),
        ("pecos.txt", b"0\tcod\n1\t"),
    ],
)
@pytest.mark.usefixtures("small_limits")
def test_a_line_without_end_is_refused_by_its_number(tmp_path, name, head):
    path = tmp_path / name
    with path.open("wb") as out:
        out.write(head)
        out.truncate(8 * MEBIBYTE)  # sparse: NULs to the end, hardly a block on disk

    message, peak = refusal_and_peak(path)

    assert f"{name}:2: the line is longer than 1 MiB" in message
    assert peak < (24 if name == "pecos.txt" else 8) * MEBIBYTE


@pytest.mark.usefixtures("small_limits")
def test_a_quotation_mark_that_is_never_closed_does_not_swallow_the_file(tmp_path):
    path = tmp_path / "open.csv"
    path.write_bytes(b'text,labels\ncod,"fish\n' + b"wine,drink\n" * 400_000)

    message, peak = refusal_and_peak(path)

    assert "field larger than field limit" in message
    assert peak < 32 * MEBIBYTE


@pytest.mark.usefixtures("small_limits")
def test_an_endless_line_of_texts_to_predict_is_refused(tmp_path):
    path = tmp_path / "texts.txt"
    with path.open("wb") as out:
        out.write(b"cod\n")
        out.truncate(4 * MEBIBYTE)

    message = refusal(path, lambda file: list(TextFile.find(file).rows()))

    assert "texts.txt:2: the line is longer" in message


@pytest.mark.usefixtures("small_limits")
def test_a_parquet_file_of_one_repeated_value_is_refused(tmp_path):
    path = tmp_path / "bomb.parquet"
    text = pa.DictionaryArray.from_arrays(np.zeros(300_000, np.int32), ["cod " * 500])
    table = pa.table({"text": text, "labels": pa.array(["fish"] * 300_000)})
    pq.write_table(table, path, store_schema=False)
    del text, table
    assert path.stat().st_size < 200_000  # and 600 MB of texts inside

    assert "bytes or more, which is implausible" in refusal(path)


BIG = "x" * MEBIBYTE
HUGE_CELLS = {
    "dictionary": lambda: pa.array([BIG]).dictionary_encode().take(pa.array([0] * 300)),
    "large strings": lambda: pa.array([BIG] * 30, pa.large_string()),
    "string views": lambda: pa.array([BIG] * 30, pa.string_view()),
    "lists": lambda: pa.array([[], [BIG] * 30]),
    "large lists": lambda: pa.array([[BIG] * 30], pa.large_list(pa.large_string())),
    "structures": lambda: pa.array([{"a": 1, "b": [BIG] * 3}] * 10),
    "maps": lambda: pa.array([[("a", BIG)]] * 30, pa.map_(pa.string(), pa.string())),
    "fixed width": lambda: pa.array([BIG.encode()] * 30, pa.binary(MEBIBYTE)),
    "numbers": lambda: pa.array([[7] * 4_000_000]),
    "empty lists first": lambda: pa.array([[]] * 3000 + [[BIG] * 30]),
}


@pytest.mark.parametrize("kind", HUGE_CELLS)
def test_a_parquet_bomb_is_refused_whatever_the_type_of_its_column(tmp_path, kind):
    path, cells = tmp_path / "bomb.parquet", HUGE_CELLS[kind]()
    table = pa.table({"text": cells, "labels": pa.array(["fish"] * len(cells))})
    pq.write_table(table, path, 2000, compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 10_000
    before = pa.default_memory_pool().max_memory()

    assert "bytes or more, which is implausible" in refusal(path)
    assert pa.default_memory_pool().max_memory() <= before  # what writing it took at most


def test_a_parquet_column_of_few_long_and_many_short_values_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    labels = [["long " * 2000], *([f"label {i % 50}", "b"] for i in range(4000))]
    texts = [f"{i * 7919 % 4001} cod" for i in range(4001)]
    pq.write_table(pa.table({"text": texts, "labels": labels}), path, row_group_size=500)

    corpus = load_corpus(path, test_size=0)  # 80 MB if all labels were as long as the longest

    assert corpus.train.labels.nnz == 8001
    assert corpus.train.texts == texts


def test_a_corpus_that_does_not_fit_into_memory_is_refused_in_one_line(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("text,labels\ncod,fish\n", encoding="utf8")

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("elias.data.load._collect", fail)

    assert "a.csv: does not fit into memory (MemoryError); keep it on disk" in refusal(path)


def folder_with(tmp_path, matrix_bytes):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "trn_X.txt").write_text("cod\nwine\n")
    (tmp_path / "raw" / "Y.txt").write_text("fish\ndrink\n")
    (tmp_path / "Y.trn.npz").write_bytes(matrix_bytes)
    return tmp_path


def npz(**arrays):
    """Return the bytes of an archive of arrays; bytes stand as they are."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            content = array
            if not isinstance(array, bytes):
                buffer = io.BytesIO()
                np.save(buffer, array)
                content = buffer.getvalue()
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


def csr_parts(**changes):
    parts = {
        "indices": np.array([0, 1], np.int32),
        "indptr": np.array([0, 1, 2], np.int32),
        "format": np.array(b"csr"),
        "shape": np.array([2, 2]),
        "data": np.ones(2, np.float32),
    }
    return parts | changes


def array_header(shape, dtype="<i4"):
    out = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue()


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize(
    "changes",
    [
        {"indices": [0, 2]},
        {"indices": [0, -1]},
        {"indices": [0, 2**31 - 1]},
        {"indptr": [0, 1, 3]},
        {"indptr": [0, 1, 2**31 - 1]},
        {"indptr": [0, -5, 2]},
        {"indptr": [1, 1, 2]},
        {"indptr": [0, 2, 1]},
        {"indptr": [0, 1]},
        {"indptr": [[0, 1, 2]]},
        {"indices": []},
        {"data": [1.0]},
        {"shape": [2, 2, 2]},
        {"shape": [-2, 2]},
        {"shape": [2**40, 2]},
        {"shape": 7},
    ],
)
def test_an_inconsistent_csr_matrix_is_refused(tmp_path, changes, kind):
    changed = {
        name: np.array(value, np.int64 if name == "shape" else kind)
        for name, value in changes.items()
    }
    content = npz(**csr_parts(**changed))

    assert "Y.trn.npz: not a complete sparse npz file" in refusal(folder_with(tmp_path, content))


@pytest.mark.parametrize("kind", ["csc", "coo"])
def test_a_shape_with_implausibly_many_rows_is_refused(tmp_path, kind):
    out = io.BytesIO()
    matrix = coo_matrix((np.ones(1, np.float32), ([0], [0])), shape=(2**33, 2))
    if kind == "csc":
        content = npz(
            **csr_parts(format=np.array(b"csc"), shape=np.array([2**33, 2], dtype=np.int64))
        )
    else:
        save_npz(out, matrix)
        content = out.getvalue()

    message, peak = refusal_and_peak(folder_with(tmp_path, content))

    assert "most of them are empty" in message
    assert peak < 16 * MEBIBYTE


@pytest.mark.parametrize(
    "member",
    [
        array_header((10**15,)),
        array_header((10**15, 10**15)),
        array_header((4,)) + b"\0" * 8,
        array_header((-4,)),
        array_header((2,), "|O") + b"\x80\x04N.",
        b"\x93NUMPY\x01\x00\xff\xff" + b"[" * 65535,
        b"\x93NUMPY\x01\x00\x76\x00" + b"__import__('os').abort()".ljust(118),
        b"\x93NUMPY\x09\x00",
        b"",
    ],
    ids=["long", "wide", "short", "negative", "pickle", "deep", "code", "version", "empty"],
)
def test_an_array_with_a_wrong_header_is_refused_before_it_is_allocated(tmp_path, member):
    content = npz(**csr_parts(indices=member))

    message, peak = refusal_and_peak(folder_with(tmp_path, content))

    assert "Y.trn.npz: not a complete sparse npz file" in message
    assert peak < 16 * MEBIBYTE


@pytest.mark.parametrize("member", ["indices", "indptr"])
@pytest.mark.usefixtures("small_limits")
def test_an_npz_bomb_is_refused_before_it_is_unpacked(tmp_path, member):
    count = 8 * MEBIBYTE
    content = npz(**csr_parts(**{member: array_header((count,)) + b"\0" * (4 * count)}))
    assert len(content) < MEBIBYTE
    folder = folder_with(tmp_path, content)

    message, peak = refusal_and_peak(folder)

    assert "bytes or more, which is implausible" in message
    assert peak < 16 * MEBIBYTE


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": array_header((2,), "|S4194304") + bytes(8 * MEBIBYTE)}, "|S4194304 data"),
        ({"data": array_header((2,), "<c16") + bytes(32)}, "complex128 data; expected"),
        ({"data": array_header((2,), "<f16") + bytes(32)}, "expected bool, integer or float"),
        ({"data": array_header((2, MEBIBYTE)) + bytes(8 * MEBIBYTE)}, "data has shape"),
        ({"data": array_header((2 * MEBIBYTE,)) + bytes(8 * MEBIBYTE)}, "data has shape"),
        ({"indices": array_header((2,), "|V0")}, "expected integers"),
        ({"format": np.array(b"csr".ljust(5000))}, "format is 5,"),
        ({"data": array_header((1, 1024, 2048)) + bytes(8 * MEBIBYTE), "format": b"bsr"}, "'bsr'"),
        ({"data": array_header((2, MEBIBYTE)) + bytes(8 * MEBIBYTE), "format": b"dia"}, "'dia'"),
    ],
    ids=["text", "complex", "long", "wide", "many", "nothing", "format", "bsr", "dia"],
)
def test_values_without_indices_are_refused_before_they_are_unpacked(
    tmp_path, monkeypatch, changes, why
):
    changes = dict(changes)
    if isinstance(changes.get("format"), bytes):
        changes["format"] = np.array(changes["format"])
    content = npz(**csr_parts(**changes))
    assert len(content) < MEBIBYTE // 16
    monkeypatch.setattr(npz_reader, "load_npz", lambda _: pytest.fail("it was unpacked"))

    assert why in refusal(folder_with(tmp_path, content))


def test_an_array_that_is_there_twice_is_refused(tmp_path):
    out = io.BytesIO(npz(**csr_parts()))
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("data", array_header((2, MEBIBYTE)) + bytes(8 * MEBIBYTE))

    assert "contains data twice" in refusal(folder_with(tmp_path, out.getvalue()))


def test_an_archive_member_that_is_declared_too_small_is_refused(tmp_path):
    content = bytearray(npz(**csr_parts()))
    position = content.index(b"PK\x01\x02")  # the first record of the directory: its sizes
    content[position + 20 : position + 28] = struct.pack("<II", 4, 4)

    assert "Y.trn.npz: not a complete" in refusal(folder_with(tmp_path, bytes(content)))


def test_paths_in_an_archive_are_not_followed(tmp_path):
    outside = tmp_path / "outside.npy"
    folder = tmp_path / "corpus"
    folder.mkdir()
    content = npz(**csr_parts(), **{"../../outside": np.ones(1), "/etc/passwd": np.ones(1)})

    corpus = load_corpus(folder_with(folder, content))

    assert len(corpus.train) == 2
    assert not outside.exists()


def test_a_corpus_may_be_reached_by_links_but_a_loop_is_refused(tmp_path):
    (tmp_path / "real.csv").write_text("text,labels\ncod,fish\nwine,drink\n")
    (tmp_path / "link.csv").symlink_to("real.csv")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    (tmp_path / "gone.csv").symlink_to("nowhere.csv")

    assert load_corpus(tmp_path / "link.csv", test_size=0).train.texts == ["cod", "wine"]
    for name in ("loop.csv", "gone.csv"):
        assert "no such file" in refusal(tmp_path / name)


def test_a_pipe_or_a_device_is_refused(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    os.mkfifo(folder / "train.csv")

    assert "is not a regular file" in refusal(folder)
    assert "is not a regular file" in refusal(folder / "train.csv")


@pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
def test_label_names_in_a_pipe_or_a_device_are_refused(tmp_path, target):
    os.mkfifo(tmp_path / "pipe")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.csv").write_text("text,labels\ncod,fish\nwine,drink\n")
    (folder / "labels.txt").symlink_to(tmp_path / target)

    assert "labels.txt: is not a regular file" in refusal(folder)


@pytest.mark.parametrize("name", ["many.jsonl", "many.txt"])
def test_very_many_labels_on_one_point_are_read(tmp_path, name):
    n_labels = 200_000
    ids = [str(i) for i in range(n_labels)]
    path = tmp_path / name
    if name.endswith("jsonl"):
        path.write_text(json.dumps({"text": "all", "labels": ids}) + "\n")
    else:
        path.write_text("0\tone\n" + ",".join(ids) + "\tall\n")

    corpus = load_corpus(path, test_size=0)

    last = len(corpus.train) - 1
    assert corpus.n_labels == n_labels
    assert positives_of(corpus.train.labels, np.array([last])).shape == (1, n_labels)


def test_a_row_of_very_many_columns_is_refused_in_a_short_line(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(",".join(map(str, range(100_000))) + "\n")

    assert "no text column" in refusal(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.jsonl", '{"text": "cod", "labels": ["fish"], "label_ids": [99999999]}\n'),
        ("ids.jsonl", '{"text": "cod", "labels": ["fish"], "label_ids": [-1]}\n'),
        ("ids.jsonl", '{"text": "cod", "labels": ["fish"], "label_ids": [1e30]}\n'),
        ("pecos.txt", "99999999\tcod\n"),
        ("pecos.txt", "999999999999999999\tcod\n"),
        ("pecos.txt", "9" * 40 + "\tcod\n"),
        ("xmc.txt", "1 4 99999999\n0 0:1\n"),
        ("xmc.txt", "1 4 3\n9223372036854775808 0:1\n"),
        ("xmc.txt", "1 4 3\n-1 0:1\n"),
        ("xmc.txt", "99999999999999999999 4 3\n0 0:1\n"),
        ("trn.json", '{"title": "cod", "target_ind": [99999999]}\n'),
        ("trn.json", '{"title": "cod", "target_ind": [-1]}\n'),
        ("trn.json", '{"title": "cod", "target_ind": [1e400]}\n'),
    ],
)
def test_implausible_label_ids_are_refused_at_once(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)

    _, peak = refusal_and_peak(tmp_path if name == "trn.json" else path)

    assert peak < 16 * MEBIBYTE


@pytest.mark.parametrize("form", ["csv", "jsonl", "pecos"])
def test_nuls_and_lone_surrogates_are_read_and_replaced(tmp_path, form):
    path = tmp_path / "odd"
    if form == "csv":
        path.write_bytes(b"text,labels\nco\0d,fi\0sh\nwine,drink\n")
    elif form == "jsonl":
        path.write_text('{"text": "co\\u0000d\\ud800", "labels": ["\\udfff"]}\n')
    else:
        path.write_bytes(b"0\tco\0d\n1\twine\n")

    corpus = load_corpus(path, test_size=0)

    assert "sanitized" in corpus.notes
    assert "\0" not in "".join(corpus.train.texts)
    "".join([*corpus.train.texts, *corpus.label_names]).encode("utf8")


@pytest.mark.parametrize(
    "content",
    [
        b"\x1f\x8b\x08" + b"\0" * 40,
        gzip.compress(b"0:1\n", mtime=0)[:-6],
        b"PK\x03\x04" + b"\0" * 40,
        b'{"labels": [{"id": 1e999, "score": 1}]}\n',
        b'{"labels": ' + b"[" * 100_000 + b"\n",
        b'{"labels": [{"id": 99999999999999999999, "score": 1}]}\n',
        b"\xff\xfe\x00",
        npz(**csr_parts(indptr=np.array([0, 9, 2], np.int32))),
        npz(**csr_parts(indices=array_header((10**15,)))),
    ],
)
def test_broken_predictions_are_refused_in_one_line(tmp_path, content):
    path = tmp_path / "predictions"
    path.write_bytes(content)

    refusal(path, lambda file: read_predictions(file, n_labels=2))


@pytest.mark.usefixtures("small_limits")
def test_a_bomb_of_predictions_is_refused(tmp_path):
    path = gzip_bomb(tmp_path / "predictions.gz", b"0:1 ", 64 * MEBIBYTE)

    message, peak = refusal_and_peak(path, lambda file: read_predictions(file, n_labels=2))

    assert "unpacks from" in message
    assert peak < 16 * MEBIBYTE


@pytest.mark.usefixtures("small_limits")
def test_a_matrix_of_ones_packs_tightly_and_is_read(tmp_path):
    n_points = 200_000
    labels = csr_matrix(
        (np.ones(n_points, np.float32), np.arange(n_points) % 997, np.arange(n_points + 1)),
        shape=(n_points, 1000),
    )
    path = tmp_path / "Y.npz"
    save_npz(path, labels)

    with path.open("rb") as stream:
        assert (npz_reader.load_sparse(stream) != labels).nnz == 0
