"""Train one stage: epochs, validation, best weights."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from elias.config import StageConfig
from elias.distributed import SingleProcess
from elias.distributed.data_parallel import ShardedBatch, shard_batch
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import RunError
from elias.model.elias import SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.one_vs_all import OneVsAll
from elias.persistence.manifest import all_finite
from elias.progress import progress
from elias.text.batches import (
    PaddedBatch,
    TokenBatch,
    collate,
    n_batches,
    pad_batch,
    positives_of,
    prefetch,
    shuffled_batches,
    to_device,
)
from elias.training.averaging import WeightAverage
from elias.training.checkpoint import Checkpoint, add_prefix, strip_prefix
from elias.training.cuda_graph_step import CudaGraphStep, pad_positives
from elias.training.optimizer import Optimizer, schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix
    from torch import Tensor

    from elias.config import ResolvedConfig
    from elias.distributed import World
    from elias.model.elias import EliasModel, Losses
    from elias.text.tokens import Tokens


logger = logging.getLogger(__name__)


@contextmanager
def torch_on_one_thread(model: EliasModel) -> Iterator[None]:
    """Keep torch to the calling thread while compiled loops do most of a model's work.

    What torch is left with are many small operations, which wait for threads longer than these
    save; and its sums would depend on how many there are. A transformer or one-vs-all works in
    torch, and keeps its threads.

    >>> from types import SimpleNamespace
    >>> with torch_on_one_thread(SimpleNamespace(encoder=SimpleNamespace(uses_numba=True))):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    alone = model.encoder.uses_numba and not isinstance(model, OneVsAll)
    if not alone or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_AVERAGES_PER_EPOCH = 10
_STEPS_PER_CHECK = 50  # of the losses on a GPU, which waits for each check
_ROWS_NAMED = 10


class Points(NamedTuple):
    """Tokenised texts and their labels."""

    tokens: Tokens
    labels: csr_matrix

    def take(self, rows: NDArray[np.int64]) -> Points:
        """Return the points of ``rows``, in memory."""
        return Points(self.tokens.take(rows), self.labels[rows])


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


@dataclass
class _Epoch:
    """How far an epoch is."""

    number: int
    order: dict[str, Any]
    """The state of the random generator that its batches are drawn with."""
    parents: Tensor
    """(L + 1,) each label's strongest parent when it began; C for padding."""
    totals: Tensor
    """(3,) the sums of the losses so far."""
    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """What it took before it was taken up again."""
    began: float = field(default_factory=time.monotonic)
    unchecked: list[Tensor] = field(default_factory=list)
    """The losses of the last steps, not yet known to be finite."""

    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.began


class _Course(NamedTuple):
    """What goes through all epochs of a stage, beside the model."""

    optimizer: Optimizer
    average: WeightAverage
    best: _Best
    device: torch.device
    captured: CudaGraphStep | None = None
    """What computes a step's gradients, where a GPU can repeat it by one launch."""


def first_non_finite(model: EliasModel, world: World = SingleProcess()) -> str:
    """Return the name of a weight that is not finite in any process; empty if all are finite."""
    weights = model.state_dict()
    wrong = [i for i, tensor in enumerate(weights.values(), start=1) if not all_finite(tensor)]
    (number,) = world.max_async([max(wrong, default=0)])()
    return list(weights)[number - 1] if number else ""


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
    config: ResolvedConfig
    points: Points
    rng: np.random.Generator
    validate: Callable[[EliasModel], dict[str, float]] | None
    report: Callable[[EpochReport], None]
    keep: Callable[[str, Callable[[], Checkpoint]], None] | None = None
    """Called after each step with where that is and what makes a checkpoint of it."""
    resumed: Checkpoint | None = None
    """Where to go on; the model has its weights already."""
    world: World = SingleProcess()
    """The processes that share each batch."""
    position: int = 0
    """Which stage this is: part of what dropout is keyed by with several processes."""

    def run(self) -> int:
        """Train, leave the best epoch's weights in the model, and return that epoch."""
        with tensor_cores():
            return self._run(next(self.model.parameters()).device)

    def _run(self, device: torch.device) -> int:
        average = WeightAverage(self.model)
        optimizer = Optimizer(self.model, self.stage, self.world)
        captured = self._captured(optimizer)
        course = _Course(optimizer, average, _Best(), device, captured)
        try:
            return self._run_epochs(course)
        finally:
            if captured is not None:
                captured.close()

    def _run_epochs(self, course: _Course) -> int:
        device, average = course.device, course.average
        best = course.best
        epoch = self._begin(1, device) if self.resumed is None else self._take_up(course)
        while True:
            losses = self._epoch(epoch, course)
            validation = self._validate(epoch.number, course)
            seconds = epoch.elapsed()
            self.report(EpochReport(self.stage.name, epoch.number, *losses, seconds, validation))
            waited = epoch.number - best.epoch
            if validation and 0 < self.config.eval.patience <= waited:
                logger.info("%s: no better epoch for %d, stopping", self.stage.name, waited)
                break
            if epoch.number == self.stage.epochs:
                break
            epoch = self._begin(epoch.number + 1, device)
            self._keep(epoch, course)
        if best.weights:
            self.model.load_state_dict(best.weights)
            return best.epoch
        course.optimizer.apply_pending_decay()
        if average.started:
            average.swap()
        return epoch.number

    def _begin(self, number: int, device: torch.device) -> _Epoch:
        order = dict(self.rng.bit_generator.state)
        return _Epoch(number, order, self._parents(device), torch.zeros(3, device=device))

    def _epoch(self, epoch: _Epoch, course: _Course) -> tuple[float, float, float]:
        optimizer = course.optimizer
        per_epoch, n_steps = self._per_epoch, self._n_steps
        every = max(1, per_epoch // _AVERAGES_PER_EPOCH)
        self.model.train()
        title = f"{self.stage.name} epoch {epoch.number}/{self.stage.epochs}"
        with progress(title, per_epoch) as advance, torch_on_one_thread(self.model):
            advance(epoch.step)
            for tokens, positives in self._batches(epoch, course):
                scale = self._scale(optimizer.steps)
                losses = self._gradients(tokens, positives, epoch.parents, course, scale)
                optimizer.step(scale)
                parts = torch.stack([part.detach() for part in losses])
                epoch.totals += self.world.all_reduce(parts, "losses")
                epoch.unchecked.append(parts[0])
                epoch.step += 1
                done = optimizer.steps
                if done > self.stage.average_from * n_steps and done % every == 0:
                    optimizer.apply_pending_decay()
                    course.average.update()
                if course.device.type == "cpu" or len(epoch.unchecked) >= _STEPS_PER_CHECK:
                    self._check(epoch)
                advance()
                self._keep(epoch, course)
        self._check(epoch)
        self._check_weights(epoch)
        means: list[float] = (epoch.totals / per_epoch).tolist()
        return means[0], means[1], means[2]

    def _check(self, epoch: _Epoch) -> None:
        """Refuse to go on after a step whose loss is not finite; say which points it was of."""
        losses = torch.stack(epoch.unchecked).tolist() if epoch.unchecked else []
        first = epoch.step - len(losses) + 1
        epoch.unchecked.clear()
        for step, loss in enumerate(losses, start=first):
            if math.isfinite(loss):
                continue
            rows = next(islice(self._rows(epoch.order), step - 1, None)).tolist()
            weights = [self.points.tokens.take(np.array([row])).weights for row in rows]
            wrong = [
                row
                for row, its in zip(rows, weights, strict=True)
                if its is not None and not np.isfinite(its).all()
            ]
            rows = wrong or rows
            named = ", ".join(map(str, rows[:_ROWS_NAMED]))
            more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
            what = f"the loss is {loss} for the training points {named}{more} (counted from 0, "
            where = f"{self.stage.name} epoch {epoch.number} step {step}"
            logger.info("%s: the loss is %s for the training points %s", where, loss, rows)
            raise self._diverged(where, f"{what}without those held out)", in_input=bool(wrong))

    def _check_weights(self, epoch: _Epoch) -> None:
        """Refuse to go on if a weight is not finite: a loss need not show it."""
        name = first_non_finite(self.model, self.world)
        if name:
            where = f"{self.stage.name} epoch {epoch.number} step {epoch.step}"
            raise self._diverged(where, f"{name} is not finite")

    def _diverged(self, where: str, what: str, *, in_input: bool = False) -> RunError:
        """Return the error that names the likely cause: the rate furthest above its default."""
        if in_input:
            return RunError(
                f"{where}: {what}; their input features hold a value that is not finite: "
                "correct it, and run again with --overwrite"
            )
        used = {
            "encoder_lr": True,
            "bag_lr": isinstance(self.model.encoder, BagEncoder),
            "cluster_lr": not isinstance(self.model, OneVsAll),
            "label_lr": True,
            "edge_lr": self.model.graph.learned,
        }
        usual, keys = StageConfig(), [key for key, is_used in used.items() if is_used]
        key = max(keys, key=lambda key: getattr(self.stage, key) / getattr(usual, key))
        return RunError(
            f"{where}: {what}; the likely cause is a learning rate that is too high: lower "
            f"stages.{self.stage.name}.{key} (now {getattr(self.stage, key):g}), and run again to "
            "resume from the last good checkpoint, or with --overwrite to start over"
        )

    def _keep(self, epoch: _Epoch, course: _Course) -> None:
        if self.keep is None:
            return
        if self._is_sharded and course.optimizer.has_pending_gradients:
            return  # a gradient waits, a part of it in each process: none of them could keep it
        where = f"{self.stage.name} epoch {epoch.number} step {epoch.step}"
        self.keep(where, lambda: self._checkpoint(epoch, course))

    def _checkpoint(self, epoch: _Epoch, course: _Course) -> Checkpoint:
        """Return all that the rest of the stage depends on, beside the weights."""
        self._check(epoch)
        self._check_weights(epoch)
        best = course.best
        facts = {
            "epoch": epoch.number,
            "step": epoch.step,
            "order": epoch.order,
            "seconds": epoch.elapsed(),
            "best": {"score": best.score, "epoch": best.epoch} if best.weights else None,
        }
        tensors = {
            "parents": epoch.parents,
            "totals": epoch.totals,
            **add_prefix("best.", best.weights),
            **add_prefix("average.", course.average.state()),
            **add_prefix("optimizer.", course.optimizer.state()),
        }
        return Checkpoint(facts, tensors)

    def _take_up(self, course: _Course) -> _Epoch:
        """Go on from a checkpoint: set all but the weights, return how far its epoch is."""
        assert self.resumed is not None
        facts, tensors = self.resumed
        course.optimizer.restore(strip_prefix("optimizer.", tensors), self._scale)
        course.average.restore(strip_prefix("average.", tensors))
        if facts["best"] is not None:
            course.best.score, course.best.epoch = facts["best"]["score"], facts["best"]["epoch"]
            course.best.weights = strip_prefix("best.", tensors)
        self.rng.bit_generator.state = facts["order"]
        parents, totals = (tensors[name].to(course.device) for name in ("parents", "totals"))
        return _Epoch(
            facts["epoch"], facts["order"], parents, totals, facts["step"], facts["seconds"]
        )

    def _rows(self, order: dict[str, Any]) -> Iterator[NDArray[np.int64]]:
        """Yield the points of an epoch's batches, drawn by a generator in the state ``order``."""
        rng = copy.deepcopy(self.rng)
        rng.bit_generator.state = order
        return shuffled_batches(self.points.tokens.lengths, self.stage.batch_size, rng)

    def _batches(
        self, epoch: _Epoch, course: _Course
    ) -> Iterator[tuple[TokenBatch | PaddedBatch | ShardedBatch, Tensor]]:
        """Yield the tokens and positives of an epoch's batches to come, on the device.

        For a GPU a thread collates them while the batch before is computed.
        """
        lengths, device = self.points.tokens.lengths, course.device
        encoder, on_gpu = self.model.encoder, device.type == "cuda"

        def make(
            step: int, rows: NDArray[np.int64]
        ) -> tuple[TokenBatch | PaddedBatch | ShardedBatch, Tensor]:
            tokens: TokenBatch | PaddedBatch | ShardedBatch
            positives = positives_of(self.points.labels, rows)
            if self._is_sharded:
                seed = (self.config.member_seed, self.position, step)
                tokens = shard_batch(self.world, self.points.tokens, rows, seed)
                positives = positives[self.world.share(len(rows))].contiguous()
            elif course.captured is None:
                tokens = collate(self.points.tokens, rows)
            else:
                tokens = pad_batch(
                    self.points.tokens, rows, pad_id=encoder.pad_id, longest=encoder.max_length
                )
                positives = pad_positives(
                    positives, self.config.index.train_clusters, self.model.n_labels
                )
            return (tokens.pin_memory(), positives.pin_memory()) if on_gpu else (tokens, positives)

        rows = shuffled_batches(lengths, self.stage.batch_size, self.rng)
        made = map(make, count(course.optimizer.steps), islice(rows, epoch.step, None))
        for tokens, positives in prefetch(made) if on_gpu else made:
            yield tokens.to(device), to_device(positives, device)

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.model.labels, ShardedRows)

    def _sizes_for(self, positives: Tensor) -> SearchSizes:
        """Return how wide a step searches: a parent of every positive has its place."""
        index = self.config.index
        return SearchSizes(max(index.train_clusters, positives.shape[1]), index.train_shortlist)

    def _captured(self, optimizer: Optimizer) -> CudaGraphStep | None:
        recordable = self.model.encoder.takes_padded and not self._is_sharded
        if optimizer.gradients is None or not recordable:
            return None

        def losses(embedding: Tensor, positives: Tensor, parents: Tensor) -> Losses:
            widest = (positives < self.model.n_labels).any(dim=0).sum().clamp(min=1)
            return self.model.losses_of(
                embedding,
                positives,
                parents,
                self._sizes_for(positives),
                shortlist_weight=self.stage.shortlist_loss_weight,
                mean=self.config.loss.reduction == "mean",
                gradients=optimizer.gradients,
                widest=widest,
            )

        return CudaGraphStep(
            self.model,
            optimizer.gradients,
            losses,
            waits=self.stage.index_every > 1,
            batch_size=self.stage.batch_size,
        )

    def _gradients(
        self,
        tokens: TokenBatch | PaddedBatch | ShardedBatch,
        positives: Tensor,
        parents: Tensor,
        course: _Course,
        scale: float,
    ) -> Losses:
        """Return the losses of a batch, their gradients left for the optimizer."""
        if isinstance(tokens, ShardedBatch):
            with tokens.activate(self.model):
                return self._gradients(tokens.tokens, positives, parents, course, scale)
        if isinstance(tokens, PaddedBatch):
            assert course.captured is not None
            return course.captured(tokens, positives, parents[positives])
        losses = self._losses(tokens, positives, parents, course.optimizer, scale)
        losses[0].backward()  # type: ignore[no-untyped-call]
        return losses

    def _losses(
        self,
        tokens: TokenBatch,
        positives: Tensor,
        parents: Tensor,
        optimizer: Optimizer,
        scale: float,
    ) -> Losses:
        mean = self.config.loss.reduction == "mean"
        if isinstance(self.model, OneVsAll):
            update = optimizer.label_update(scale)
            return self.model.all_losses(tokens, positives, mean=mean, update=update)
        return self.model.losses(
            tokens,
            positives,
            parents[positives],
            self._sizes_for(positives),
            shortlist_weight=self.stage.shortlist_loss_weight,
            mean=mean,
            gradients=optimizer.gradients,
        )

    def _parents(self, device: torch.device) -> Tensor:
        """Return each label's strongest parent under the present graph; C for padding (L + 1,)."""
        parents = self.model.graph.strongest_parents()
        none = torch.full((1,), self.model.graph.n_clusters, device=device)
        return torch.cat([parents, none])

    @property
    def _per_epoch(self) -> int:
        return n_batches(len(self.points.tokens.lengths), self.stage.batch_size)

    @property
    def _n_steps(self) -> int:
        return self._per_epoch * self.stage.epochs

    def _scale(self, step: int) -> float:
        """Return what a step (from 0) multiplies the learning rates by."""
        return schedule(step, self._n_steps, self.stage.warmup)

    def _validate(self, epoch: int, course: _Course) -> dict[str, float]:
        """Return the validation metrics if they are due, keeping the weights if they are best."""
        due = epoch % self.config.eval.every == 0 or epoch == self.stage.epochs
        if self.validate is None or not due:
            return {}
        average = course.average
        course.optimizer.apply_pending_decay()
        if average.started:
            average.swap()
        metrics = self.validate(self.model)
        course.best.offer(self.model, metrics[self.config.eval.select_by], epoch)
        if average.started:
            average.swap()
        return metrics
