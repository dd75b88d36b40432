"""Products with a few rows of a large table, and sparse gradients for those rows.

On the CPU a table's gradient comes as a sparse tensor holding one row per row touched, which
`elias.training.optimizer` updates in place. On a GPU Triton kernels do the same, or leave what the
gradient is made of to the optimiser (`IndexGradients`); without Triton the logits of a shortlist
are taken out of one dense product while that fits, else gathered in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels.cpu import rows as cpu_rows
from elias.kernels.device import runs_triton


class IndexGradients:
    """The gradient of W_L and of A since the last update, in the form that costs least.

    W_L's is a list of pairs, a label and the embedding that moves it, with a coefficient each: far
    less than one row per touched label, let alone L×D. A's is kept by log ŝ_{c,ℓ} (Eq. 5); the
    softmax is left to the update, since A does not change in between.
    """

    def __init__(self, edges: Float[Tensor, "C E"] | None) -> None:
        """Begin with nothing; ``edges`` are the learned logits, None where A is fixed."""
        self.by_edge: Float[Tensor, "C E"] | None = None
        """The gradient by log ŝ_{c,ℓ}, zero but for touched clusters."""
        self.touched: Int[Tensor, " C"] | None = None
        """1 for each cluster a kept path runs through."""
        if edges is not None:
            self.by_edge = torch.zeros_like(edges, dtype=torch.float32)
            self.touched = torch.zeros(len(edges), dtype=torch.int32, device=edges.device)
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []

    def add_pairs(
        self,
        labels: Int[Tensor, "B K"],
        coefficients: Float[Tensor, "B K"],
        embedding: Float[Tensor, "B D"],
    ) -> None:
        """Note that label labels[i, k] gets the gradient coefficients[i, k] · embedding[i]."""
        self._pairs.append((labels, coefficients, embedding.detach()))

    def take_pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the labels, coefficients and embeddings noted since the last call."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return None
        if len(pairs) == 1:
            return pairs[0]
        labels, coefficients, embeddings = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return labels, coefficients, embeddings

    def state(self) -> dict[str, Tensor]:
        """Return what was noted since the last update, by name."""
        found = {
            f"pairs.{number}.{part}": tensor
            for number, pair in enumerate(self._pairs)
            for part, tensor in enumerate(pair)
        }
        if self.by_edge is not None and self.touched is not None:
            found |= {"by_edge": self.by_edge, "touched": self.touched}
        return found

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from what `state` returned."""
        if self.by_edge is not None and self.touched is not None:
            self.by_edge.copy_(state["by_edge"])
            self.touched.copy_(state["touched"])
        n_pairs = sum(name.startswith("pairs.") for name in state) // 3
        self._pairs = []
        for number in range(n_pairs):
            labels, coefficients, embedding = (
                state[f"pairs.{number}.{part}"].to(device) for part in range(3)
            )
            self._pairs.append((labels, coefficients, embedding))

    @property
    def n_pairs(self) -> int:
        """How many times pairs were noted since the last update."""
        return len(self._pairs)

    def drop_pairs_after(self, count: int) -> None:
        """Forget all but the first ``count`` of them."""
        del self._pairs[count:]

    def take_last_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what was noted last, and forget it."""
        return self._pairs.pop()


_DENSE_LOGITS = 2**30  # up to this many B·L logits a GPU computes them all: faster than gathering
_GATHERED = 2**27  # else at most this many gathered weights at a time


def label_logits(
    embedding: Float[Tensor, "B D"],
    weight: Float[Tensor, "L D"],
    bias: Float[Tensor, " L"],
    labels: Int[Tensor, "B K"],
    gradients: IndexGradients | None = None,
) -> Float[Tensor, "B K"]:
    """Return w_ℓ·φ + bias_ℓ for the K labels of each point; a padded label (= L) gives 0.

    With ``gradients`` weights and biases get no gradient themselves: the backward pass leaves
    there what it is made of. That takes Triton.
    """
    logits: Tensor
    if gradients is not None or runs_triton(embedding):
        logits = _LabelLogitsTriton.apply(  # type: ignore[no-untyped-call]
            embedding, weight, bias, labels, gradients
        )
    elif embedding.is_cuda:
        logits = _logits_torch(embedding, weight, bias, labels)
    else:
        logits = _LabelLogits.apply(  # type: ignore[no-untyped-call]
            embedding, weight, bias, labels
        )
    return logits


def bag_sum(
    weight: Float[Tensor, "V D"],
    ids: Int[Tensor, " tokens"],
    offsets: Int[Tensor, " B+1"],
    coefficients: Float[Tensor, " tokens"],
) -> Float[Tensor, "B D"]:
    """Return Σ_j coefficient_j · weight[id_j] for each bag; no gradient to the coefficients."""
    if weight.is_cuda:
        return torch.nn.functional.embedding_bag(
            ids,
            weight,
            offsets,
            mode="sum",
            per_sample_weights=coefficients,
            include_last_offset=True,
        )
    bags: Tensor = _BagSum.apply(  # type: ignore[no-untyped-call]
        weight, ids, offsets, coefficients
    )
    return bags


def _logits_torch(embedding: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    n_labels = len(weight)
    real = labels < n_labels
    safe = labels.clamp(max=n_labels - 1)
    if len(embedding) * n_labels <= _DENSE_LOGITS:
        logits = torch.addmm(bias, embedding, weight.T).gather(1, safe)
    else:
        rows = max(1, _GATHERED // (labels.shape[1] * weight.shape[1]))
        parts = [
            torch.einsum("bd,bkd->bk", embedding[i : i + rows], weight[safe[i : i + rows]])
            for i in range(0, len(embedding), rows)
        ]
        logits = torch.cat(parts) + bias[safe]
    return torch.where(real, logits, torch.zeros((), device=logits.device))


def _array(tensor: Tensor) -> cpu_rows.Array:
    return tensor.detach().contiguous().numpy()


def _n_chunks(labels: Tensor) -> int:
    return min(numba.get_num_threads(), max(1, len(labels)))


def _offsets(labels: Tensor) -> cpu_rows.Array:
    return np.arange(len(labels) + 1, dtype=np.int64) * labels.shape[1]


def _row_gradient(
    groups: tuple[cpu_rows.Array, ...], coefficients: cpu_rows.Array, vectors: cpu_rows.Array
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (touched rows, their gradients, the sum of their coefficients)."""
    touched = torch.from_numpy(groups[0])
    gradient = torch.empty((len(touched), vectors.shape[1]))
    sums = torch.empty(len(touched))
    cpu_rows.sum_groups(vectors, groups, coefficients, gradient.numpy(), sums.numpy())
    return touched, gradient, sums


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return a table's gradient; the rows are ascending and each stands there once."""
    # torch 2.11 and 2.12 warn in spite of check_invariants=False; this is silent in all of them,
    # and leaves the checks on for the user who turned them on
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, is_coalesced=True)


class _LabelLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, embedding: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        if not any(ctx.needs_input_grad):
            out = torch.empty(labels.shape, dtype=torch.float32)
            cpu_rows.gather_dot(
                _array(embedding), _array(weight), _array(bias), _array(labels), out.numpy()
            )
            return out
        out = torch.empty(labels.shape, dtype=torch.float32)
        arrays = (_array(embedding), _array(weight), _array(bias), _array(labels))
        cpu_rows.shortlist_dots(*arrays, _n_chunks(labels), out.numpy())
        ctx.save_for_backward(embedding, weight, bias, labels)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        embedding, weight, bias, labels = ctx.saved_tensors
        slots = (_array(labels), _array(grads[0]))
        grad_embedding = torch.empty(embedding.shape, dtype=torch.float32)
        chunks = _n_chunks(labels)
        cpu_rows.sum_shortlists(_array(weight), *slots, chunks, grad_embedding.numpy())
        groups = cpu_rows.group_by_id(slots[0].reshape(-1), _offsets(labels), len(weight))
        rows, gradient, sums = _row_gradient(groups, slots[1].reshape(-1), _array(embedding))
        return (
            grad_embedding,
            _sparse(rows, gradient, weight.shape),
            _sparse(rows, sums, bias.shape),
            None,
        )


class _LabelLogitsTriton(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        embedding: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        gradients: IndexGradients | None,
    ) -> Tensor:
        from elias.kernels.gpu import rows as gpu_rows

        ctx.save_for_backward(embedding, weight, bias, labels)
        ctx.gradients = gradients
        return gpu_rows.gather_dot(embedding, weight, bias, labels)

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        from elias.kernels.gpu import rows as gpu_rows

        embedding, weight, bias, labels = ctx.saved_tensors
        by_embedding = gpu_rows.gather_sum(grads[0], weight, labels)
        if ctx.gradients is not None:
            ctx.gradients.add_pairs(labels, grads[0], embedding)
            return by_embedding, None, None, None, None
        pairs = gpu_rows.pair_rows(labels, grads[0], embedding)
        rows, gradient, sums = gpu_rows.summed_rows(pairs, len(weight))
        by_weight = _sparse(rows, gradient.to(weight.dtype), weight.shape)
        return by_embedding, by_weight, _sparse(rows, sums, bias.shape), None, None


class _BagSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, offsets: Tensor, coefficients: Tensor
    ) -> Tensor:
        out = torch.empty((len(offsets) - 1, weight.shape[1]), dtype=torch.float32)
        cpu_rows.sum_rows(
            _array(weight), _array(ids), _array(offsets), _array(coefficients), out.numpy()
        )
        ctx.save_for_backward(weight, ids, offsets, coefficients)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        weight, ids, offsets, coefficients = ctx.saved_tensors
        groups = cpu_rows.group_by_id(ids.numpy(), offsets.numpy(), len(weight))
        rows, gradient, _ = _row_gradient(groups, coefficients.numpy(), _array(grads[0]))
        return _sparse(rows, gradient, weight.shape), None, None, None
