import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elias import load_corpus
from elias.data import atomic
from elias.errors import DataError
from elias.text import tokens as module
from elias.text.tokens import Tokens, cache_folder, cached, content_key
from elias.text.vectorizer import Featurizer

TEXTS = ["red cod", "", "tape"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class Tokeniser:
    """Letters as tokens; counts how often it was called."""

    def __init__(self, weights=True):
        self.calls = 0
        self.weights = weights

    def __call__(self, texts):
        self.calls += 1
        ids = np.array([ord(letter) for text in texts for letter in text], dtype=np.int32)
        offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
        weights = ids.astype(np.float32) / 7 if self.weights else None
        return Tokens(offsets, ids, weights, n_truncated=2)


def assert_same(actual, expected):
    assert np.array_equal(actual.offsets, expected.offsets)
    assert np.array_equal(actual.ids, expected.ids)
    assert actual.n_truncated == expected.n_truncated
    assert (actual.weights is None) == (expected.weights is None)
    if expected.weights is not None:
        assert np.array_equal(actual.weights, expected.weights)


@given(
    texts=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8),
    start=st.integers(0, 9),
    end=st.integers(0, 9),
)
def test_a_part_equals_the_taken_rows_and_shares_the_arrays(texts, start, end):
    offsets = np.cumsum([0, *map(len, texts)])
    ids = np.array([token for text in texts for token in text], dtype=np.int32)
    tokens = Tokens(offsets=offsets, ids=ids, weights=ids / np.float32(10))

    part = tokens.part(slice(start, end))

    taken = tokens.take(np.arange(len(texts))[start:end])
    assert part.offsets.tolist() == taken.offsets.tolist()
    assert part.ids.tolist() == taken.ids.tolist()
    assert part.weights.tolist() == taken.weights.tolist()
    assert part.ids.base is ids


@given(
    texts=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), data=st.data()
)
def test_taking_rows_takes_their_tokens_in_that_order(texts, data):
    tokens = Tokens(
        offsets=np.cumsum([0, *map(len, texts)]),
        ids=np.array([i for text in texts for i in text], dtype=np.int32),
        weights=np.array([i / 3 for text in texts for i in text], dtype=np.float32),
    )
    rows = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=8))

    taken = tokens.take(np.array(rows, dtype=np.int64))

    assert len(taken) == len(rows)
    for index, row in enumerate(rows):
        part = slice(taken.offsets[index], taken.offsets[index + 1])
        assert taken.ids[part].tolist() == texts[row]
        assert taken.weights[part].tolist() == pytest.approx([i / 3 for i in texts[row]])


@pytest.mark.parametrize("weights", [True, False])
def test_a_second_call_reads_the_cache_instead_of_tokenizing(weights):
    tokenize = Tokeniser(weights)
    first = cached("letters", TEXTS, tokenize)

    again = cached("letters", TEXTS, tokenize)

    assert tokenize.calls == 1
    assert_same(again, Tokeniser(weights)(TEXTS))
    assert_same(first, again)


def test_tokens_come_memory_mapped():
    assert isinstance(cached("letters", TEXTS, Tokeniser()).ids, np.memmap)


@pytest.mark.parametrize("name", ["offsets.npy", "ids.npy", "truncated.npy", "weights.npy"])
@pytest.mark.parametrize("content", [b"", b"garbage", "half"])
def test_a_damaged_cache_is_rebuilt(name, content):
    tokenize = Tokeniser()
    cached("letters", TEXTS, tokenize)
    file = cache_folder() / content_key("letters", TEXTS) / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 3] if content == "half" else content)

    again = cached("letters", TEXTS, tokenize)
    third = cached("letters", TEXTS, tokenize)

    assert tokenize.calls == 2
    assert_same(again, tokenize(TEXTS))
    assert_same(third, again)


def flip_bit(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["offsets.npy", "ids.npy", "truncated.npy", "weights.npy"])
def test_a_flipped_bit_in_the_cache_is_noticed_and_reported(name, caplog):
    tokenize = Tokeniser()
    first = cached("letters", TEXTS, tokenize)
    flip_bit(cache_folder() / content_key("letters", TEXTS) / name, -3)

    again = cached("letters", TEXTS, tokenize)

    assert_same(again, tokenize(TEXTS))
    assert np.isfinite(first.weights).all()
    assert "the cached tokens are damaged" in caplog.text
    assert f"{name} was changed" in caplog.text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ids.npy", [-1_000_000, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]),
        ("ids.npy", [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 300]),
        ("offsets.npy", [0, 50, 7, 11]),
        ("offsets.npy", [-3, 7, 7, 11]),
    ],
)
def test_damage_that_keeps_the_time_of_the_file_never_reaches_a_kernel(name, values):
    tokenize = Tokeniser()
    cached("letters", TEXTS, tokenize, n_ids=300)
    file = cache_folder() / content_key("letters", TEXTS) / name
    before = file.stat()
    np.save(file, np.array(values, dtype=np.load(file).dtype))
    module.os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    again = cached("letters", TEXTS, tokenize, n_ids=300)

    assert_same(again, tokenize(TEXTS))


@pytest.mark.parametrize(
    ("name", "weights"), [("offsets.npy", True), ("ids.npy", False), ("weights.npy", True)]
)
def test_a_cache_whose_parts_do_not_fit_together_is_rebuilt(name, weights):
    tokenize = Tokeniser(weights)
    cached("letters", TEXTS, tokenize)
    file = cache_folder() / content_key("letters", TEXTS) / name
    np.save(file, np.load(file)[:-1])

    again = cached("letters", TEXTS, tokenize)

    assert tokenize.calls == 2
    assert_same(again, tokenize(TEXTS))


@pytest.mark.parametrize("name", ["offsets.npy", "ids.npy", "truncated.npy"])
def test_a_cache_that_lost_a_file_is_rebuilt(name):
    tokenize = Tokeniser()
    cached("letters", TEXTS, tokenize)
    (cache_folder() / content_key("letters", TEXTS) / name).unlink()

    cached("letters", TEXTS, tokenize)

    assert tokenize.calls == 2


@pytest.mark.parametrize(
    ("fingerprint", "texts"),
    [
        ("letters", ["red cod", "", "Tape"]),
        ("letters", ["red cod", "tape", ""]),
        ("letters", ["red cod", "tape"]),
        ("letters", ["red co", "d", "tape"]),
        ("other letters", TEXTS),
    ],
)
def test_other_texts_or_another_tokenizer_miss_the_cache(fingerprint, texts):
    tokenize = Tokeniser()
    cached("letters", TEXTS, tokenize)

    actual = cached(fingerprint, texts, tokenize)

    assert tokenize.calls == 2
    assert len(actual) == len(texts)


def test_a_lone_surrogate_can_be_cached():
    assert len(cached("letters", ["\ud800"], Tokeniser())) == 1


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(cache, caplog):
    (cache / "elias").write_text("a file where a folder should be")

    with caplog.at_level(logging.WARNING):
        actual = cached("letters", TEXTS, Tokeniser())

    assert_same(actual, Tokeniser()(TEXTS))
    assert "cannot cache" in caplog.text


def test_no_incomplete_cache_entry_is_left(monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.np, "save", fail)

    with pytest.raises(KeyboardInterrupt):
        cached("letters", TEXTS, Tokeniser())

    assert list(cache_folder().iterdir()) == []


def test_the_least_recently_used_entries_are_evicted_first(monkeypatch):
    tokenize = Tokeniser()
    for name in "abc":
        cached(name, TEXTS, tokenize)
    entries = {name: cache_folder() / content_key(name, TEXTS) for name in "abcd"}
    for age, name in enumerate("bca"):  # b used longest ago
        module.os.utime(entries[name], (1000 + age, 1000 + age))
    size = sum(file.stat().st_size for file in entries["a"].iterdir())
    monkeypatch.setattr(module, "_CACHE_LIMIT", 3 * size)
    monkeypatch.setattr(atomic, "_used", set())  # as in another process

    cached("d", TEXTS, tokenize)

    assert [name for name in "abcd" if entries[name].exists()] == ["a", "c", "d"]


def test_entries_in_use_by_this_process_are_not_evicted(monkeypatch):
    monkeypatch.setattr(module, "_CACHE_LIMIT", 1)

    first = cached("a", TEXTS, Tokeniser())
    cached("b", TEXTS, Tokeniser())

    assert_same(first, Tokeniser()(TEXTS))
    assert all((cache_folder() / content_key(name, TEXTS)).exists() for name in "ab")


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("by_workers", [True, False])
def test_tokens_of_texts_on_disk_are_those_of_texts_in_memory(tmp_path, monkeypatch, by_workers):
    rows = [{"text": f"red cod {i % 5} sea", "labels": ["x"]} for i in range(50)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    texts = load_corpus(path, on_disk="on", test_size=0).train.texts.take(np.arange(49, 3, -1))
    featurizer = Featurizer.fit(list(texts), min_count=1)
    monkeypatch.setattr(module, "_CHUNK", 16)
    monkeypatch.setattr(module, "_TEXTS_PER_WORKER", 10 if by_workers else 10**9)
    monkeypatch.setattr(module, "_n_cores", lambda: 2)
    calls = []

    def tokenize(some):
        calls.append(len(some))
        return Tokens.from_csr(featurizer.transform(some))

    actual = cached("words", texts, tokenize, featurizer)

    assert calls == ([] if by_workers else [16, 16, 14])
    expected = tokenize(list(texts))
    np.testing.assert_array_equal(actual.offsets, expected.offsets)
    np.testing.assert_array_equal(actual.ids, expected.ids)
    np.testing.assert_array_equal(actual.weights, expected.weights)
    assert isinstance(actual.ids, np.memmap)


def test_a_worker_that_fails_is_reported_in_one_line(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "t", "labels": ["x"]}] * 30)
    texts = load_corpus(path, on_disk="on", test_size=0).train.texts
    monkeypatch.setattr(module, "_TEXTS_PER_WORKER", 10)
    monkeypatch.setattr(module, "_n_cores", lambda: 2)
    featurizer = replace(Featurizer.fit(["tape"], min_count=1), char_ngrams=None)  # not valid

    with pytest.raises(DataError, match="a tokenizer process failed") as caught:
        cached("words", texts, None, featurizer)

    assert "\n" not in str(caught.value)
    assert list(cache_folder().iterdir()) == []
