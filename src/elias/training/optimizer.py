"""AdamW with lazy updates of sparse tables, gradient accumulation, and weight averaging."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from elias.config import ResolvedStage
from elias.distributed import World
from elias.distributed.data_parallel import sum_gradients, sum_rows, sum_touched
from elias.kernels import (
    IndexGradients,
    adamw_dense,
    adamw_rows,
    gpu_kernels,
    runs_triton,
)
from elias.kernels.adamw_state import (
    AdamWRates,
    History,
    LinearState,
    RowState,
    apply_pending_decay,
)
from elias.kernels.one_vs_all_loss import LabelUpdate, Rows
from elias.model.elias import EliasModel, LinearRows
from elias.model.one_vs_all import OneVsAll
from elias.training.checkpoint import add_prefix, strip_prefix

logger = logging.getLogger(__name__)

BETAS = (0.9, 0.999)
EPS = 1e-8
WARMUP = 0.1  # share of the steps


def schedule(step: int, n_steps: int) -> float:
    """Return the factor that multiplies the learning rate at ``step``, which counts from 0.

    The learning rate rises linearly during warm-up, then decays linearly.
    """
    n_warmup = WARMUP * n_steps
    if step < n_warmup:
        return (step + 1) / (n_warmup + 1)
    return max(0.0, (n_steps - step) / max(1.0, n_steps - n_warmup))


def parameter_rates(name: str, parameter: Tensor, stage: ResolvedStage) -> AdamWRates:
    """Return the AdamW hyperparameters of one parameter in a stage."""
    decay = stage.weight_decay if parameter.ndim > 1 else 0.0
    lr, eps = stage.encoder_lr, EPS
    if name.startswith("graph."):
        lr, decay = stage.edge_lr, 0.0
    elif name.startswith("clusters."):
        lr = stage.cluster_lr
    elif name.startswith("labels."):
        lr, eps = stage.label_lr, stage.label_eps
    elif name == "encoder.vectors":
        lr, decay = stage.bag_lr, 0.0
    return AdamWRates(lr, *BETAS, eps, decay)


def _scaled(rates: AdamWRates, scale: float) -> AdamWRates:
    return rates._replace(lr=rates.lr * scale)


class ParameterUpdate:
    """The AdamW update and optimizer state of a group of parameters."""

    prefix = ""
    """Prefix of the tensor names in a checkpoint."""

    def sum_gradients(self, world: World) -> None:
        """Sum the gradients of unsharded parameters over all processes."""

    def step(self, scale: float) -> None:
        """Apply the gradients with learning rates multiplied by ``scale``, then clear them."""

    def apply_pending_decay(self) -> None:
        """Apply the weight decay that lazy updates have postponed for skipped rows."""

    def state(self) -> dict[str, Tensor]:
        """Return the state as named tensors, which are not copied."""
        raise NotImplementedError

    def restore(self, state: Mapping[str, Tensor], scales: Sequence[float]) -> None:
        """Load a state that `state` returned.

        ``scales`` contains the learning rate scale of each past step.
        """
        del scales
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


class _DenseUpdate(ParameterUpdate):
    """AdamW for parameters with dense gradients.

    It calls the function behind `torch.optim.AdamW`: the class imports `torch._dynamo`, which takes
    a second.
    """

    prefix = "dense."

    def __init__(self, parameters: Mapping[nn.Parameter, AdamWRates]) -> None:
        groups: dict[AdamWRates, list[nn.Parameter]] = {}
        for parameter, rates in parameters.items():
            groups.setdefault(rates, []).append(parameter)
        self.parameters = [p for group in groups.values() for p in group]
        self._groups = groups
        self._moments: dict[Tensor, dict[str, Tensor]] = {}
        """Number of steps and moments of each parameter that has had a gradient."""

    def sum_gradients(self, world: World) -> None:
        sum_gradients(world, self.parameters)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for rates, group in self._groups.items():
            gradients = {p: p.grad for p in group if p.grad is not None}
            for p in gradients:
                if p not in self._moments:
                    self._moments[p] = {
                        "step": torch.zeros((), device=p.device),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                p.grad = None
            moments = [self._moments[p] for p in gradients]
            adamw(
                list(gradients),
                list(gradients.values()),
                [moment["exp_avg"] for moment in moments],
                [moment["exp_avg_sq"] for moment in moments],
                [],
                [moment["step"] for moment in moments],
                fused=True,
                amsgrad=False,
                beta1=rates.beta1,
                beta2=rates.beta2,
                lr=rates.lr * scale,
                weight_decay=rates.decay,
                eps=rates.eps,
                maximize=False,
            )

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for i, parameter in enumerate(self.parameters):
            state |= add_prefix(f"{i}.", self._moments.get(parameter, {}))
        return state

    def restore(self, state: Mapping[str, Tensor], scales: Sequence[float]) -> None:
        del scales
        self._moments = {}
        for i, parameter in enumerate(self.parameters):
            moments = strip_prefix(f"{i}.", state)
            if moments:
                self._moments[parameter] = {
                    name: moment.to(parameter.device, copy=True) for name, moment in moments.items()
                }


class _RowUpdate(ParameterUpdate):
    """Lazy AdamW for a table with sparse gradients, which updates only rows with a gradient."""

    def __init__(
        self, name: str, table: nn.Parameter, rates: AdamWRates, *, accumulates: bool
    ) -> None:
        self.prefix = f"table.{name}."
        self._is_sharded = name.startswith("labels.")
        self._table = table
        self._rates = rates
        self._accumulates = accumulates
        self._flat = table.detach().view(len(table), -1)
        self._state = RowState(
            mean=torch.zeros_like(self._flat),
            variance=torch.zeros_like(self._flat),
            last_step=torch.zeros(len(table), dtype=torch.int64, device=table.device),
        )
        self._history = History(table.device)

    def sum_gradients(self, world: World) -> None:
        if not self._is_sharded:  # each row of W_L belongs to one process
            sum_rows(world, self._table)

    def step(self, scale: float) -> None:
        self._history.add(_scaled(self._rates, scale))
        gradient = self._table.grad
        if gradient is None:
            return
        if self._accumulates:
            gradient = gradient.coalesce()
        # A step uses each table once, so the rows are distinct even if not marked as coalesced.
        values = gradient._values().view(-1, self._flat.shape[1])
        adamw_rows(self._flat, self._state, gradient._indices()[0], values, self._history)
        self._table.grad = None

    def apply_pending_decay(self) -> None:
        if self._rates.decay:
            mean, variance, last_step = self._state
            apply_pending_decay(self._flat, (mean,), (variance,), last_step, self._history)

    def state(self) -> dict[str, Tensor]:
        return self._state._asdict()

    def restore(self, state: Mapping[str, Tensor], scales: Sequence[float]) -> None:
        super().restore(state, scales)
        self._history.replay(_scaled(self._rates, scale) for scale in scales)


class _KernelUpdate(ParameterUpdate):
    """Lazy AdamW in GPU kernels for the label classifiers W_L and the edge logits A.

    If W_L is float32, its moments are float32. If W_L is bfloat16, its moments are compact: the
    first moment is bfloat16, and there is a single second moment per label.
    """

    prefix = "index."

    def __init__(self, model: EliasModel, stage: ResolvedStage) -> None:
        labels, graph = model.labels, model.graph
        weight, bias, logits = (p.detach() for p in (labels.weight, labels.bias, graph.edge_logits))
        self._model = model
        self._label_rates = parameter_rates("labels.weight", weight, stage)
        self._edge_rates = parameter_rates("graph.edge_logits", logits, stage)
        self._label_history, self._edge_history = History(weight.device), History(weight.device)
        self.gradients = IndexGradients(logits if graph.learned else None)
        self.label_state = LinearState(
            torch.zeros_like(weight),
            _zero_variance(weight),
            torch.zeros_like(bias),
            torch.zeros_like(bias),
            torch.zeros(len(bias), dtype=torch.int32, device=bias.device),
        )
        self._edge_state: RowState | None = None
        if graph.learned:
            last_step = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
            self._edge_state = RowState(
                torch.zeros_like(logits), torch.zeros_like(logits), last_step
            )

    def sum_gradients(self, world: World) -> None:
        if self.gradients.by_edge is not None:
            sum_touched(world, self.gradients.by_edge, self.gradients.touched)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        self._label_history.add(_scaled(self._label_rates, scale))
        self._edge_history.add(_scaled(self._edge_rates, scale))
        gpu, labels, graph = gpu_kernels(), self._model.labels, self._model.graph
        pairs = self.gradients.take_pairs()
        if pairs is not None:
            ids, coefficients, embedding = pairs
            # embeddings are read once per pair; with bfloat16 weights, bfloat16 is precise enough
            rows = gpu.pair_rows(ids, coefficients, embedding.to(labels.weight.dtype))
            gpu.adamw_pairs(labels.weight, labels.bias, self.label_state, rows, self._label_history)
        if self._edge_state is not None:
            gpu.adamw_edges(
                graph.edge_logits,
                graph.edge_labels,
                self._edge_state,
                self.gradients.by_edge,
                self.gradients.touched,
                self._edge_history,
                n_labels=graph.n_labels,
            )

    def apply_pending_decay(self) -> None:
        if self._label_rates.decay:  # A has no weight decay
            mean, variance, bias_mean, bias_variance, last_step = self.label_state
            weight, means = self._model.labels.weight.detach(), (mean, bias_mean)
            variances, history = (variance, bias_variance), self._label_history
            apply_pending_decay(weight, means, variances, last_step, history)

    def state(self) -> dict[str, Tensor]:
        tables = (("labels", self.label_state), ("edges", self._edge_state or ()))
        return {f"{name}.{i}": t for name, state in tables for i, t in enumerate(state)}

    def restore(self, state: Mapping[str, Tensor], scales: Sequence[float]) -> None:
        self._label_history.replay(_scaled(self._label_rates, scale) for scale in scales)
        self._edge_history.replay(_scaled(self._edge_rates, scale) for scale in scales)
        super().restore(state, scales)


class ChunkedUpdate(ParameterUpdate):
    """AdamW for the label classifiers W_L of a one-vs-all model.

    W_L is updated one chunk of labels at a time while the loss is computed. The moments are float32
    or compact, as in `_KernelUpdate`. Labels that a step does not score keep weights and moments.
    """

    prefix = "labels."

    def __init__(self, labels: LinearRows, weight: AdamWRates, bias: AdamWRates) -> None:
        self._tables = (labels.weight.detach(), labels.bias.detach().unsqueeze(1))
        self._rates = (weight, bias)
        self._moments = [(torch.zeros_like(t), _zero_variance(t)) for t in self._tables]

    def update(self, step: int, scale: float) -> LabelUpdate:
        """Return a function that updates a chunk of label classifiers. ``step`` counts from 1."""

        def apply(rows: Rows, weight_gradient: Tensor, bias_gradient: Tensor) -> None:
            gradients = (weight_gradient, bias_gradient.unsqueeze(1))
            for table, rates, (mean, variance), gradient in zip(
                self._tables, self._rates, self._moments, gradients, strict=True
            ):
                scaled = _scaled(rates, scale)
                w, m, v = table[rows], mean[rows], variance[rows]
                adamw_dense(w, m, v, gradient, step=step, rates=scaled)
                if not isinstance(rows, slice):  # then w, m and v are copies
                    table[rows], mean[rows], variance[rows] = w, m, v

        return apply

    def state(self) -> dict[str, Tensor]:
        """Return the moments as named tensors."""
        return {
            f"{i}.{name}": moment
            for i, moments in enumerate(self._moments)
            for name, moment in zip(("mean", "variance"), moments, strict=True)
        }


def _zero_variance(table: Tensor) -> Tensor:
    """Return zero second moments, one per weight or, if the table is bfloat16, one per row."""
    width = 1 if table.dtype == torch.bfloat16 else table.shape[1]
    return torch.zeros(len(table), width, device=table.device)


class _UpdateGroup:
    """Parameters that are updated once every ``every`` steps with the accumulated gradient."""

    def __init__(self, updates: Sequence[ParameterUpdate], every: int) -> None:
        self.updates = updates
        self._every = every
        self.n_pending = 0
        """Number of steps whose gradients have been accumulated since the last update."""
        self._scales: list[float] = []
        """The learning rate scale of each past update."""

    @property
    def due(self) -> bool:
        """Return whether the next step updates these parameters."""
        return self.n_pending + 1 >= self._every

    def sum_gradients(self, world: World) -> None:
        """Sum the gradients over all processes if the next step updates these parameters."""
        if self.due:
            for update in self.updates:
                update.sum_gradients(world)

    def step(self, scale: float) -> None:
        if not self.due:
            self.n_pending += 1
            return
        self.n_pending = 0
        self._scales.append(scale)
        for update in self.updates:
            update.step(scale)

    def state(self) -> dict[str, Tensor]:
        state = {"scales": torch.tensor(self._scales, dtype=torch.float64)}
        for update in self.updates:
            state |= add_prefix(update.prefix, update.state())
        return state

    def restore(self, state: Mapping[str, Tensor], scale_at: Callable[[int], float] | None) -> None:
        if int(state.get("waited", 0)):  # older versions saved the gradients
            logger.warning("the gradients since the last update of the index are not restored")
        if "scales" in state:
            self._scales = state["scales"].tolist()
        else:  # a checkpoint of an older version
            assert scale_at is not None
            updates = range(1, int(state["steps"]) + 1)
            self._scales = [scale_at(update * self._every - 1) for update in updates]
        for update in self.updates:
            update.restore(strip_prefix(update.prefix, state), self._scales)


class Optimizer:
    """AdamW for all parameters of a model, with the learning rates of a stage.

    The encoder is updated in every step. The classifiers of clusters (Ŵ_C) and labels (W_L) and the
    edges (A) are updated every `StageConfig.index_every` steps.
    """

    def __init__(self, model: EliasModel, stage: ResolvedStage) -> None:
        self.stage = stage
        self.steps = 0
        self._model = model
        self.chunked: ChunkedUpdate | None = None
        self.kernels: _KernelUpdate | None = None
        handled: tuple[str, ...] = ()
        if isinstance(model, OneVsAll):
            rates = (parameter_rates("labels.", p, stage) for p in model.labels.parameters())
            self.chunked, handled = ChunkedUpdate(model.labels, *rates), ("labels.",)
        elif model.graph.removed_log is None and runs_triton(model.labels.weight):
            # the kernels do not support pruned graphs
            self.kernels, handled = _KernelUpdate(model, stage), ("labels.", "graph.")
        encoder: dict[str, nn.Parameter] = {}
        index: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.startswith(handled):
                (encoder if name.startswith("encoder.") else index)[name] = parameter
        kernels = [] if self.kernels is None else [self.kernels]
        self.encoder_group = _UpdateGroup(self._updates(encoder, 1), 1)
        self.index_group = _UpdateGroup(
            [*self._updates(index, stage.index_every), *kernels], stage.index_every
        )
        self._groups = (self.encoder_group, self.index_group)

    def _updates(self, parameters: Mapping[str, nn.Parameter], every: int) -> list[ParameterUpdate]:
        """Return one update for all dense parameters, and one for each sparse table on the CPU."""
        tables: list[ParameterUpdate] = []
        dense: dict[nn.Parameter, AdamWRates] = {}
        encoder_tables = {f"encoder.{name}" for name in self._model.encoder.table_names()}
        for name, parameter in parameters.items():
            rates = parameter_rates(name, parameter, self.stage)
            is_table = name.startswith("labels.") or name in encoder_tables
            if is_table and not parameter.is_cuda:  # tables have sparse gradients on the CPU
                tables.append(_RowUpdate(name, parameter, rates, accumulates=every > 1))
            else:
                dense[parameter] = rates
        return [_DenseUpdate(dense), *tables] if dense else tables

    @property
    def has_pending_gradients(self) -> bool:
        """Return whether gradients have been accumulated for a later update (`index_every`)."""
        return any(group.n_pending for group in self._groups)

    @property
    def gradients(self) -> IndexGradients | None:
        """Return the container that kernels write gradients to, or None if they use ``.grad``."""
        return None if self.kernels is None else self.kernels.gradients

    def label_update(self, scale: float) -> LabelUpdate | None:
        """Return a function that updates W_L while the one-vs-all loss is computed.

        Return None for a model with a graph, whose W_L is updated by `step`.
        """
        return None if self.chunked is None else self.chunked.update(self.steps + 1, scale)

    def step(self, scale: float) -> None:
        """Update the parameter groups that are due, with learning rates multiplied by ``scale``.

        Several processes must have summed the gradients.
        """
        self.steps += 1
        for group in self._groups:
            group.step(scale)

    def apply_pending_decay(self) -> None:
        """Apply the weight decay that lazy updates have postponed.

        Call this before reading the weights.
        """
        for group in self._groups:
            for update in group.updates:
                update.apply_pending_decay()

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer state as named tensors, which are not copied.

        Accumulated gradients are not part of it, so there must be none (`has_pending_gradients`).
        """
        state = {"steps": torch.tensor(self.steps)}
        for i, group in enumerate(self._groups):
            state |= add_prefix(f"part.{i}.", group.state())
        if self.chunked is not None:
            state |= add_prefix(self.chunked.prefix, self.chunked.state())
        return state

    @torch.no_grad()
    def restore(
        self, state: Mapping[str, Tensor], scale_at: Callable[[int], float] | None = None
    ) -> None:
        """Load a state that `state` returned. Its tensors may be on any device.

        States of older versions have no learning rate scales. For these, ``scale_at`` must return
        the scale of a step, counted from 0.
        """
        self.steps = int(state["steps"])
        for i, group in enumerate(self._groups):
            group.restore(strip_prefix(f"part.{i}.", state), scale_at)
        if self.chunked is not None:
            self.chunked.restore(strip_prefix(self.chunked.prefix, state), [])


class WeightAverage:
    """The running mean of a model's weights, except for edges (stochastic weight averaging)."""

    def __init__(self, model: EliasModel) -> None:
        self._model = model
        self._mean: dict[str, Tensor] = {}
        self._count = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the mean."""
        self._count += 1
        for name, parameter in self._model.named_parameters():
            if name.startswith("graph."):
                continue
            if name not in self._mean:
                self._mean[name] = parameter.detach().to(torch.float32, copy=True)
            else:
                self._mean[name].lerp_(parameter.detach().float(), 1 / self._count)

    def state(self) -> dict[str, Tensor]:
        """Return the mean weights, which are not copied, and the number of updates."""
        return {"count": torch.tensor(self._count), **add_prefix("mean.", self._mean)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state` returned."""
        self._count = int(state["count"])
        means = strip_prefix("mean.", state)
        parameters = self._model.named_parameters()
        self._mean = {name: means[name].to(p.device) for name, p in parameters if name in means}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights with their running mean. A second call undoes the first.

        Weights without a mean stay as they are.
        """
        for name, parameter in self._model.named_parameters():
            if name in self._mean:
                current = parameter.detach().to(torch.float32, copy=True)
                parameter.copy_(self._mean[name])
                self._mean[name] = current
