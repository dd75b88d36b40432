"""AdamW on a GPU for W_L and A: only the rows and clusters that the steps touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elias.kernels.catch_up import catch_up
from elias.kernels.gradients import IndexGradients
from elias.kernels.update import History
from elias.training.checkpoints import prefixed, under

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from elias.kernels.update import AdamWRates
    from elias.model.elias import EliasModel


class IndexUpdate:
    """W_L with its biases and A, their moments, and the gradients that wait for an update.

    The moments are held as W_L is (see `elias.training.label_update`): whole in float32, or beside
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
            catch_up(weight, *moments, last_step, self._histories[0])

    def state(self) -> dict[str, Tensor]:
        """Return the moments and the gradients that wait, by name."""
        found = prefixed("gradients.", self.gradients.state())
        for name, tensors in (("labels", self._label_state), ("edges", self._edge_state)):
            found |= {f"{name}.{i}": tensor for i, tensor in enumerate(tensors)}
        return found

    def restore(self, state: Mapping[str, Tensor], scales: Sequence[float]) -> None:
        """Go on from what `state` returned, after steps with these scales."""
        for history, rates in zip(self._histories, self._rates, strict=True):
            history.replay(rates._replace(lr=rates.lr * scale) for scale in scales)
        device = self._model.labels.weight.device
        self.gradients.restore(under("gradients.", state), device)
        for name, tensors in (("labels", self._label_state), ("edges", self._edge_state)):
            for i, tensor in enumerate(tensors):
                tensor.copy_(state[f"{name}.{i}"])

    @torch.no_grad()
    def _move_labels(self, history: History) -> None:
        from elias.kernels.triton_rows import pair_rows
        from elias.kernels.triton_update import LinearState, adamw_pairs

        pairs = self.gradients.take_pairs()
        if pairs is not None:
            labels, coefficients, embeddings = pairs
            weight = self._model.labels.weight
            adamw_pairs(
                weight,
                self._model.labels.bias,
                LinearState(*self._label_state),
                # the embeddings are read once a pair, so beside compact weights in bfloat16 too
                pair_rows(labels, coefficients, embeddings.to(weight.dtype)),
                history,
            )

    @torch.no_grad()
    def _move_edges(self, history: History) -> None:
        from elias.kernels.triton_update import EdgeState, adamw_edges

        graph, gradients = self._model.graph, self.gradients
        assert gradients.by_edge is not None
        assert gradients.touched is not None
        adamw_edges(
            graph.edge_logits,
            graph.edge_labels,
            EdgeState(*self._edge_state),
            gradients.by_edge,
            gradients.touched,
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
