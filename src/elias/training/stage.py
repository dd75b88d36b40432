"""Train one stage: run epochs, validate, and keep the best weights."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix, vstack

from elias.config import ResolvedConfig, ResolvedStage, default_stages
from elias.distributed import SingleProcess, World
from elias.distributed.data_parallel import KeyedDropout, ShardedBatch, shard_batch
from elias.distributed.sharded_linear import ShardedRows
from elias.errors import RunError
from elias.kernels.threads import torch_threads
from elias.model.elias import EliasModel, SearchSizes
from elias.model.encoder import BagEncoder
from elias.model.one_vs_all import OneVsAll
from elias.persistence.manifest import all_finite
from elias.progress import progress
from elias.text.batches import (
    TokenBatch,
    collate,
    fixed_size_batch,
    n_batches,
    positives_of,
    prefetch,
    shuffled_batches,
    to_device,
)
from elias.text.tokens import Tokens
from elias.training.checkpoint import Checkpoint, add_prefix, strip_prefix
from elias.training.cuda_graph_step import CudaGraphStep, pad_positives
from elias.training.optimizer import Optimizer, WeightAverage, schedule
from elias.training.sharded_step import ShardedStep

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from elias.model.losses import Losses
    from elias.training.label_texts import LabelPoints


logger = logging.getLogger(__name__)

Batch = TokenBatch | ShardedBatch

_AVERAGES_PER_EPOCH = 10
_STEPS_PER_CHECK = 50  # on a GPU; each check of the losses waits for the GPU
_MAX_NAMED_POINTS = 10
_SAMPLED_UNTIL = 0.75  # share of the steps in which `StageConfig.label_share` applies


def torch_on_one_thread(model: EliasModel) -> AbstractContextManager[None]:
    """Limit torch to one thread unless the encoder is a transformer.

    A bag encoder mostly runs in numba kernels, and torch runs only small operations. Several
    threads would slow these operations down, and their sums would depend on the number of threads.
    """
    return torch_threads(1) if model.encoder.uses_numba else nullcontext()


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Allow TF32 for float32 matrix products on a GPU. Sums are still computed in float32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


class Points(NamedTuple):
    """Tokenized texts and their labels."""

    tokens: Tokens
    labels: csr_matrix

    def take(self, rows: NDArray[np.int64]) -> Points:
        """Load the points with the given row indices into memory."""
        return Points(self.tokens.take(rows), self.labels[rows])

    def take_with(self, more: Points, rows: NDArray[np.int64]) -> Points:
        """Load points by row index. Indices beyond these points refer to the points of ``more``."""
        n_own = len(self.tokens)
        own, others = self.take(rows[rows < n_own]), more.take(rows[rows >= n_own] - n_own)
        tokens = Tokens.concatenate(own.tokens, others.tokens)
        return Points(tokens, vstack([own.labels, others.labels], format="csr"))


class EpochReport(NamedTuple):
    """The results of one epoch."""

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


@dataclass
class _Epoch:
    """The state of an epoch in progress."""

    number: int
    order: dict[str, Any]
    """State of the random generator at the start of the epoch, which determines the batches."""
    parents: Tensor
    """Cluster with the strongest edge to each label at the start of the epoch, padded with C."""
    totals: Tensor
    """Sums of the total, classification and shortlist loss over the finished steps (3,)."""
    label_points: Points | None
    """The label texts of this epoch and their targets."""
    step: int = 0
    """Number of finished steps."""
    seconds: float = 0.0
    """Time spent on this epoch before the run was resumed."""
    start: float = field(default_factory=time.monotonic)
    unchecked: list[Tensor] = field(default_factory=list)
    """Losses of the steps since the last check for non-finite values."""

    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.start


def first_non_finite(model: EliasModel, world: World = SingleProcess()) -> str:
    """Return the name of a weight that is not finite on some process, or an empty string."""
    weights = model.state_dict()
    wrong = [i for i, tensor in enumerate(weights.values(), start=1) if not all_finite(tensor)]
    (position,) = world.max_async([max(wrong, default=0)])()
    return list(weights)[position - 1] if position else ""


@dataclass
class StageLoop:
    """The training loop of one stage."""

    model: EliasModel
    stage: ResolvedStage
    config: ResolvedConfig
    points: Points
    rng: np.random.Generator
    validate: Callable[[EliasModel], dict[str, float]] | None
    report: Callable[[EpochReport], None]
    keep: Callable[[str, Callable[[], Checkpoint]], None] | None = None
    """Called after each step with the step's name and a function that returns a checkpoint."""
    resumed: Checkpoint | None = None
    """The checkpoint to resume from. Its weights must already be loaded into the model."""
    world: World = SingleProcess()
    """The processes among which each batch is split."""
    position: int = 0
    """Position of the stage in the configuration, which is part of the seeds."""
    label_points: LabelPoints | None = None
    """Label texts to train on in addition to the points."""

    def run(self) -> int:
        """Train, load the weights of the best epoch into the model, and return that epoch."""
        self._device = next(self.model.parameters()).device
        self._optimizer = Optimizer(self.model, self.stage)
        self._average = WeightAverage(self.model)
        self._best = _Best()
        self._is_sharded = isinstance(self.model.labels, ShardedRows)
        n_label_points = 0 if self.label_points is None else self.label_points.n_drawn
        self._per_epoch = n_batches(len(self.points.tokens) + n_label_points, self.stage.batch_size)
        self._n_steps = self._per_epoch * self.stage.epochs
        self._captures = self._optimizer.gradients is not None and self.model.encoder.capturable
        self._cuda_graph_step = self._make_cuda_graph_step()
        self._sharded_step = self._make_sharded_step()
        try:
            with tensor_cores():
                return self._run_epochs()
        finally:
            for step in (self._cuda_graph_step, self._sharded_step):
                if step is not None:
                    step.close()

    def _run_epochs(self) -> int:
        epoch = self._start_epoch(1) if self.resumed is None else self._resume(self.resumed)
        best = self._best
        while True:
            losses = self._run_epoch(epoch)
            validation = self._validate(epoch.number)
            seconds = epoch.elapsed()
            self.report(EpochReport(self.stage.name, epoch.number, *losses, seconds, validation))
            n_worse = epoch.number - best.epoch if best.weights else 0
            if epoch.number == self.stage.epochs:
                break
            if validation and 0 < self.config.eval.patience <= n_worse:
                logger.info("%s: no improvement for %d epochs, stopping", self.stage.name, n_worse)
                break
            epoch = self._start_epoch(epoch.number + 1)
            self._offer_checkpoint(epoch)
        if best.weights:
            self.model.load_state_dict(best.weights)
            return best.epoch
        self._optimizer.apply_pending_decay()
        self._average.swap()
        return epoch.number

    def _start_epoch(self, number: int) -> _Epoch:
        graph, device = self.model.graph, self._device
        padding = torch.full((1,), graph.n_clusters, device=device)
        parents = torch.cat([graph.strongest_parents(), padding])
        order = dict(self.rng.bit_generator.state)
        totals = torch.zeros(3, device=device)
        return _Epoch(number, order, parents, totals, self._draw_label_points(number))

    def _draw_label_points(self, epoch: int) -> Points | None:
        if self.label_points is None:
            return None
        return self.label_points.draw([self.config.member_seed, self.position, epoch])

    def _run_epoch(self, epoch: _Epoch) -> tuple[float, float, float]:
        """Run the remaining steps of an epoch, and return the mean losses of all its steps."""
        optimizer, device = self._optimizer, self._device
        every = max(1, self._per_epoch // _AVERAGES_PER_EPOCH)
        self.model.train()
        title = f"{self.stage.name} epoch {epoch.number}/{self.stage.epochs}"
        with progress(title, self._per_epoch) as advance, torch_on_one_thread(self.model):
            advance(epoch.step)
            for tokens, positives in self._batches(epoch):
                scale = self._scale(optimizer.steps)
                losses = self._backward(tokens, positives, epoch.parents, scale)
                optimizer.step(scale)
                parts = torch.stack([part.detach() for part in losses])
                epoch.totals += self.world.all_reduce(parts, "losses")
                epoch.unchecked.append(parts[0])
                epoch.step += 1
                n_steps = optimizer.steps
                if n_steps > self.stage.average_from * self._n_steps and n_steps % every == 0:
                    optimizer.apply_pending_decay()
                    self._average.update()
                if device.type == "cpu" or len(epoch.unchecked) >= _STEPS_PER_CHECK:
                    self._check_losses(epoch)
                advance()
                self._offer_checkpoint(epoch)
        self._check_losses(epoch)
        self._check_weights(epoch)
        means: list[float] = (epoch.totals / self._per_epoch).tolist()
        return means[0], means[1], means[2]

    def _scale(self, step: int) -> float:
        """Return the learning rate scale at ``step``, which counts from 0."""
        return schedule(step, self._n_steps)

    # batches and losses

    def _batches(self, epoch: _Epoch) -> Iterator[tuple[Batch, Tensor]]:
        """Yield the tokens and positives of an epoch's remaining batches, on the device.

        A background thread collates the next batches.
        """
        encoder, on_gpu = self.model.encoder, self._device.type == "cuda"
        gather: Callable[[Tokens, NDArray[np.int64]], TokenBatch] = collate
        if self._captures:
            gather = partial(
                fixed_size_batch,
                pad_id=encoder.pad_id,
                max_length=encoder.max_length,
                packs=encoder.packs(self._device),
            )

        def make(step: int, rows: NDArray[np.int64]) -> tuple[Batch, Tensor]:
            tokens: Batch
            all_tokens, labels = self.points
            if epoch.label_points is not None:
                all_tokens, labels = self.points.take_with(epoch.label_points, rows)
                rows = np.arange(len(rows))
            positives = positives_of(labels, rows)
            if self._is_sharded:
                seed = (self.config.member_seed, self.position, step)
                tokens = shard_batch(self.world, rows, seed, partial(gather, all_tokens))
                positives = positives[self.world.share(len(rows))].contiguous()
            else:
                tokens = gather(all_tokens, rows)
            if self._cuda_graph_step is not None:
                beam_size = self.config.index.train_clusters
                positives = pad_positives(positives, beam_size, self.model.n_labels)
            return (tokens.pin_memory(), positives.pin_memory()) if on_gpu else (tokens, positives)

        rows = self._batch_rows(epoch, self.rng)
        batches = map(make, count(self._optimizer.steps), islice(rows, epoch.step, None))
        for tokens, positives in prefetch(batches):
            yield tokens.to(self._device), to_device(positives, self._device)

    def _batch_rows(self, epoch: _Epoch, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the row indices of each batch. Rows of label texts follow the rows of points."""
        lengths = self.points.tokens.lengths
        if epoch.label_points is not None:
            lengths = np.concatenate([lengths, epoch.label_points.tokens.lengths])
        packs = self.model.encoder.packs(self._device)
        return shuffled_batches(lengths, self.stage.batch_size, rng, by_length=not packs)

    def _loss_options(self, positives: Tensor) -> dict[str, Any]:
        """Return the options of `EliasModel.losses`.

        The beam is large enough to hold a cluster for each positive label of a point.
        """
        index = self.config.index
        beam_size = max(index.train_clusters, positives.shape[1])
        return {
            "sizes": SearchSizes(beam_size, index.train_shortlist),
            "shortlist_weight": self.stage.shortlist_loss_weight,
            "mean": self.config.loss.reduction == "mean",
            "gradients": self._optimizer.gradients,
        }

    def _backward(self, tokens: Batch, positives: Tensor, parents: Tensor, scale: float) -> Losses:
        """Return the losses of a batch, and store their gradients for the optimizer."""
        if isinstance(tokens, ShardedBatch):
            return self._sharded_backward(tokens, positives, parents, scale)
        if self._cuda_graph_step is not None:
            return self._cuda_graph_step(tokens, positives, parents[positives])
        losses = self._losses(self.model.encoder(tokens).float(), positives, parents, scale)
        losses.total.backward()  # type: ignore[no-untyped-call]
        return losses

    def _sharded_backward(
        self, batch: ShardedBatch, positives: Tensor, parents: Tensor, scale: float
    ) -> Losses:
        """Return the losses of this process's share of a batch, and sum the gradients."""
        encoder, labels = self.model.encoder, self.model.labels
        assert isinstance(labels, ShardedRows)
        labels.n_points = batch.n_points
        if self._sharded_step is not None:
            return self._sharded_step(
                batch, lambda embedding: self._losses(embedding, positives, parents, scale)
            )
        with KeyedDropout(batch.keys, batch.tokens, encoder):
            embedding = encoder(batch.tokens).float()
        losses = self._losses(embedding, positives, parents, scale)
        losses.total.backward()  # type: ignore[no-untyped-call]
        for group in (self._optimizer.encoder_group, self._optimizer.index_group):
            group.sum_gradients(self.world)
        return losses

    def _losses(
        self, embedding: Tensor, positives: Tensor, parents: Tensor, scale: float
    ) -> Losses:
        """Return the losses of a batch with these embeddings."""
        options = self._loss_options(positives)
        if isinstance(self.model, OneVsAll):
            update, drawn = self._optimizer.label_update(scale), self._draw_labels()
            return self.model.all_losses(
                embedding, positives, mean=options["mean"], update=update, drawn=drawn
            )
        return self.model.losses(embedding, positives, parents[positives], **options)

    def _draw_labels(self) -> Tensor | None:
        """Return a mask of the labels that this step scores beside positives; None means all.

        The draw depends on the seed, the stage and the step, but not on the number of processes.
        """
        step = self._optimizer.steps
        if not self._samples_labels(step):
            return None
        rng = np.random.default_rng([self.config.member_seed, self.position, step])
        drawn = rng.random(self.model.n_labels, dtype=np.float32) < self.stage.label_share
        return torch.from_numpy(drawn).to(self._device)

    def _samples_labels(self, step: int) -> bool:
        """Return whether a step, which counts from 0, scores a share of the labels."""
        samples = isinstance(self.model, OneVsAll) and self.stage.label_share < 1
        return samples and step < _SAMPLED_UNTIL * self._n_steps

    def _make_cuda_graph_step(self) -> CudaGraphStep | None:
        """Return a `CudaGraphStep`, or None if this model cannot be trained with CUDA graphs."""
        gradients = self._optimizer.gradients
        if gradients is None or not self._captures or self._is_sharded:
            return None

        def losses(embedding: Tensor, positives: Tensor, parents: Tensor) -> Losses:
            widest = (positives < self.model.n_labels).any(dim=0).sum().clamp(min=1)
            options = self._loss_options(positives)
            return self.model.losses(embedding, positives, parents, **options, widest=widest)

        accumulates, batch_size = self.stage.index_every > 1, self.stage.batch_size
        return CudaGraphStep(
            self.model, gradients, losses, accumulates=accumulates, batch_size=batch_size
        )

    def _make_sharded_step(self) -> ShardedStep | None:
        """Return a `ShardedStep`, or None for one process or an encoder with sparse gradients."""
        encoder = self.model.encoder
        if not self._is_sharded or encoder.table_names():
            return None
        return ShardedStep(
            encoder,
            self.world,
            partial(self._optimizer.index_group.sum_gradients, self.world),
            batch_size=self.stage.batch_size,
            captures=self._captures,
        )

    # validation

    def _validate(self, epoch: int) -> dict[str, float]:
        """Return the validation metrics, if points are held out, and keep the best weights.

        An epoch whose last step scores a share of the labels is never the best.
        """
        if self.validate is None:
            return {}
        self._optimizer.apply_pending_decay()
        self._average.swap()
        metrics = self.validate(self.model)
        score = metrics[self.config.eval.select_by]
        if score > self._best.score and not self._samples_labels(self._optimizer.steps - 1):
            weights = self.model.state_dict().items()
            self._best.score, self._best.epoch = score, epoch
            self._best.weights = {name: t.detach().cpu().clone() for name, t in weights}
        self._average.swap()
        return metrics

    # divergence

    def _check_losses(self, epoch: _Epoch) -> None:
        """Raise a `RunError` that names the points of the batch if a loss is not finite."""
        losses = torch.stack(epoch.unchecked).tolist() if epoch.unchecked else []
        first = epoch.step - len(losses) + 1
        epoch.unchecked.clear()
        for step, loss in enumerate(losses, start=first):
            if math.isfinite(loss):
                continue
            rng = copy.deepcopy(self.rng)
            rng.bit_generator.state = epoch.order
            rows = next(islice(self._batch_rows(epoch, rng), step - 1, None)).tolist()
            rows = [row for row in rows if row < len(self.points.tokens)]
            wrong = [row for row in rows if not self._has_finite_input(row)]
            rows = wrong or rows
            points = ", ".join(map(str, rows[:_MAX_NAMED_POINTS])) or "made of label texts"
            if len(rows) > _MAX_NAMED_POINTS:
                points += f" and {len(rows) - _MAX_NAMED_POINTS} more"
            problem = (
                f"{self.stage.name} epoch {epoch.number} step {step}: the loss is {loss} for the "
                f"training points {points} (counted from 0, without held-out points)"
            )
            if wrong:
                raise RunError(
                    f"{problem}; their input features contain NaN or infinite values; "
                    "correct these, and run again with overwrite=True"
                )
            raise self._divergence_error(problem)

    def _has_finite_input(self, row: int) -> bool:
        weights = self.points.tokens.take(np.array([row])).weights
        return weights is None or bool(np.isfinite(weights).all())

    def _check_weights(self, epoch: _Epoch) -> None:
        """Raise a `RunError` if a weight is not finite, even if all losses are finite."""
        name = first_non_finite(self.model, self.world)
        if name:
            where = f"{self.stage.name} epoch {epoch.number} step {epoch.step}"
            raise self._divergence_error(f"{where}: {name} is not finite")

    def _divergence_error(self, problem: str) -> RunError:
        """Return an error that suggests lowering a learning rate.

        It suggests the learning rate that has the highest ratio to its default value.
        """
        rates = ["encoder_lr", "label_lr"]
        defaults = default_stages(self.config)[self.stage.name]
        if isinstance(self.model.encoder, BagEncoder):
            rates.append("bag_lr")
        if not isinstance(self.model, OneVsAll):
            rates.append("cluster_lr")
        if self.model.graph.learned:
            rates.append("edge_lr")
        key = max(rates, key=lambda key: getattr(self.stage, key) / getattr(defaults, key))
        return RunError(
            f"{problem}; the likely cause is a learning rate that is too high: lower "
            f"stages.{self.stage.name}.{key} (now {getattr(self.stage, key):g}), and run again to "
            "resume from the last good checkpoint, or with overwrite=True to start over"
        )

    # checkpoints

    def _offer_checkpoint(self, epoch: _Epoch) -> None:
        """Call `keep`, which may write a checkpoint, unless there are accumulated gradients."""
        if self.keep is None or self._optimizer.has_pending_gradients:
            return
        where = f"{self.stage.name} epoch {epoch.number} step {epoch.step}"
        self.keep(where, lambda: self._checkpoint(epoch))

    def _checkpoint(self, epoch: _Epoch) -> Checkpoint:
        """Return all state that is needed to resume the stage, except the weights."""
        self._check_losses(epoch)
        self._check_weights(epoch)
        best = self._best
        metadata = {
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
            **add_prefix("average.", self._average.state()),
            **add_prefix("optimizer.", self._optimizer.state()),
        }
        return Checkpoint(metadata, tensors)

    def _resume(self, checkpoint: Checkpoint) -> _Epoch:
        """Load all state except the weights from a checkpoint, and return the epoch to continue."""
        metadata, tensors = checkpoint
        self._optimizer.restore(strip_prefix("optimizer.", tensors), self._scale)
        self._average.restore(strip_prefix("average.", tensors))
        if metadata["best"] is not None:
            self._best = _Best(**metadata["best"], weights=strip_prefix("best.", tensors))
        self.rng.bit_generator.state = metadata["order"]
        return _Epoch(
            number=metadata["epoch"],
            order=metadata["order"],
            parents=tensors["parents"].to(self._device),
            totals=tensors["totals"].to(self._device),
            label_points=self._draw_label_points(metadata["epoch"]),
            step=metadata["step"],
            seconds=metadata["seconds"],
        )
