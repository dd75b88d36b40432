"""A linear layer that predicts faster on a CPU."""

from __future__ import annotations

import platform
from collections.abc import MutableMapping
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@cache
def can_pack() -> bool:
    """Return whether torch has the operators of `PackedLinear`, and this is an x86 CPU."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    names = ("_linear_pointwise", "_reorder_linear_weight")
    available = torch.backends.mkldnn.is_available()
    return is_x86 and available and all(hasattr(torch.ops.mkldnn, name) for name in names)


class PackedLinear(nn.Linear):
    """Linear layer that calls oneDNN in inference mode, if `can_pack` and its type is float32.

    torch itself calls MKL, which packs the weights in each call and uses no AVX-512 on AMD CPUs.
    This layer keeps a packed copy of its weights until its mode is set, because training changes
    the weights. Copies of the layer and saved models do not contain the packed weights. Results
    differ from those of `nn.Linear` by rounding.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        weight = self.weight
        if (
            input.device.type != "cpu"
            or not torch.is_inference_mode_enabled()
            or torch.is_autocast_enabled("cpu")
            or not input.dtype == weight.dtype == torch.float32
            or not can_pack()
        ):
            return super().forward(input)
        state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        entry = _PACKED.get(self)
        if entry is None or entry[0] != state:
            entry = _PACKED[self] = state, torch.ops.mkldnn._reorder_linear_weight(weight)
        multiply = torch.ops.mkldnn._linear_pointwise
        result: Tensor = multiply(input, entry[1], self.bias, "none", [], "")
        return result

    def train(self, mode: bool = True) -> PackedLinear:
        """Set the mode, and drop the packed weights."""
        _PACKED.pop(self, None)
        return super().train(mode)


_PACKED: MutableMapping[PackedLinear, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()
"""The packed weights of each layer, with the address and the version of the weights."""
