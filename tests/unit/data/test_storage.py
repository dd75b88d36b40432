"""A corpus on disk is the corpus in memory, row for row, and takes little memory."""

import errno
import gzip
import json
import os
import tracemalloc
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, random

from elias.data import convert, load, load_corpus, storage
from elias.data.atomic import cache_root
from elias.data.readers import files
from elias.data.splits import sample_points
from elias.data.storage import DiskTexts, is_mapped, scratch_array, take_rows
from elias.data.synthetic import synthetic_corpus
from elias.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "CHUNK_ROWS", 7)  # so that a small corpus comes in several chunks
    return tmp_path / "cache"


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def both(path, **options):
    """Return the corpus in memory and on disk."""
    return load_corpus(path, on_disk="off", **options), load_corpus(path, on_disk="on", **options)


def assert_same(memory, disk):
    assert disk.train.on_disk
    assert not memory.train.on_disk
    assert list(disk.splits) == list(memory.splits)
    assert disk.label_names == memory.label_names
    assert dict(disk.notes) == dict(memory.notes)
    assert disk.fingerprint() == memory.fingerprint()
    for name, split in memory.splits.items():
        twin = disk.split(name)
        assert (twin.texts is None) == (split.texts is None)
        assert list(twin.texts or ()) == list(split.texts or ())
        assert_same_matrix(twin.labels, split.labels)
        assert_same_matrix(twin.features, split.features)
        assert split.filters is None or (twin.filters == split.filters).all()


def assert_same_matrix(ours, theirs):
    if theirs is None:
        assert ours is None
        return
    assert ours.shape == theirs.shape
    assert (ours != theirs).nnz == 0
    assert ours.has_canonical_format
    assert is_mapped(ours) or not ours.nnz


def with_features(corpus, seed=0):
    """The corpus with features of its points, some of these empty."""
    rng = np.random.default_rng(seed)

    def features(n_rows):
        actual = random(n_rows, 23, density=0.2, format="csr", dtype=np.float32, rng=rng)
        actual.sort_indices()
        return actual

    splits = {name: replace(s, features=features(len(s))) for name, s in corpus.splits.items()}
    splits["test"] = replace(splits["test"], filters=np.array([[0, 1], [2, 0]]))
    return replace(corpus.with_splits(**splits), source=None)


ALL = ["jsonl", "csv", "tsv", "parquet", "folder", "pecos", "lf"]


@pytest.mark.parametrize("format", ALL)
def test_every_format_gives_the_same_corpus(tmp_path, format):
    made = synthetic_corpus(n_points=60, n_labels=12)
    target = tmp_path / "corpus"
    convert(made, target, format)

    assert_same(*both(target))


@pytest.mark.parametrize("format", ["folder", "pecos", "lf", "xmc"])
def test_features_stay_on_disk_too(tmp_path, format):
    target = tmp_path / "corpus"
    convert(with_features(synthetic_corpus(n_points=60, n_labels=12)), target, format)

    memory, disk = both(target)

    assert_same(memory, disk)
    rows = np.array([5, 2, 2])
    taken = disk.train.take(rows)
    assert is_mapped(taken.features)
    assert (taken.features != memory.train.features[rows]).nnz == 0


def test_matrices_with_very_many_entries_have_wide_indices(tmp_path, monkeypatch):
    target = tmp_path / "corpus"
    convert(with_features(synthetic_corpus(n_points=60, n_labels=12)), target, "xmc")
    monkeypatch.setattr(storage, "_INT32_MAX", 100)

    assert_same(*both(target))
    folder = next((cache_root() / "corpora").iterdir()) / "train"
    n_rows = len(load_corpus(target, on_disk="on").train)
    indptr = np.load(folder / "indptr.npy")
    assert (indptr.dtype, len(indptr)) == (np.dtype(np.int64), n_rows + 1)


def sparse_lines(matrix, sizes=""):
    rows = [
        " ".join(f"{j}:{v:.9g}" for j, v in zip(row.indices, row.data, strict=True))
        for row in matrix
    ]
    return "\n".join([sizes or f"{matrix.shape[0]} {matrix.shape[1]}", *rows]) + "\n"


@pytest.mark.parametrize("with_texts", [True, False])
def test_a_folder_of_label_and_feature_matrices_is_the_same(tmp_path, with_texts):
    made = with_features(synthetic_corpus(n_points=60, n_labels=12))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for short, split in (("trn", made.train), ("tst", made.test)):
        (folder / f"{short}_X_Y.txt").write_text(sparse_lines(split.labels))
        (folder / f"{short}_X_Xf.txt").write_text(sparse_lines(split.features))
        if with_texts:
            (folder / f"{short}_X.txt").write_text("".join(f"{text}\r\n" for text in split.texts))

    assert_same(*both(folder))


def test_one_file_of_features_is_cut_alike(tmp_path):
    path = tmp_path / "data.txt"
    lines = [f"{i % 5},{i % 3} {i % 7}:0.5 {7 + i % 4}:{i}" for i in range(40)]
    path.write_text("40 11 5\n" + "\n".join([*lines[:-1], " 3:1"]) + "\n")

    memory, disk = both(path)

    assert_same(memory, disk)
    assert disk.test.texts is None


@pytest.mark.parametrize("names", [True, False])
def test_a_file_of_ids_and_texts_is_the_same(tmp_path, names):
    path = tmp_path / "corpus" / "train.txt"
    path.parent.mkdir()
    path.write_text("".join(f"{i % 7},{i % 3}\ttext {i}\n" for i in range(30)) + "\tnone\n")
    if names:
        (path.parent / "labels.txt").write_text("".join(f"name {i}\n" for i in range(9)))

    assert_same(*both(path))
    assert_same(*both(path.parent))


LF_CELLS = st.tuples(
    st.lists(st.sampled_from([0, 1, 5, 8]), max_size=3),
    st.sampled_from(["none", "given", "short", "absent"]),
)


@given(cells=st.lists(LF_CELLS, min_size=1, max_size=40), names=st.booleans())
def test_lf_points_mean_the_same_read_in_chunks(tmp_path_factory, cells, names):
    """Also where relevance is given of some rows, and refused for others."""
    folder = tmp_path_factory.mktemp("lf")
    rows = []
    for i, (ids, how) in enumerate(cells):
        row = {"uid": str(i), "title": f"t {i}", "content": "", "target_ind": ids}
        if how != "absent":
            weights = [1 + 0.5 * n for n in range(len(ids))]
            row["target_rel"] = {"none": None, "given": weights, "short": weights[1:]}[how]
        rows.append(row)
    write_jsonl(folder / "trn.json", rows)
    if names:
        write_jsonl(folder / "lbl.json", [{"uid": str(i), "title": f"n {i}"} for i in range(7)])

    def read(on_disk):
        try:
            return load_corpus(folder, on_disk=on_disk)
        except DataError as error:
            return str(error)

    memory, disk = read("off"), read("on")

    if isinstance(memory, str):
        assert isinstance(disk, str)
    else:
        assert_same(memory, disk)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trn_X_Y.txt", "20 4\n" + "1:1\n" * 18 + "4:1\n1:1\n"),
        ("trn_X_Y.txt", "20 4\n" + "1:1\n" * 18 + "1:-1\n1:1\n"),
        ("trn_X_Y.txt", "20 4\n" + "1:1\n" * 18),
        ("trn_X_Y.txt", "20 4\n" + "1:1\n" * 18 + "1:x\n1:1\n"),
        ("trn_X.txt", "text\n" * 19),
        ("trn_X.txt", "text\n" * 21),
        ("trn_X_Xf.txt", "20 3\n" + "1:1\n" * 19 + "1:inf\n"),
        ("trn_X_Xf.txt", "19 3\n" + "1:1\n" * 19),
        ("tst_X_Y.txt", "1 3\n1:1\n"),
        ("Y.txt", "a\nb\n"),
        ("filter_labels_test.txt", "9 9\n"),
    ],
)
def test_errors_are_the_same_in_memory_and_on_disk(tmp_path, name, content):
    files = {
        "trn_X_Y.txt": "20 4\n" + "1:1\n" * 20,
        "trn_X.txt": "text\n" * 20,
        "tst_X_Y.txt": "1 4\n1:1\n",
        "tst_X.txt": "text\n",
        name: content,
    }
    for called, text in files.items():
        (tmp_path / called).write_text(text)
    messages = []
    for on_disk in ("on", "off"):
        with pytest.raises(DataError) as caught:
            load_corpus(tmp_path, on_disk=on_disk)
        messages.append(str(caught.value))

    assert messages[0] == messages[1]


LABELS = st.sampled_from(["a", "b|c", "7", "12", "é", "x, y", "[1]"])
CELLS = st.one_of(
    st.lists(LABELS, max_size=3),
    st.sampled_from(["a|b", "b", "a, c", "", "['a', 'b']", "[]", None, 7]),
)


@given(cells=st.lists(CELLS, min_size=1, max_size=40))
def test_labels_mean_the_same_read_in_chunks(tmp_path_factory, cells):
    folder = tmp_path_factory.mktemp("cells")
    rows = [{"text": f"t {i}", "labels": cell} for i, cell in enumerate(cells)]
    path = write_jsonl(folder / "rows.jsonl", rows)

    def read(on_disk):
        try:
            return load_corpus(path, test_size=0, on_disk=on_disk)
        except DataError as error:
            return str(error)

    memory, disk = read("off"), read("on")

    if isinstance(memory, str):
        assert disk == memory
    else:
        assert_same(memory, disk)


def test_ids_weights_and_splits_of_a_table_are_the_same(tmp_path):
    rows = [
        {
            "text": f"t {i}",
            "labels": ["fish", "law"],
            "label_ids": [3, i % 2],
            "label_weights": [0.5, i % 3],
            "split": ["train", "test", "dev"][i % 3],
        }
        for i in range(0, 60, 2)
    ]
    assert_same(*both(write_jsonl(tmp_path / "rows.jsonl", rows)))


def test_row_numbers_of_a_file_of_names_are_the_same(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "labels.txt").write_text("".join(f"name {i}\n" for i in range(9)))
    write_jsonl(folder / "train.jsonl", [{"text": f"t {i}", "labels": [i % 9]} for i in range(30)])

    assert_same(*both(folder))
    with (folder / "train.jsonl").open("a") as out:
        out.write('{"text": "late", "labels": [9]}\n')
    messages = []
    for on_disk in ("on", "off"):
        with pytest.raises(DataError) as caught:
            load_corpus(folder, on_disk=on_disk)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "train.jsonl:31: label id 9 is out of range" in messages[0]


def test_texts_are_sanitized_when_stored_on_disk(tmp_path):
    rows = [{"text": "a\0b \ud800", "labels": ["x"]}, {"text": "", "labels": ["y\0"]}]

    assert_same(*both(write_jsonl(tmp_path / "rows.jsonl", rows), test_size=0))


def test_an_error_leaves_nothing_on_disk(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "t", "labels": ["x"]}] * 20)
    with path.open("a") as out:
        out.write('{"text": "cut"')

    with pytest.raises(DataError, match=r"rows.jsonl:21: not a JSON object"):
        load_corpus(path, on_disk="on")

    assert list((cache_root() / "corpora").iterdir()) == []


def test_a_corpus_is_read_once_while_its_files_are_unchanged(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "t", "labels": ["x"]}] * 20)
    first = load_corpus(path, on_disk="on")
    reads = []
    whole = load._store
    monkeypatch.setattr(load, "_store", lambda *args: (reads.append(1), whole(*args)))

    again = load_corpus(path, on_disk="on")
    assert not reads
    assert again.fingerprint() == first.fingerprint()

    write_jsonl(path, [{"text": "another", "labels": ["x"]}] * 20)
    os.utime(path, (1, 1))
    assert load_corpus(path, on_disk="on", test_size=0).train.texts[0] == "another"
    assert reads


@pytest.mark.parametrize("name", ["train/texts.npy", "train/indices.npy", "corpus.json"])
def test_a_damaged_store_is_read_again(tmp_path, name):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "t", "labels": ["x"]}] * 20)
    before = load_corpus(path, on_disk="on").fingerprint()
    file = next((cache_root() / "corpora").iterdir()) / name
    file.write_bytes(file.read_bytes()[:-2])

    assert load_corpus(path, on_disk="on").fingerprint() == before


@pytest.mark.parametrize(
    ("name", "keeps_time"),
    [
        *[(name, False) for name in ("texts.npy", "indices.npy", "indptr.npy", "offsets.npy")],
        *[(name, True) for name in ("indices.npy", "indptr.npy", "offsets.npy")],
    ],
)
def test_a_flipped_bit_in_a_store_is_noticed_and_reported(tmp_path, caplog, name, keeps_time):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "t", "labels": ["x"]}] * 20)
    before = load_corpus(path, on_disk="on").fingerprint()
    file = next((cache_root() / "corpora").iterdir()) / "train" / name
    content, stat = bytearray(file.read_bytes()), file.stat()
    content[128 + 5] ^= 64  # after the header of the npy file
    file.write_bytes(content)
    if keeps_time:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert load_corpus(path, on_disk="on").fingerprint() == before
    assert "the cached corpus is damaged" in caplog.text


def test_large_files_go_to_disk_by_themselves(tmp_path, monkeypatch):
    rows = [{"text": "t", "labels": ["x"]}] * 20
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    assert not load_corpus(path).train.on_disk

    monkeypatch.setattr(load, "ON_DISK_BYTES", 100)

    assert load_corpus(path).train.on_disk
    assert load_corpus(packed).train.on_disk
    assert not load_corpus(path, on_disk="off").train.on_disk


@given(rows=st.lists(st.integers(0, 19), max_size=30), seed=st.integers(0, 9))
def test_rows_taken_from_disk_are_those_rows(rows, seed):
    labels = random(20, 6, density=0.3, format="csr", dtype=np.float32, random_state=seed)
    labels.sort_indices()
    chosen = np.array(rows, dtype=np.int64)

    taken = take_rows(labels, chosen)

    assert (taken != labels[chosen]).nnz == 0


def test_texts_on_disk_are_a_sequence(tmp_path):
    rows = [{"text": f"té {i}", "labels": ["x"]} for i in range(20)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    texts = load_corpus(path, on_disk="on", test_size=0).train.texts

    assert isinstance(texts, DiskTexts)
    assert (texts[0], texts[-1], texts[3:5]) == ("té 0", "té 19", ["té 3", "té 4"])
    assert list(texts.take(np.array([5, 2])).take(np.array([1]))) == ["té 2"]
    assert texts == [row["text"] for row in rows]
    assert texts.take(np.array([1])).digest != texts.digest
    with pytest.raises(IndexError):
        texts[20]


@given(
    rows=st.lists(st.sets(st.integers(0, 6), max_size=3), min_size=1, max_size=30),
    size=st.integers(1, 40),
    seed=st.integers(0, 5),
)
def test_a_sample_has_its_size_and_every_label(rows, size, seed):
    indptr = np.cumsum([0, *map(len, rows)])
    ids = np.array([label for row in rows for label in sorted(row)], dtype=np.int64)
    labels = csr_matrix((np.ones(len(ids)), ids, indptr), shape=(len(rows), 7))

    sample = sample_points(labels, size, seed)

    assert sample.tolist() == sorted(set(sample.tolist()))
    assert len(sample) >= min(size, len(rows))
    assert set(labels[sample].indices) == set(labels.indices)
    if len(sample) > min(size, len(rows)):  # then each of them is the only one of some label
        assert len(sample) <= len(set(labels.indices))
    np.testing.assert_array_equal(sample, sample_points(labels, size, seed))


def write_lines(path, lines):
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as out:
        out.writelines(lines)


def many_rows(folder, format, n_points):
    """A corpus of long rows, as a table, in LF format, or as features."""
    if format == "jsonl":
        row = {"text": "word " * 800, "labels": ["x"]}
        write_lines(folder / "train.jsonl", (f"{json.dumps(row)}\n" for _ in range(n_points)))
    elif format == "lf":
        row = {"uid": "1", "title": "word " * 800, "content": "", "target_ind": [1]}
        write_lines(folder / "trn.json", (f"{json.dumps(row)}\n" for _ in range(n_points)))
    else:
        pairs = " ".join(f"{i}:{i / 7:.5f}" for i in range(400))
        lines = (f"1 {pairs}\n" for _ in range(n_points))
        write_lines(folder / "train.txt", chain([f"{n_points} 400 2\n"], lines))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("format", ["jsonl", "lf", "xmc"])
def test_reading_to_disk_takes_a_fraction_of_the_memory(tmp_path, monkeypatch, format):
    monkeypatch.setattr(files, "CHUNK_ROWS", 200)
    whole = many_rows(tmp_path / "large", format, 4000)
    small = many_rows(tmp_path / "small", format, 2)

    def peak(on_disk):
        load_corpus(small, on_disk=on_disk, test_size=0)  # imports and compiles what it needs
        tracemalloc.start()
        try:
            corpus = load_corpus(whole, on_disk=on_disk, test_size=0)
            train = corpus.train.take(np.arange(0, len(corpus.train), 2))
            assert len(train.texts or range(len(train))) == len(train.labels.indptr) - 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert 2 * peak("on") < peak("off")


def reserving(monkeypatch, code):
    """Let the disk answer with an error where room is asked for."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)


def test_scratch_on_a_full_disk_is_an_error_not_a_signal(monkeypatch):
    reserving(monkeypatch, errno.ENOSPC)

    with pytest.raises(DataError, match=r"cannot be written .*XDG_CACHE_HOME"):
        scratch_array(1000, np.dtype(np.int32))


def test_scratch_needs_no_file_system_that_reserves(monkeypatch):
    reserving(monkeypatch, errno.EOPNOTSUPP)

    actual = scratch_array(1000, np.dtype(np.int32))
    actual[:] = 3

    assert actual.sum() == 3000


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves nothing")
def test_scratch_space_is_reserved_before_it_is_written(monkeypatch):
    taken = []
    reserve = os.posix_fallocate

    def noted(handle, start, size):
        reserve(handle, start, size)
        taken.append((size, os.fstat(handle).st_blocks * 512))

    monkeypatch.setattr(os, "posix_fallocate", noted)

    actual = scratch_array(100_000, np.dtype(np.float32))

    assert not actual.any()
    assert taken[0][0] == 400_000
    assert taken[0][1] >= 400_000
