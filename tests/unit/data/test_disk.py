"""A corpus on disk is the corpus in memory, row for row, and takes little memory."""

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, random

import elias
from elias.data import convert, large, load_corpus, tokenising
from elias.data.disk import DiskTexts, _scratch, take_rows
from elias.data.features import Featurizer
from elias.data.formats import streaming
from elias.data.sampling import sample_points
from elias.data.staging import cache_root
from elias.data.synthetic import synthetic_corpus
from elias.data.tokens import Tokens, cached
from elias.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(streaming, "_CHUNK", 7)  # so that a small corpus comes in several chunks
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
        assert list(disk.split(name).texts) == split.texts
        assert (disk.split(name).labels != split.labels).nnz == 0
        assert disk.split(name).labels.has_canonical_format


@pytest.mark.parametrize("format", ["jsonl", "csv", "tsv", "parquet", "folder", "pecos"])
def test_every_format_that_streams_gives_the_same_corpus(tmp_path, format):
    made = synthetic_corpus(n_points=60, n_labels=12)
    target = tmp_path / "corpus"
    convert(made, target, format)

    assert_same(*both(target))


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


def test_texts_are_mended_on_the_way_to_disk(tmp_path):
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
    whole = large.store_tables
    monkeypatch.setattr(large, "store_tables", lambda *args: (reads.append(1), whole(*args)))

    again = load_corpus(path, on_disk="on")
    assert not reads
    assert again.fingerprint() == first.fingerprint()

    write_jsonl(path, [{"text": "another", "labels": ["x"]}] * 20)
    os.utime(path, (1, 1))
    assert load_corpus(path, on_disk="on", test_size=0).train.texts[0] == "another"
    assert reads


@pytest.mark.parametrize("name", ["train/texts.bin", "train/indices.bin", "corpus.json"])
def test_a_damaged_store_is_read_again(tmp_path, name):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "t", "labels": ["x"]}] * 20)
    before = load_corpus(path, on_disk="on").fingerprint()
    file = next((cache_root() / "corpora").iterdir()) / name
    file.write_bytes(file.read_bytes()[:-2])

    assert load_corpus(path, on_disk="on").fingerprint() == before


def test_large_files_go_to_disk_by_themselves(tmp_path, monkeypatch):
    rows = [{"text": "t", "labels": ["x"]}] * 20
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    assert not load_corpus(path).train.on_disk

    monkeypatch.setattr(large, "LARGE", 100)

    assert load_corpus(path).train.on_disk
    assert load_corpus(packed).train.on_disk
    assert not load_corpus(path, on_disk="off").train.on_disk


def test_other_formats_are_read_to_memory_and_that_is_said(tmp_path, caplog):
    path = tmp_path / "pecos.txt"
    path.write_text("0\tcod\n1\twine\n")

    assert not load_corpus(path, on_disk="on").train.on_disk
    assert "read to memory" in caplog.text


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


@pytest.mark.parametrize("by_workers", [True, False])
def test_tokens_of_texts_on_disk_are_those_of_texts_in_memory(tmp_path, monkeypatch, by_workers):
    rows = [{"text": f"red cod {i % 5} sea", "labels": ["x"]} for i in range(50)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    texts = load_corpus(path, on_disk="on", test_size=0).train.texts.take(np.arange(49, 3, -1))
    featurizer = Featurizer.fit(list(texts), min_count=1)
    monkeypatch.setattr(tokenising, "_CHUNK", 16)
    monkeypatch.setattr(tokenising, "_FEW", 10 if by_workers else 10**9)
    monkeypatch.setattr(tokenising, "_n_cores", lambda: 2)
    started = []
    start = tokenising._start
    monkeypatch.setattr(tokenising, "_start", lambda *a: (started.append(1), start(*a))[1])

    def tokenise(some):
        return Tokens.from_csr(featurizer.transform(some))

    def write(some, folder):
        tokenising.write_tokens(some, folder, tokenise, featurizer)

    found = cached("words", texts, tokenise, write)

    expected = tokenise(list(texts))
    assert len(started) == (2 if by_workers else 0)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert isinstance(found.ids, np.memmap)
    assert not (next((cache_root() / "tokens").iterdir()) / "job").exists()


def test_a_worker_that_fails_is_told_in_one_line(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "t", "labels": ["x"]}] * 30)
    texts = load_corpus(path, on_disk="on", test_size=0).train.texts
    monkeypatch.setattr(tokenising, "_FEW", 10)
    monkeypatch.setattr(tokenising, "_n_cores", lambda: 2)
    monkeypatch.setattr(tokenising, "_FREQUENCIES", "here.npy")  # which workers do not know of
    featurizer = Featurizer.fit(["t"], min_count=1)

    def write(some, folder):
        tokenising.write_tokens(some, folder, None, featurizer)

    with pytest.raises(DataError, match="a process that tokenises has failed") as caught:
        cached("words", texts, None, write)

    assert "\n" not in str(caught.value)
    assert list((cache_root() / "tokens").iterdir()) == []


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


READING = """
import resource, sys, tracemalloc
import numpy as np
from elias.data import load_corpus
load_corpus(sys.argv[2], on_disk=sys.argv[3], test_size=0)  # imports and compiles what it needs
tracemalloc.start()
corpus = load_corpus(sys.argv[1], on_disk=sys.argv[3], test_size=0)
train = corpus.train.take(np.arange(0, len(corpus.train), 2))
assert len(train.texts) == len(train.labels.indptr) - 1
print(tracemalloc.get_traced_memory()[1])
"""


def test_reading_to_disk_takes_a_fraction_of_the_memory(tmp_path):
    n_points = 10_000
    rows = ({"text": f"{i} " + "word " * 800, "labels": [f"l{i % 99}"]} for i in range(n_points))
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    small = write_jsonl(tmp_path / "small.jsonl", [{"text": "t", "labels": ["x"]}])
    package = str(Path(elias.__file__).parent.parent)

    def peak(on_disk):
        command = [sys.executable, "-c", READING, str(path), str(small), on_disk]
        done = subprocess.run(
            command,
            capture_output=True,
            check=True,
            text=True,
            env={**os.environ, "PYTHONPATH": package},
        )
        return int(done.stdout)

    size = path.stat().st_size
    assert peak("on") < size // 2 < size < peak("off")


def reserving(monkeypatch, code):
    """Let the disk answer with an error where room is asked for."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)


def test_scratch_on_a_full_disk_is_an_error_not_a_signal(monkeypatch):
    reserving(monkeypatch, errno.ENOSPC)

    with pytest.raises(DataError, match=r"no room for a scratch file .*XDG_CACHE_HOME"):
        _scratch(1000, np.dtype(np.int32))


def test_scratch_needs_no_file_system_that_reserves(monkeypatch):
    reserving(monkeypatch, errno.EOPNOTSUPP)

    found = _scratch(1000, np.dtype(np.int32))
    found[:] = 3

    assert found.sum() == 3000


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves nothing")
def test_scratch_has_its_room_before_it_is_written(monkeypatch):
    taken = []
    reserve = os.posix_fallocate

    def noted(handle, start, size):
        reserve(handle, start, size)
        taken.append((size, os.fstat(handle).st_blocks * 512))

    monkeypatch.setattr(os, "posix_fallocate", noted)

    found = _scratch(100_000, np.dtype(np.float32))

    assert not found.any()
    assert taken[0][0] == 400_000
    assert taken[0][1] >= 400_000
