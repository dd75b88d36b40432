"""What backward passes leave for an update that sums the gradient itself (on a GPU)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
