"""Stage 0: train the encoder to place texts near the texts of their labels.

Each step samples one label of each text in a batch, and compares the texts with the texts of these
labels. The loss is the cross-entropy over the cosines of φ, from texts to label texts and back.
Other labels of a text are not used as negatives. See docs/explanation/label-text.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from elias.model.one_vs_all import OneVsAll
from elias.progress import progress
from elias.text.batches import collate, n_batches, positives_of, shuffled_batches
from elias.text.tokens import Tokens
from elias.training.optimizer import Optimizer, schedule
from elias.training.stage import Points, torch_on_one_thread

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from elias.config import ResolvedStage
    from elias.model.encoder import TextEncoder

EPOCHS = 10
TEMPERATURE = 0.05
"""Number by which cosines are divided before the softmax."""


def train_by_contrast(
    encoder: TextEncoder, points: Points, label_texts: Points, stage: ResolvedStage, seed: int
) -> float:
    """Train the encoder on pairs of a text and one of its labels; return the last mean loss.

    In each epoch one label of each text is sampled, with a probability ∝ 1/√frequency. A point is
    left out if none of its labels has a text. φ has no dropout, because it would change cosines.

    Args:
        encoder: The encoder, on its device.
        points: The training points.
        label_texts: One point for each label that has a text, with this label as its only label.
        stage: The first stage, whose batch size and encoder learning rates are used.
        seed: Seed of batches and labels.
    """
    rng, n_labels = np.random.default_rng(seed), points.labels.shape[1]
    device = next(encoder.parameters()).device
    text_of = np.full(n_labels + 1, -1)
    text_of[label_texts.labels.indices] = np.arange(len(label_texts.tokens))
    counts = np.bincount(points.labels.indices, minlength=n_labels + 1)
    log_weight = np.where(text_of >= 0, -0.5 * np.log(np.maximum(counts, 1)), -np.inf)
    model = OneVsAll(encoder, 1)  # only the encoder has gradients
    optimizer = Optimizer(model, stage)
    per_epoch = n_batches(len(points.tokens), stage.batch_size)
    encoder.train()
    encoder.dropout.eval()
    losses: list[float] = []
    title = "Contrastive training on label texts"
    with progress(title, EPOCHS * per_epoch) as advance, torch_on_one_thread(model):
        for step in range(EPOCHS * per_epoch):
            if step % per_epoch == 0:
                batches = shuffled_batches(points.tokens.lengths, stage.batch_size, rng)
                losses.clear()
            rows = next(batches)
            positives = positives_of(points.labels, rows).numpy()
            keys = log_weight[positives] + rng.gumbel(size=positives.shape)
            drawn = positives[np.arange(len(rows)), keys.argmax(axis=1)]
            rows, drawn = rows[text_of[drawn] >= 0], drawn[text_of[drawn] >= 0]
            if len(rows):
                labels, sampled = np.unique(drawn, return_inverse=True)
                texts = label_texts.tokens.take(text_of[labels])
                tokens = Tokens.concatenate(points.tokens.take(rows), texts)
                embedding = encoder(collate(tokens, np.arange(len(tokens))).to(device)).float()
                relevant = torch.from_numpy(_relevant(points, rows, labels)).to(device)
                loss = contrast_loss(embedding, relevant, torch.from_numpy(sampled).to(device))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step(schedule(step, EPOCHS * per_epoch))
                losses.append(float(loss.detach()))
            advance()
    optimizer.apply_pending_decay()
    return float(np.mean(losses)) if losses else 0.0


def contrast_loss(embedding: Tensor, relevant: Tensor, sampled: Tensor) -> Tensor:
    """Return the mean cross-entropy of predicting each text's label and each label's text.

    Args:
        embedding: (B + m, D) φ of B texts, followed by φ of m label texts.
        relevant: (B, m) whether each text has each label.
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


def _relevant(
    points: Points, rows: NDArray[np.int64], labels: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return a mask (rows, labels) that is True where a point has a label."""
    relevant: NDArray[np.bool_] = points.labels[rows][:, labels].toarray() > 0
    return relevant
