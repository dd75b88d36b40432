"""AdamW for all parameters: dense ones, large tables row by row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from elias.distributed import SingleProcess
from elias.distributed.data_parallel import sum_gradients, sum_touched
from elias.kernels import IndexGradients, adamw_edges, adamw_pairs, adamw_rows
from elias.kernels.adamw import (
    AdamWRates,
    EdgeState,
    History,
    LinearState,
    RowState,
    adamw_dense,
    apply_pending_decay,
)
from elias.kernels.device import runs_triton
from elias.model.one_vs_all import OneVsAll
from elias.training.checkpoint import add_prefix, strip_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elias.config import StageConfig
    from elias.distributed import World
    from elias.kernels.one_vs_all import LabelUpdate
    from elias.model.elias import EliasModel, LinearRows


class LabelMoments:
    """W_L and its biases with their moments, held as W_L is.

    Beside a W_L in float32 both moments are whole. Beside one in bfloat16 the first is bfloat16
    too, and each label has one second moment: 4 bytes for a weight in all, instead of 12.
    """

    def __init__(self, labels: LinearRows, weight: AdamWRates, bias: AdamWRates) -> None:
        compact = labels.weight.dtype == torch.bfloat16
        self._parts = [
            _Part(labels.weight.detach(), weight, one_variance=compact),
            _Part(labels.bias.detach().unsqueeze(1), bias),
        ]

    def update(self, step: int, scale: float) -> LabelUpdate:
        """Return what applies the gradients of step ``step`` (from 1), rates times ``scale``."""

        def apply(first: int, weight_gradient: Tensor, bias_gradient: Tensor) -> None:
            gradients = (weight_gradient, bias_gradient.unsqueeze(1))
            for part, gradient in zip(self._parts, gradients, strict=True):
                part.apply(first, gradient, step, scale)

        return apply

    def state(self) -> dict[str, Tensor]:
        """Return the moments, by name."""
        return {
            f"{i}.{name}": moment
            for i, part in enumerate(self._parts)
            for name, moment in (("mean", part.mean), ("variance", part.variance))
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        for i, part in enumerate(self._parts):
            part.mean.copy_(state[f"{i}.mean"])
            part.variance.copy_(state[f"{i}.variance"])


class _Part:
    """One table and its moments."""

    def __init__(self, table: Tensor, rates: AdamWRates, *, one_variance: bool = False) -> None:
        self.table = table
        self.rates = rates
        self.mean = torch.zeros_like(table)
        width = 1 if one_variance else table.shape[1]
        self.variance = torch.zeros(len(table), width, device=table.device)

    def apply(self, first: int, gradient: Tensor, step: int, scale: float) -> None:
        """Move the rows from ``first`` on."""
        rows = slice(first, first + len(gradient))
        adamw_dense(
            self.table[rows],
            self.mean[rows],
            self.variance[rows],
            gradient,
            step=step,
            rates=self.rates._replace(lr=self.rates.lr * scale),
        )


class IndexUpdate:
    """W_L with its biases and A, their moments, and the gradients that wait for an update.

    The moments are held as W_L is (see `elias.training.optimizer`): whole in float32, or beside
    a W_L in bfloat16 the first in bfloat16 and one second moment a label.
    """

    def __init__(self, model: EliasModel, labels: AdamWRates, edges: AdamWRates) -> None:
        self._model = model
        self._rates = (labels, edges)
        device = model.labels.weight.device
        self._histories = (History(device), History(device))
        learned = model.graph.edge_logits.detach() if model.graph.learned else None
        self.gradients = IndexGradients(learned)
        self._label_state = _label_state(model)
        self._edge_state = () if learned is None else _edge_state(learned)

    def step(self, scale: float) -> None:
        """Apply the gradients collected since the last call, rates times ``scale``."""
        for history, rates in zip(self._histories, self._rates, strict=True):
            history.add(rates._replace(lr=rates.lr * scale))
        labels, edges = self._histories
        self._move_labels(labels)
        if self._model.graph.learned:
            self._move_edges(edges)

    def catch_up(self) -> None:
        """Decay the labels that were not touched in the last steps; A does not decay."""
        if self._rates[0].decay:
            mean, variance, bias_mean, bias_variance, last_step = self._label_state
            weight = self._model.labels.weight.detach()
            moments = (mean, bias_mean), (variance, bias_variance)
            apply_pending_decay(weight, *moments, last_step, self._histories[0])

    def state(self) -> dict[str, Tensor]:
        """Return the moments and the gradients that wait, by name."""
        found = add_prefix("gradients.", self.gradients.state())
        for name, tensors in (("labels", self._label_state), ("edges", self._edge_state)):
            found |= {f"{name}.{i}": tensor for i, tensor in enumerate(tensors)}
        return found

    def restore(self, state: Mapping[str, Tensor], scales: Sequence[float]) -> None:
        """Go on from what `state` returned, after steps with these scales."""
        for history, rates in zip(self._histories, self._rates, strict=True):
            history.replay(rates._replace(lr=rates.lr * scale) for scale in scales)
        device = self._model.labels.weight.device
        self.gradients.restore(strip_prefix("gradients.", state), device)
        for name, tensors in (("labels", self._label_state), ("edges", self._edge_state)):
            for i, tensor in enumerate(tensors):
                tensor.copy_(state[f"{name}.{i}"])

    @torch.no_grad()
    def _move_labels(self, history: History) -> None:
        pairs = self.gradients.take_pairs()
        if pairs is not None:
            labels = self._model.labels
            adamw_pairs(
                labels.weight, labels.bias, LinearState(*self._label_state), *pairs, history
            )

    @torch.no_grad()
    def _move_edges(self, history: History) -> None:
        graph = self._model.graph
        adamw_edges(
            graph.edge_logits,
            graph.edge_labels,
            EdgeState(*self._edge_state),
            self.gradients,
            history,
            n_labels=graph.n_labels,
        )


def _label_state(model: EliasModel) -> tuple[Tensor, ...]:
    weight, bias = model.labels.weight.detach(), model.labels.bias.detach()
    width = 1 if weight.dtype == torch.bfloat16 else weight.shape[1]
    return (
        torch.zeros_like(weight),
        torch.zeros(len(weight), width, device=weight.device),
        torch.zeros_like(bias),
        torch.zeros_like(bias),
        torch.zeros(len(bias), dtype=torch.int32, device=bias.device),
    )


def _edge_state(logits: Tensor) -> tuple[Tensor, ...]:
    steps = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    return torch.zeros_like(logits), torch.zeros_like(logits), steps


BETAS = (0.9, 0.999)
EPS = 1e-8


def schedule(step: int, n_steps: int, warmup: float) -> float:
    """Return the share of the learning rate at ``step`` (from 0): up linearly, then down to 0."""
    n_warm = warmup * n_steps
    if step < n_warm:
        return (step + 1) / (n_warm + 1)
    return max(0.0, (n_steps - step) / max(1.0, n_steps - n_warm))


class _Rates(NamedTuple):
    """How fast a parameter moves."""

    lr: float
    decay: float
    eps: float = EPS


@dataclass
class _Table:
    """One large parameter, its rows' moments, and its own learning rate and decay."""

    name: str
    weight: nn.Parameter
    rates: _Rates
    state: RowState = field(init=False)
    history: History = field(init=False)

    def __post_init__(self) -> None:
        flat = self.weight.detach().view(len(self.weight), -1)
        self.state = RowState(
            mean=torch.zeros_like(flat),
            variance=torch.zeros_like(flat),
            last_step=torch.zeros(len(flat), dtype=torch.int64, device=flat.device),
        )
        self.history = History(flat.device)

    def step(self, scale: float, *, summed: bool) -> None:
        self.history.add(self._rates_at(scale))
        gradient = self.weight.grad
        if gradient is None:
            return
        if summed:
            gradient = gradient.coalesce()
        # A step uses each table once, so its rows are distinct, though autograd forgets to say so.
        flat = self.weight.detach().view(len(self.weight), -1)
        adamw_rows(
            flat,
            self.state,
            gradient._indices()[0],
            gradient._values().view(-1, flat.shape[1]),
            self.history,
        )
        self.weight.grad = None

    def catch_up(self) -> None:
        if self.rates.decay:
            mean, variance, last_step = self.state
            flat = self.weight.detach().view(len(self.weight), -1)
            apply_pending_decay(flat, (mean,), (variance,), last_step, self.history)

    def _rates_at(self, scale: float) -> AdamWRates:
        return AdamWRates(self.rates.lr * scale, *BETAS, self.rates.eps, self.rates.decay)

    def state_tensors(self) -> dict[str, Tensor]:
        return self.state._asdict()

    def restore(self, state: Mapping[str, Tensor], scales: Sequence[float]) -> None:
        for name, tensor in self.state._asdict().items():
            tensor.copy_(state[name])
        self.history.replay(map(self._rates_at, scales))


class _ParameterGroup:
    """Parameters that move in the same steps, every so many, by the gradient summed since."""

    def __init__(
        self,
        parameters: dict[nn.Parameter, _Rates],
        tables: dict[nn.Parameter, str],
        every: int,
        index: IndexUpdate | None = None,
    ) -> None:
        self._every = every
        self._index = index
        self._waited = 0
        self._scales: list[float] = []
        """What the rates were multiplied by, in each step that moved these parameters."""
        self._tables = [
            _Table(tables[p], p, rates) for p, rates in parameters.items() if p in tables
        ]
        groups: dict[_Rates, list[Tensor]] = {}
        for parameter, rates in parameters.items():
            if parameter not in tables:
                groups.setdefault(rates, []).append(parameter)
        self._rates = list(groups)
        self._dense = torch.optim.AdamW(
            [
                {"params": group, "lr": rates.lr, "weight_decay": rates.decay, "eps": rates.eps}
                for rates, group in groups.items()
            ]
            or [{"params": []}],
            betas=BETAS,
            fused=True,
        )

    @property
    def due(self) -> bool:
        """Say whether the next step moves these parameters."""
        return self._waited + 1 >= self._every

    @property
    def settled(self) -> bool:
        """Say whether no gradient waits."""
        return self._waited == 0

    @property
    def dense(self) -> list[Tensor]:
        """Return the parameters that are no tables."""
        return [p for group in self._dense.param_groups for p in group["params"]]

    def sum_gradients(self, world: World) -> None:
        """Add up over processes what all of them hold; the labels' rows have one owner each."""
        rows = [table.weight for table in self._tables if not table.name.startswith("labels.")]
        sum_gradients(world, self.dense, rows)
        if self._index is not None and self._index.gradients.by_edge is not None:
            sum_touched(world, self._index.gradients.by_edge, self._index.gradients.touched)

    def step(self, scale: float) -> None:
        if not self.due:
            self._waited += 1
            return
        self._waited = 0
        self._scales.append(scale)
        for group, rates in zip(self._dense.param_groups, self._rates, strict=False):
            group["lr"] = rates.lr * scale
        self._dense.step()
        self._dense.zero_grad(set_to_none=True)
        for table in self._tables:
            table.step(scale, summed=self._every > 1)
        if self._index is not None:
            self._index.step(scale)

    def catch_up(self) -> None:
        for table in self._tables:
            table.catch_up()
        if self._index is not None:
            self._index.catch_up()

    def state(self) -> dict[str, Tensor]:
        scales = torch.tensor(self._scales, dtype=torch.float64)
        found = {"waited": torch.tensor(self._waited), "scales": scales}
        for i, moments in self._dense.state_dict()["state"].items():
            found |= add_prefix(f"dense.{i}.", moments)
        for table in self._tables:
            found |= add_prefix(f"table.{table.name}.", table.state_tensors())
        if self._index is not None:
            found |= add_prefix("index.", self._index.state())
        return found

    def restore(self, state: Mapping[str, Tensor], scale_at: Callable[[int], float] | None) -> None:
        self._waited = int(state["waited"])
        if "scales" in state:
            self._scales = state["scales"].tolist()
        else:  # a checkpoint of before they were kept
            assert scale_at is not None
            moves = range(1, int(state["steps"]) + 1)
            self._scales = [scale_at(move * self._every - 1) for move in moves]
        dense: dict[int, dict[str, Tensor]] = {}
        for name, tensor in strip_prefix("dense.", state).items():
            number, _, moment = name.partition(".")
            dense.setdefault(int(number), {})[moment] = tensor
        groups = self._dense.state_dict()["param_groups"]
        self._dense.load_state_dict({"state": dense, "param_groups": groups})
        for table in self._tables:
            table.restore(strip_prefix(f"table.{table.name}.", state), self._scales)
        if self._index is not None:
            self._index.restore(strip_prefix("index.", state), self._scales)


class Optimizer:
    """All of a model's parameters, each with the learning rate its stage gives it.

    The encoder moves in every step; Ŵ_C, A and W_L every `StageConfig.index_every` steps.
    """

    def __init__(
        self, model: EliasModel, stage: StageConfig, world: World = SingleProcess()
    ) -> None:
        self.stage = stage
        self._world = world
        self.steps = 0
        self._model = model
        tables = _table_parameters(model)
        self._moments = _label_moments(model, stage) if isinstance(model, OneVsAll) else None
        self._index = _index_update(model, stage) if _uses_kernels(model) else None
        parts: dict[bool, dict[nn.Parameter, _Rates]] = {True: {}, False: {}}
        for name, parameter in model.named_parameters():
            by_chunk = self._moments and name.startswith("labels.")
            by_row = self._index and name.startswith(("labels.", "graph."))
            if by_chunk or by_row or not parameter.requires_grad:
                continue
            parts[name.startswith("encoder.")][parameter] = _rates(name, parameter, stage)
        self._parts = [
            _ParameterGroup(parts[True], tables, 1),
            _ParameterGroup(parts[False], tables, stage.index_every, self._index),
        ]

    @property
    def settled(self) -> bool:
        """Say whether no gradient waits for a later step (`StageConfig.index_every`)."""
        return all(part.settled for part in self._parts)

    @property
    def gradients(self) -> IndexGradients | None:
        """Return where a loss leaves the gradients of W_L and A; None: in ``.grad``, as usual."""
        return None if self._index is None else self._index.gradients

    def label_update(self, scale: float) -> LabelUpdate | None:
        """Return what moves W_L in the step to come, while the loss of one-vs-all is computed.

        None for a model with a graph: its labels move in `step` like all else.
        """
        return None if self._moments is None else self._moments.update(self.steps + 1, scale)

    def step(self, scale: float) -> None:
        """Update what is due by its gradient, learning rates times ``scale``; clear that."""
        self.steps += 1
        due = [part for part in self._parts if part.due]
        if self._world.size > 1:
            for part in due:
                part.sum_gradients(self._world)
        if self.stage.max_grad_norm:
            dense = [p for part in due for p in part.dense]
            torch.nn.utils.clip_grad_norm_(dense, self.stage.max_grad_norm)
        for part in self._parts:
            part.step(scale)

    def catch_up(self) -> None:
        """Decay the rows that the last steps did not touch, before weights are used as they are."""
        for part in self._parts:
            part.catch_up()

    def state(self) -> dict[str, Tensor]:
        """Return all that the next steps depend on beside the weights, by name.

        These are the tensors themselves: who keeps them copies them.
        """
        found = {"steps": torch.tensor(self.steps)}
        for i, part in enumerate(self._parts):
            found |= add_prefix(f"part.{i}.", part.state())
        if self._moments is not None:
            found |= add_prefix("labels.", self._moments.state())
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:  # summed since the last move (`index_every`)
                found |= add_prefix(f"gradient.{name}.", _gradient_state(parameter.grad))
        return found

    @torch.no_grad()
    def restore(
        self, state: Mapping[str, Tensor], scale_at: Callable[[int], float] | None = None
    ) -> None:
        """Go on from what `state` returned, on whatever device it was.

        ``scale_at`` says the scale of a step (from 0) where an old state does not.
        """
        self.steps = int(state["steps"])
        for i, part in enumerate(self._parts):
            part.restore(strip_prefix(f"part.{i}.", state), scale_at)
        if self._moments is not None:
            self._moments.restore(strip_prefix("labels.", state))
        for name, parameter in self._model.named_parameters():
            held = strip_prefix(f"gradient.{name}.", state)
            parameter.grad = _gradient_of(held, parameter) if held else None


def _gradient_state(gradient: Tensor) -> dict[str, Tensor]:
    """Return a gradient's parts; the rows of a sparse one as they are, since they add up so."""
    if not gradient.is_sparse:
        return {"dense": gradient}
    return {
        "indices": gradient._indices(),
        "values": gradient._values(),
        "coalesced": torch.tensor(gradient.is_coalesced()),
    }


def _gradient_of(held: Mapping[str, Tensor], parameter: nn.Parameter) -> Tensor:
    if "dense" in held:
        return held["dense"].to(parameter.device)
    return torch.sparse_coo_tensor(
        held["indices"],
        held["values"],
        parameter.shape,
        device=parameter.device,
        is_coalesced=bool(held["coalesced"]),
        check_invariants=True,
    )


def _table_parameters(model: EliasModel) -> dict[nn.Parameter, str]:
    """Return the tables whose gradient comes as rows; on a GPU W_L at most, and that by Triton."""
    names = {f"encoder.{name}" for name in model.encoder.table_names()}
    labels = {"labels.weight", "labels.bias"}
    return {
        p: name
        for name, p in model.named_parameters()
        if (name in names and not p.is_cuda)
        or (name in labels and (not p.is_cuda or runs_triton(p)))
    }


def _uses_kernels(model: EliasModel) -> bool:
    """Say whether W_L and A are moved by Triton kernels; they know nothing of pruned edges."""
    if isinstance(model, OneVsAll) or model.graph.removed_log is not None:
        return False
    return runs_triton(model.labels.weight)


def _label_moments(model: OneVsAll, stage: StageConfig) -> LabelMoments:
    weight, bias = (
        _rates(f"labels.{name}", parameter, stage)
        for name, parameter in (("weight", model.labels.weight), ("bias", model.labels.bias))
    )
    return LabelMoments(
        model.labels,
        AdamWRates(weight.lr, *BETAS, weight.eps, weight.decay),
        AdamWRates(bias.lr, *BETAS, bias.eps, bias.decay),
    )


def _index_update(model: EliasModel, stage: StageConfig) -> IndexUpdate:
    labels, edges = (
        AdamWRates(found.lr, *BETAS, found.eps, found.decay)
        for found in (
            _rates("labels.weight", model.labels.weight, stage),
            _rates("graph.edge_logits", model.graph.edge_logits, stage),
        )
    )
    return IndexUpdate(model, labels, edges)


def _rates(name: str, parameter: Tensor, stage: StageConfig) -> _Rates:
    """Return how fast a stage moves a parameter."""
    decay = stage.weight_decay if parameter.ndim > 1 else 0.0
    if name.startswith("graph."):
        return _Rates(stage.edge_lr, 0.0)
    if name.startswith("clusters."):
        return _Rates(stage.cluster_lr, decay)
    if name.startswith("labels."):
        return _Rates(stage.label_lr, decay, stage.label_eps)
    if name == "encoder.vectors":
        return _Rates(stage.bag_lr, 0.0)
    return _Rates(stage.encoder_lr, decay)
