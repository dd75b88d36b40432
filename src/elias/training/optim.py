"""AdamW for all parameters: plain for the dense ones, row by row for the large tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from elias.distributed.gradients import sum_gradients, sum_touched
from elias.kernels import adamw_rows
from elias.kernels.device import runs_triton
from elias.kernels.update import AdamWRates, RowState
from elias.model.one_vs_all import OneVsAll
from elias.training.checkpoints import prefixed, under
from elias.training.index_update import IndexUpdate
from elias.training.label_update import LabelMoments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elias.config import StageConfig
    from elias.distributed import World
    from elias.kernels.every_label import LabelUpdate
    from elias.kernels.gradients import IndexGradients
    from elias.model.elias import EliasModel

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

    def __post_init__(self) -> None:
        flat = self.weight.detach().view(len(self.weight), -1)
        self.state = RowState(
            mean=torch.zeros_like(flat),
            variance=torch.zeros_like(flat),
            last_step=torch.zeros(len(flat), dtype=torch.int64, device=flat.device),
        )

    def step(self, step: int, scale: float, *, summed: bool) -> None:
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
            step=step,
            rates=AdamWRates(self.rates.lr * scale, *BETAS, self.rates.eps, self.rates.decay),
        )
        self.weight.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        return self.state._asdict()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state._asdict().items():
            tensor.copy_(state[name])


class _Part:
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
        self._steps = 0
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
        self._steps += 1
        for group, rates in zip(self._dense.param_groups, self._rates, strict=False):
            group["lr"] = rates.lr * scale
        self._dense.step()
        self._dense.zero_grad(set_to_none=True)
        for table in self._tables:
            table.step(self._steps, scale, summed=self._every > 1)
        if self._index is not None:
            self._index.step(self._steps, scale)

    def state(self) -> dict[str, Tensor]:
        found = {"waited": torch.tensor(self._waited), "steps": torch.tensor(self._steps)}
        for i, moments in self._dense.state_dict()["state"].items():
            found |= prefixed(f"dense.{i}.", moments)
        for table in self._tables:
            found |= prefixed(f"table.{table.name}.", table.state_tensors())
        if self._index is not None:
            found |= prefixed("index.", self._index.state())
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._waited, self._steps = int(state["waited"]), int(state["steps"])
        dense: dict[int, dict[str, Tensor]] = {}
        for name, tensor in under("dense.", state).items():
            number, _, moment = name.partition(".")
            dense.setdefault(int(number), {})[moment] = tensor
        groups = self._dense.state_dict()["param_groups"]
        self._dense.load_state_dict({"state": dense, "param_groups": groups})
        for table in self._tables:
            table.restore(under(f"table.{table.name}.", state))
        if self._index is not None:
            self._index.restore(under("index.", state))


class Optimizer:
    """All of a model's parameters, each with the learning rate its stage gives it.

    The encoder moves in every step; Ŵ_C, A and W_L every `StageConfig.index_every` steps.
    """

    def __init__(self, model: EliasModel, stage: StageConfig, world: World | None = None) -> None:
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
            _Part(parts[True], tables, 1),
            _Part(parts[False], tables, stage.index_every, self._index),
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
        if self._world is not None:
            for part in due:
                part.sum_gradients(self._world)
        if self.stage.max_grad_norm:
            dense = [p for part in due for p in part.dense]
            torch.nn.utils.clip_grad_norm_(dense, self.stage.max_grad_norm)
        for part in self._parts:
            part.step(scale)

    def state(self) -> dict[str, Tensor]:
        """Return all that the next steps depend on beside the weights, by name.

        These are the tensors themselves: who keeps them copies them.
        """
        found = {"steps": torch.tensor(self.steps)}
        for i, part in enumerate(self._parts):
            found |= prefixed(f"part.{i}.", part.state())
        if self._moments is not None:
            found |= prefixed("labels.", self._moments.state())
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:  # summed since the last move (`index_every`)
                found |= prefixed(f"gradient.{name}.", _gradient_state(parameter.grad))
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned, on whatever device it was."""
        self.steps = int(state["steps"])
        for i, part in enumerate(self._parts):
            part.restore(under(f"part.{i}.", state))
        if self._moments is not None:
            self._moments.restore(under("labels.", state))
        for name, parameter in self._model.named_parameters():
            held = under(f"gradient.{name}.", state)
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


class WeightAverage:
    """The running mean of a model's weights, A excepted (SWA)."""

    def __init__(self, model: EliasModel) -> None:
        self._model = model
        self._mean: dict[str, Tensor] = {}
        self._count = 0

    @property
    def started(self) -> bool:
        """Say whether anything has been averaged."""
        return self._count > 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the mean."""
        self._count += 1
        for name, parameter in self._model.named_parameters():
            if name.startswith("graph."):
                continue
            if name not in self._mean:
                self._mean[name] = parameter.detach().to(torch.float32, copy=True)
            else:
                self._mean[name].lerp_(parameter.detach().float(), 1 / self._count)

    def state(self) -> dict[str, Tensor]:
        """Return the mean and what it is of, by name; the tensors themselves."""
        return {"count": torch.tensor(self._count), **prefixed("mean.", self._mean)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self._count = int(state["count"])
        devices = {name: parameter.device for name, parameter in self._model.named_parameters()}
        self._mean = {name: mean.to(devices[name]) for name, mean in under("mean.", state).items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights with the mean; a second call undoes the first."""
        for name, parameter in self._model.named_parameters():
            if name in self._mean:
                held = parameter.detach().to(torch.float32, copy=True)
                parameter.copy_(self._mean[name])
                self._mean[name] = held
