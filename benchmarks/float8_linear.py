"""Linear layers of an encoder whose matrix products have float8 operands, and training with them.

    PYTHONPATH=src python3 benchmarks/float8_linear.py row train data/wordnet-related --out RUN ...

The command line after ``row`` or ``tensor`` is that of ``elias``; it must name a transformer. Only
training steps use float8: held-out points, the saved model and predictions are as usual. On a CPU,
set ``encoder.precision=bfloat16``.

Each operand is divided by a scale, one per row of the product (``row``) or one in all (``tensor``),
so that its largest value is the largest of the type. Weights and activations are e4m3 (3 bits of
mantissa), gradients e5m2 (2 bits, a wider range). ``torch._scaled_mm`` multiplies; sums are float32
and results bfloat16.
"""

import sys

import gpu_setup  # noqa: F401  # it must come before elias where numba is missing
import torch

from elias.kernels.cpu.packed_linear import PackedLinear

SCALES = ("tensor", "row")
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16  # of the inner dimension and of the columns of the result
_SMALLEST = 1e-12  # scale of a row of zeros


def quantize(values, dtype, scales):
    """Return the values as contiguous float8, and their scales, one per row or one in all."""
    largest = values.abs().amax(dim=1, keepdim=True) if scales == "row" else values.abs().amax()
    scale = largest.float().clamp(min=_SMALLEST) / torch.finfo(dtype).max
    return (values.float() / scale).to(dtype).contiguous(), scale


def product(left, right, left_type, scales):
    """Return left·rightᵀ in bfloat16, by float8 if the sizes permit."""
    if left.shape[1] % _MULTIPLE or right.shape[0] % _MULTIPLE:
        return left.to(torch.bfloat16) @ right.to(torch.bfloat16).t()
    a, a_scale = quantize(left, left_type, scales)
    b, b_scale = quantize(right, FORWARD, scales)
    return torch._scaled_mm(
        a,
        b.t(),  # column-major, as cuBLAS requires
        a_scale,
        b_scale.t() if scales == "row" else b_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=left_type is FORWARD,
    )


class Float8Product(torch.autograd.Function):
    """x·Wᵀ and its gradients, each a product of float8 operands."""

    @staticmethod
    def forward(ctx, x, weight, scales):
        ctx.save_for_backward(x, weight)
        ctx.scales = scales
        return product(x, weight, FORWARD, scales)

    @staticmethod
    def backward(ctx, by_output):
        x, weight = ctx.saved_tensors
        by_x = product(by_output, weight.t(), BACKWARD, ctx.scales)
        by_weight = product(by_output.t(), x.t(), BACKWARD, ctx.scales)
        return by_x.to(x.dtype), by_weight.to(weight.dtype), None


class Float8Linear(PackedLinear):
    """Linear layer that multiplies in float8 while gradients are computed."""

    scales = "row"

    def forward(self, x):
        if not torch.is_grad_enabled():
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        result = Float8Product.apply(rows, self.weight, self.scales)
        if self.bias is not None:
            result = result + self.bias.to(result.dtype)
        return result.view(*x.shape[:-1], -1)


class TensorFloat8Linear(Float8Linear):
    """`Float8Linear` with one scale for each operand."""

    scales = "tensor"


def use_float8(transformer, scales):
    """Let all linear layers of a transformer multiply in float8."""
    layer = {"row": Float8Linear, "tensor": TensorFloat8Linear}[scales]
    for part in transformer.modules():
        if type(part) is PackedLinear:
            part.__class__ = layer


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in SCALES:
        raise SystemExit(__doc__)
    from elias.cli import main as elias_main
    from elias.model.transformer import TransformerEncoder

    scales, load = sys.argv.pop(1), TransformerEncoder.from_config.__func__

    def from_config(cls, config):
        encoder = load(cls, config)
        use_float8(encoder.transformer, scales)
        return encoder

    TransformerEncoder.from_config = classmethod(from_config)
    elias_main()


if __name__ == "__main__":
    main()
