import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from elias.text.batches import (
    collate,
    n_batches,
    ordered_batches,
    positives_of,
    prefetch,
    shuffled_batches,
)
from elias.text.tokens import Tokens

LENGTHS = st.lists(st.integers(0, 30), max_size=200).map(np.array)


@given(lengths=LENGTHS, batch_size=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_shuffled_batches_hold_every_row_once(lengths, batch_size, seed):
    batches = list(shuffled_batches(lengths, batch_size, np.random.default_rng(seed)))

    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert len(batches) == n_batches(len(lengths), batch_size)


@given(lengths=LENGTHS, batch_size=st.integers(1, 9))
def test_ordered_batches_hold_every_row_once_shortest_first(lengths, batch_size):
    batches = list(ordered_batches(lengths, batch_size))

    rows = [row for batch in batches for row in batch]
    assert sorted(rows) == list(range(len(lengths)))
    assert [lengths[row] for row in rows] == sorted(lengths)
    assert len(batches) == n_batches(len(lengths), batch_size)


def test_texts_of_similar_length_share_a_batch_and_epochs_differ():
    lengths, rng = np.random.default_rng(0).integers(1, 500, 1000), np.random.default_rng(1)

    first, second = (list(shuffled_batches(lengths, 20, rng)) for _ in range(2))

    assert max(np.ptp(lengths[batch]) for batch in first) < 100
    assert not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    longest = [lengths[batch].max() for batch in first]
    assert longest != sorted(longest)  # batches come in random order


@given(
    rows=st.lists(st.lists(st.integers(0, 7), unique=True, max_size=5), min_size=1, max_size=6),
    data=st.data(),
)
def test_positives_come_ascending_and_padded(rows, data):
    indices = np.array([label for row in rows for label in row], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, rows)])
    labels = csr_matrix((np.ones(len(indices)), indices, offsets), shape=(len(rows), 8))
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))

    positives = positives_of(labels, np.array(chosen))

    width = max(1, *(len(rows[row]) for row in chosen), 0)
    expected = [sorted(rows[row]) + [8] * (width - len(rows[row])) for row in chosen]
    assert positives.tolist() == expected
    assert positives.dtype == torch.int64


def test_a_batch_holds_the_tokens_of_its_rows():
    tokens = Tokens(
        np.array([0, 2, 2, 5]), np.arange(5, dtype=np.int32), np.arange(5, dtype=np.float32)
    )

    batch = collate(tokens, np.array([2, 1, 0]))

    assert len(batch) == 3
    assert batch.ids.tolist() == [2, 3, 4, 0, 1]
    assert batch.ids.dtype == torch.int64
    assert batch.weights.tolist() == [2, 3, 4, 0, 1]
    assert batch.offsets.tolist() == [0, 3, 3, 5]
    assert batch.lengths().tolist() == [3, 0, 2]
    assert batch.longest == 3


def test_tokens_without_weights_give_batches_without_weights():
    batch = collate(Tokens(np.array([0, 1]), np.array([7], dtype=np.int32)), np.array([0, 0]))

    assert batch.weights is None
    assert batch.to(torch.device("cpu")).ids.tolist() == [7, 7]


def test_prefetched_items_are_in_order_and_complete():
    assert list(prefetch(iter(range(20)), depth=2)) == list(range(20))


def test_errors_while_prefetching_are_raised_in_the_caller():
    def make():
        yield 1
        raise ValueError("no more")

    taken = prefetch(make())

    assert next(taken) == 1
    with pytest.raises(ValueError, match="no more"):
        next(taken)


def test_the_prefetch_thread_ends_when_the_iterator_is_closed():
    taken = prefetch(iter(range(10**9)), depth=1)
    next(taken)

    taken.close()

    assert all("elias-prefetch" not in thread.name for thread in threading.enumerate())
