"""One stage of training: epochs over the points, validation after each, the best one kept."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from elias.data.batches import (
    TokenBatch,
    ahead,
    collate,
    n_batches,
    positives_of,
    send,
    shuffled_batches,
)
from elias.errors import RunError
from elias.model.elias import SearchSizes
from elias.model.one_vs_all import OneVsAll
from elias.progress import progress
from elias.training.optim import Optimizer, WeightAverage, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix
    from torch import Tensor

    from elias.config import EliasConfig, StageConfig
    from elias.data.tokens import Tokens
    from elias.model.elias import EliasModel, Losses

logger = logging.getLogger(__name__)

_AVERAGES_PER_EPOCH = 10


class Points(NamedTuple):
    """Tokenised texts and their labels."""

    tokens: Tokens
    labels: csr_matrix


class EpochReport(NamedTuple):
    """What one epoch came to."""

    stage: str
    epoch: int
    loss: float
    classification_loss: float
    shortlist_loss: float
    seconds: float
    validation: dict[str, float]


@dataclass
class _Best:
    """The weights of the epoch with the highest validation score so far."""

    score: float = -math.inf
    epoch: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, model: EliasModel, score: float, epoch: int) -> None:
        if score <= self.score:
            return
        self.score, self.epoch = score, epoch
        self.weights = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32; sums stay in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class StageLoop:
    """Trains one stage; `run` does it all."""

    model: EliasModel
    stage: StageConfig
    config: EliasConfig
    points: Points
    rng: np.random.Generator
    validate: Callable[[EliasModel], dict[str, float]] | None
    report: Callable[[EpochReport], None]

    def run(self) -> int:
        """Train, leave the best epoch's weights in the model, and return that epoch."""
        with tensor_cores():
            return self._run(next(self.model.parameters()).device)

    def _run(self, device: torch.device) -> int:
        optimizer = Optimizer(self.model, self.stage)
        average = WeightAverage(self.model)
        best = _Best()
        for epoch in range(1, self.stage.epochs + 1):
            start = time.monotonic()
            losses = self._epoch(epoch, optimizer, average, device)
            validation = self._validate(epoch, average, best)
            seconds = time.monotonic() - start
            self.report(EpochReport(self.stage.name, epoch, *losses, seconds, validation))
            waited = epoch - best.epoch
            if validation and 0 < self.config.eval.patience <= waited:
                logger.info("%s: no better epoch for %d, stopping", self.stage.name, waited)
                break
        if best.weights:
            self.model.load_state_dict(best.weights)
            return best.epoch
        if average.started:
            average.swap()
        return epoch

    def _epoch(
        self, epoch: int, optimizer: Optimizer, average: WeightAverage, device: torch.device
    ) -> tuple[float, float, float]:
        lengths = self.points.tokens.lengths
        per_epoch = n_batches(len(lengths), self.stage.batch_size)
        n_steps = per_epoch * self.stage.epochs
        every = max(1, per_epoch // _AVERAGES_PER_EPOCH)
        parents = self._parents(device)
        totals = torch.zeros(3, device=device)
        self.model.train()
        title = f"{self.stage.name} epoch {epoch}/{self.stage.epochs}"
        with progress(title, per_epoch) as advance:
            for tokens, positives in self._batches(device):
                scale = schedule(optimizer.steps, n_steps, self.stage.warmup)
                losses = self._losses(tokens, positives, parents, optimizer, scale)
                losses[0].backward()  # type: ignore[no-untyped-call]
                optimizer.step(scale)
                totals += torch.stack([part.detach() for part in losses])
                done = optimizer.steps
                if done > self.stage.average_from * n_steps and done % every == 0:
                    average.update()
                advance()
        means: list[float] = (totals / per_epoch).tolist()
        if not all(map(math.isfinite, means)):
            raise RunError(
                f"{self.stage.name} epoch {epoch}: the loss is {means[0]}; "
                f"lower the learning rates (stages.{self.stage.name}.encoder_lr, .label_lr)"
            )
        return means[0], means[1], means[2]

    def _batches(self, device: torch.device) -> Iterator[tuple[TokenBatch, Tensor]]:
        """Yield the tokens and positives of an epoch's batches, on the device.

        For a GPU a thread collates them while the batch before is computed.
        """
        lengths, on_gpu = self.points.tokens.lengths, device.type == "cuda"

        def make(rows: NDArray[np.int64]) -> tuple[TokenBatch, Tensor]:
            tokens = collate(self.points.tokens, rows)
            positives = positives_of(self.points.labels, rows)
            return (tokens.pinned(), positives.pin_memory()) if on_gpu else (tokens, positives)

        made = map(make, shuffled_batches(lengths, self.stage.batch_size, self.rng))
        for tokens, positives in ahead(made) if on_gpu else made:
            yield tokens.to(device), send(positives, device)

    def _losses(
        self,
        tokens: TokenBatch,
        positives: Tensor,
        parents: Tensor,
        optimizer: Optimizer,
        scale: float,
    ) -> Losses:
        index = self.config.index
        mean = self.config.loss.reduction == "mean"
        assert index.train_clusters is not None
        assert index.shortlist_size is not None
        wide = max(index.train_clusters, positives.shape[1])
        if isinstance(self.model, OneVsAll):
            update = optimizer.label_update(scale)
            return self.model.all_losses(tokens, positives, mean=mean, update=update)
        return self.model.losses(
            tokens,
            positives,
            parents[positives],
            SearchSizes(wide, index.shortlist_size),
            shortlist_weight=self.stage.shortlist_loss_weight,
            mean=mean,
            gradients=optimizer.gradients,
        )

    def _parents(self, device: torch.device) -> Tensor:
        """Return each label's strongest parent under the present graph; C for padding (L + 1,)."""
        parents = self.model.graph.strongest_parents()
        none = torch.full((1,), self.model.graph.n_clusters, device=device)
        return torch.cat([parents, none])

    def _validate(self, epoch: int, average: WeightAverage, best: _Best) -> dict[str, float]:
        """Return the validation metrics if they are due, keeping the weights if they are best."""
        due = epoch % self.config.eval.every == 0 or epoch == self.stage.epochs
        if self.validate is None or not due:
            return {}
        if average.started:
            average.swap()
        metrics = self.validate(self.model)
        best.offer(self.model, metrics[self.config.eval.select_by], epoch)
        if average.started:
            average.swap()
        return metrics
