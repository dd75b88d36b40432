import json

import numpy as np
import pytest

from elias import load_corpus
from elias.data.atomic import cache_root
from elias.errors import DataError
from elias.text import parallel_tokenize
from elias.text.tokens import Tokens, cached
from elias.text.vectorizer import Featurizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("by_workers", [True, False])
def test_tokens_of_texts_on_disk_are_those_of_texts_in_memory(tmp_path, monkeypatch, by_workers):
    rows = [{"text": f"red cod {i % 5} sea", "labels": ["x"]} for i in range(50)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    texts = load_corpus(path, on_disk="on", test_size=0).train.texts.take(np.arange(49, 3, -1))
    featurizer = Featurizer.fit(list(texts), min_count=1)
    monkeypatch.setattr(parallel_tokenize, "_CHUNK", 16)
    monkeypatch.setattr(parallel_tokenize, "_TEXTS_PER_WORKER", 10 if by_workers else 10**9)
    monkeypatch.setattr(parallel_tokenize, "_n_cores", lambda: 2)
    started = []
    start = parallel_tokenize._start
    monkeypatch.setattr(parallel_tokenize, "_start", lambda *a: (started.append(1), start(*a))[1])

    def tokenize(some):
        return Tokens.from_csr(featurizer.transform(some))

    found = cached("words", texts, tokenize, featurizer)

    expected = tokenize(list(texts))
    assert len(started) == (2 if by_workers else 0)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert isinstance(found.ids, np.memmap)
    assert not (next((cache_root() / "tokens").iterdir()) / "job").exists()


def test_a_worker_that_fails_is_reported_in_one_line(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "t", "labels": ["x"]}] * 30)
    texts = load_corpus(path, on_disk="on", test_size=0).train.texts
    monkeypatch.setattr(parallel_tokenize, "_TEXTS_PER_WORKER", 10)
    monkeypatch.setattr(parallel_tokenize, "_n_cores", lambda: 2)
    monkeypatch.setattr(parallel_tokenize, "_IDF_FILE", "here.npy")  # unknown to the workers
    featurizer = Featurizer.fit(["t"], min_count=1)

    with pytest.raises(DataError, match="a tokenizer process failed") as caught:
        cached("words", texts, None, featurizer)

    assert "\n" not in str(caught.value)
    assert list((cache_root() / "tokens").iterdir()) == []
