"""Stage 0: train the encoder to embed texts close to the texts of their labels.

Each step samples one label for each text of a batch, and compares all these texts with the label
texts of all sampled labels. A label without a text is represented by another training text that has
it. The loss is the cross-entropy over the cosines of φ, from texts to label texts and from label
texts to texts. The other labels of a text are not used as its negatives.
After a third of the epochs, batches consist of groups of similar texts, whose labels are harder to
tell apart. See docs/explanation/label-text.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse import csc_matrix, csr_matrix
from torch import Tensor
from torch.nn import functional

from elias.clustering import balanced_clusters
from elias.config.resolve import MAX_SCORED_LABELS
from elias.model.batch_inference import embed_all
from elias.model.one_vs_all import OneVsAll
from elias.progress import progress, progress_disabled
from elias.rerank.sparse_ranker import unit_embedding
from elias.text.batches import (
    Batch,
    TokenBatch,
    collate,
    n_batches,
    positives_of,
    prefetch,
    shuffled_batches,
)
from elias.text.tokens import Tokens
from elias.training.optimizer import Optimizer, schedule
from elias.training.stage import Points, torch_on_one_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from elias.config import ResolvedStage
    from elias.model.encoder import TextEncoder

EPOCHS = 10
MAX_STEPS = {"bag": 20_000, "transformer": 5_000}
"""Maximum number of steps for each kind of encoder. It reduces the epochs of large corpora, but at
least one epoch is trained."""
MAX_BATCH_SIZE, MAX_BATCH_TOKENS = 1024, 1 << 15
"""Maximum number of texts and of tokens in the enlarged batches of a transformer, see
`contrast_batch_size`."""
TEMPERATURE = 0.05
"""Temperature of the softmax: cosines are divided by this number."""
NEAR_TEXTS = True
"""Whether batches consist of groups of similar texts after a third of the epochs."""
GROUP_SIZE = 8
"""Approximate number of texts in a group of similar texts."""
EPOCHS_PER_GROUPING = 5


def train_by_contrast(
    encoder: TextEncoder, points: Points, label_texts: Points, stage: ResolvedStage, seed: int
) -> float:
    """Train the encoder on pairs of a text and one of its labels.

    Return the mean loss of the last epoch. In each epoch, one label of each text is sampled, see
    `PairSampler`. Dropout on φ is off, because it would change cosines.

    Args:
        encoder: The encoder, on its device.
        points: The training points.
        label_texts: One point for each label that has a text, with this label as its only label.
        stage: The first stage, whose encoder learning rates are used. The batch size follows from
            its batch size, see `contrast_batch_size`.
        seed: Seed of batches and labels.
    """
    rng, tokens = np.random.default_rng(seed), points.tokens
    device = next(encoder.parameters()).device
    kind = "bag" if encoder.uses_numba else "transformer"
    batch_size = contrast_batch_size(encoder, tokens, stage.batch_size)
    per_epoch = n_batches(len(tokens), batch_size)
    n_epochs = max(1, min(EPOCHS, MAX_STEPS[kind] // per_epoch))
    first_near = -(-n_epochs // 3) if NEAR_TEXTS else n_epochs
    n_steps = n_epochs * per_epoch
    model = OneVsAll(encoder, 1)  # only the encoder has gradients
    optimizer = Optimizer(model, stage)
    sampler = PairSampler(points, label_texts, rng)
    title = "Contrastive training"
    with progress(title, n_steps) as advance, torch_on_one_thread(model):
        for epoch in range(n_epochs):
            batches = shuffled_batches(tokens.lengths, batch_size, rng)
            if epoch >= first_near:
                if (epoch - first_near) % EPOCHS_PER_GROUPING == 0:
                    with progress_disabled():
                        groups = near_groups(embed_all(encoder, tokens), int(rng.integers(2**32)))
                batches = grouped_batches(groups, batch_size, rng)
            encoder.train()
            encoder.dropout.eval()
            total, n_pairs = torch.zeros((), device=device), 0
            pairs_of = map(sampler.pinned if device.type == "cuda" else sampler.sample, batches)
            for step, pairs in enumerate(prefetch(pairs_of), start=epoch * per_epoch):
                if len(pairs):
                    loss = pairs.to(device).loss(encoder)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step(schedule(step, n_steps))
                    total += loss.detach() * len(pairs)  # a float would wait for the GPU
                    n_pairs += len(pairs)
                advance()
    optimizer.apply_pending_decay()
    return float(total) / max(1, n_pairs)


def contrast_batch_size(encoder: TextEncoder, tokens: Tokens, batch_size: int) -> int:
    """Return the batch size of stage 0, given the batch size of the first stage.

    A bag encoder uses the same size. A transformer uses batches up to four times as large, because
    the other texts of a batch are the negatives. `MAX_BATCH_SIZE` and `MAX_BATCH_TOKENS` limit its
    batches.
    """
    if encoder.uses_numba:
        return batch_size
    longest = int(tokens.lengths.max(initial=1))
    larger = min(4 * batch_size, MAX_BATCH_SIZE, MAX_BATCH_TOKENS // longest)
    return max(batch_size, larger)


def near_groups(embedding: NDArray[np.float32], seed: int) -> NDArray[np.int64]:
    """Cluster similar texts in groups of about `GROUP_SIZE`. Return the group of each text."""
    no_words = csr_matrix((len(embedding), 0), dtype=np.float32)
    directions = unit_embedding(embedding - embedding.mean(axis=0))
    n_groups = max(1, len(embedding) // GROUP_SIZE)
    return balanced_clusters(no_words, directions, n_groups, seed)


def grouped_batches(
    groups: NDArray[np.int64], batch_size: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield batches of row indices: groups in random order, with the rows of a group together."""
    order = np.argsort(rng.permutation(groups.max(initial=0) + 1)[groups], kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def paired_labels(labels: csr_matrix, label_texts: Points) -> NDArray[np.bool_]:
    """Return whether `PairSampler` can sample each label: it needs a label text, or two points."""
    n_labels = labels.shape[1]
    is_paired = np.zeros(n_labels, dtype=bool)
    if n_labels > MAX_SCORED_LABELS:
        is_paired = np.bincount(labels.indices, minlength=n_labels) >= 2
    is_paired[label_texts.labels.indices] = True
    return is_paired


@dataclass(frozen=True, slots=True)
class Pairs(Batch):
    """A batch of B texts, and texts of the m different labels that were sampled for them."""

    tokens: TokenBatch
    """The B texts, followed by the m texts of labels."""
    relevant: Tensor
    """(B, m) mask: True if the text has the label, or shares any label with a text that represents
    the label."""
    sampled: Tensor
    """(B,) index of the label sampled for each text."""

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self.sampled)

    def loss(self, encoder: TextEncoder) -> Tensor:
        """Return the `contrast_loss` of the batch."""
        return contrast_loss(encoder(self.tokens).float(), self.relevant, self.sampled)


class PairSampler:
    """Sampler of one label for each text, and of a text for each of these labels.

    A label without a label text is represented by another point that has it, if there are more than
    `MAX_SCORED_LABELS` labels: texts that share one of few labels are not similar. Labels with a
    label text are sampled with a probability ∝ 1/√frequency, others ∝ 1/frequency, because texts
    that share a frequent label are not similar either.
    """

    def __init__(self, points: Points, label_texts: Points, rng: np.random.Generator) -> None:
        n_labels = points.labels.shape[1]
        self._points, self._label_tokens = points, label_texts.tokens
        self._rng = rng
        self._text_of = np.full(n_labels + 1, -1)
        self._text_of[label_texts.labels.indices] = np.arange(len(label_texts.tokens))
        counts = np.bincount(points.labels.indices, minlength=n_labels + 1)
        has_text = self._text_of >= 0
        power = np.where(has_text, 0.5, 1.0)
        self._is_paired = np.append(paired_labels(points.labels, label_texts), False)
        log_weight = -power * np.log(np.maximum(counts, 1))
        self._log_weight = np.where(self._is_paired, log_weight, -np.inf)
        self._points_of: csc_matrix | None = None
        if (self._is_paired & ~has_text).any():
            ones = np.ones(points.labels.nnz, dtype=np.bool_)  # a small dtype saves memory
            entries = ones, points.labels.indices, points.labels.indptr
            self._points_of = csr_matrix(entries, shape=points.labels.shape).tocsc()

    def sample(self, rows: NDArray[np.int64]) -> Pairs:
        """Sample a label of each point. Leave out points if none of their labels is paired."""
        of_points = self._points.labels
        positives = positives_of(of_points, rows).numpy()
        keys = self._log_weight[positives] + self._rng.gumbel(size=positives.shape)
        drawn = positives[np.arange(len(rows)), keys.argmax(axis=1)]
        rows, drawn = rows[self._is_paired[drawn]], drawn[self._is_paired[drawn]]
        labels, first, sampled = np.unique(drawn, return_index=True, return_inverse=True)
        order = np.argsort(self._text_of[labels] < 0, kind="stable")  # labels with a text first
        labels, first, sampled = labels[order], first[order], np.argsort(order)[sampled]
        relevant = of_points[rows][:, labels].toarray() > 0
        n_texts = np.count_nonzero(self._text_of[labels] >= 0)
        texts = self._label_tokens.take(self._text_of[labels[:n_texts]])
        if n_texts < len(labels):
            others = self._other_points(labels[n_texts:], rows[first[n_texts:]])
            texts = Tokens.concatenate(texts, self._points.tokens.take(others))
            relevant[:, n_texts:] |= (of_points[rows] @ of_points[others].T).toarray() > 0
            # if several texts draw a label, one of them may represent it
            is_pair = np.append(np.full(n_texts, -1), others)[sampled] != rows
            rows, sampled, relevant = rows[is_pair], sampled[is_pair], relevant[is_pair]
        tokens = Tokens.concatenate(self._points.tokens.take(rows), texts)
        return Pairs(
            collate(tokens, np.arange(len(tokens))),
            torch.from_numpy(relevant),
            torch.from_numpy(sampled),
        )

    def _other_points(
        self, labels: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return a random point of each label, but not the given one."""
        assert self._points_of is not None
        starts, points = self._points_of.indptr, self._points_of.indices
        start, count = starts[labels], starts[labels + 1] - starts[labels]
        place = (self._rng.random(len(labels)) * count).astype(np.int64)
        place = (place + (points[start + place] == rows)) % count
        return np.asarray(points[start + place], dtype=np.int64)

    def pinned(self, rows: NDArray[np.int64]) -> Pairs:
        """Return the result of `sample` in pinned memory."""
        return self.sample(rows).pin_memory()


def contrast_loss(embedding: Tensor, relevant: Tensor, sampled: Tensor) -> Tensor:
    """Return the mean cross-entropy of predicting each text's label and each label's text.

    Args:
        embedding: (B + m, D) φ of B texts, followed by φ of m label texts.
        relevant: (B, m) mask: True if the text has the label.
        sampled: (B,) index of the label sampled for each text. Other labels of the text, and other
            texts of the label, are not used as negatives.

    >>> phi = torch.eye(2).repeat(2, 1)  # each text is like its own label
    >>> right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    >>> near = contrast_loss(phi, torch.eye(2) > 0, right)
    >>> bool(near < 1e-6 < contrast_loss(phi, torch.eye(2) < 1, wrong))
    True
    """
    n_texts = len(sampled)
    unit = functional.normalize(embedding, dim=1)
    logits = unit[:n_texts] @ unit[n_texts:].T / TEMPERATURE
    pair = logits.gather(1, sampled.unsqueeze(1)).squeeze(1)
    others = logits.masked_fill(relevant, -torch.inf)
    to_label = torch.logaddexp(pair, others.logsumexp(dim=1)) - pair
    to_text = torch.logaddexp(pair, others.logsumexp(dim=0)[sampled]) - pair
    return (to_label + to_text).mean() / 2
