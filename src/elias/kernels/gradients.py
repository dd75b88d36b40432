"""Sparse gradients of large tables: torch sparse tensors, or a compact form for Triton."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor


class IndexGradients:
    """Gradients of W_L and A since the last update, stored compactly.

    W_L's gradient is a list of (label, embedding) pairs with one coefficient each. This needs far
    less memory than a row per touched label or a dense L×D tensor. A's gradient is stored with
    respect to log ŝ_{c,ℓ} (Eq. 5). The update backpropagates it through the softmax once for all
    backward passes, since A does not change between updates. Only Triton kernels add gradients.
    """

    def __init__(self, edge_logits: Float[Tensor, "C E"] | None) -> None:
        """Start without gradients; ``edge_logits`` is A, or None if A is fixed."""
        self.by_edge: Float[Tensor, "C E"] | None = None
        """The gradient with respect to log ŝ_{c,ℓ}; zero for clusters that are not touched."""
        self.touched: Int[Tensor, " C"] | None = None
        """1 for each cluster on a path since the last update, else 0."""
        if edge_logits is not None:
            self.by_edge = torch.zeros_like(edge_logits, dtype=torch.float32)
            self.touched = torch.zeros(
                len(edge_logits), dtype=torch.int32, device=edge_logits.device
            )
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        """(labels, coefficients, embeddings) of each backward pass since the last update."""

    def add_pairs(
        self,
        labels: Int[Tensor, "B K"],
        coefficients: Float[Tensor, "B K"],
        embedding: Float[Tensor, "B D"],
    ) -> None:
        """Add coefficients[i, k] · embedding[i] to the gradient of label labels[i, k]."""
        self.pairs.append((labels, coefficients, embedding.detach()))

    def take_pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return and remove the labels, coefficients and embeddings of all pairs."""
        pairs, self.pairs = self.pairs, []
        if len(pairs) <= 1:
            return pairs[0] if pairs else None
        labels, coefficients, embeddings = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return labels, coefficients, embeddings

    def take_last_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return and remove the pairs of the last backward pass."""
        return self.pairs.pop()

    def state(self) -> dict[str, Tensor]:
        """Return all gradients by name, for a checkpoint."""
        tensors = {
            f"pairs.{number}.{part}": tensor
            for number, pair in enumerate(self.pairs)
            for part, tensor in enumerate(pair)
        }
        if self.by_edge is not None and self.touched is not None:
            tensors |= {"by_edge": self.by_edge, "touched": self.touched}
        return tensors

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the gradients from a dict that `state` returned."""
        if self.by_edge is not None and self.touched is not None:
            self.by_edge.copy_(state["by_edge"])
            self.touched.copy_(state["touched"])
        n_pairs = sum(name.startswith("pairs.") for name in state) // 3
        self.pairs = []
        for number in range(n_pairs):
            labels, coefficients, embedding = (
                state[f"pairs.{number}.{part}"].to(device) for part in range(3)
            )
            self.pairs.append((labels, coefficients, embedding))


def sparse_gradient(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Return a table's gradient as a sparse tensor; ``rows`` must be ascending and distinct."""
    # torch 2.11 and 2.12 warn in spite of check_invariants=False; this is silent in all of them,
    # and does not change the user's setting
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, shape, is_coalesced=True)
