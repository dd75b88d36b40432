"""Measure a candidate of the attention kernels for packed texts (`tiled_attention`) on a GPU.

PYTHONPATH=src python3 benchmarks/gpu_attention.py --out results   # two minutes
TRITON_INTERPRET=1 PYTHONPATH=src python3 benchmarks/gpu_attention.py --device cpu   # small, slow

First come its errors against float64, then the time of a forward and a backward pass beside the
kernels of the package (for texts of up to 64 tokens), torch's attention for texts of different
lengths, and texts padded to the longest one. The rest of --seconds is for a sweep of tilings. The
lengths are those of `packed_tokens`; "short, many" are short texts where 512 tokens are possible,
as far as the kernel knows. A CUDA graph repeats a call, so that its inputs may be in the cache.
"""

import argparse
import math
import time
from itertools import product, zip_longest
from types import SimpleNamespace
from unittest.mock import patch

import gpu_setup  # noqa: F401  # it must come before elias where numba is missing
import numpy as np
import tiled_attention
import torch
from gpu_check import poison
from gpu_setup import SEED, Results, attempt, median_ms, ms, ratio, table
from packed_tokens import RANDOM, random_tokens
from torch.nn.functional import scaled_dot_product_attention

from elias.kernels import plain
from elias.kernels.gpu.attention import MAX_TOKENS, short_attention

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 2e-3}
PARTS = ("result", "by query", "by key", "by value")
OTHERS = ("present", "varlen", "padded")

GPU = SimpleNamespace(
    dtype=torch.bfloat16,
    heads=12,
    sizes=(32, 64),  # of a head
    texts=512,
    calls=10,  # in a CUDA graph
    checked=(  # number type, size of a head, maximum length
        *product([torch.bfloat16], [32, 64, 128], [64, 512]),
        (torch.bfloat16, 64, 20),
        (torch.float32, 32, 200),
        (torch.float32, 64, 512),
    ),
    cases=("short", "short, many", "mixed", "all 256", "all 512"),
    # tilings of the sweep, the most promising ones first: they take long to compile
    forward=((64, 4, 1), (64, 4, 2), (32, 2, 2), (128, 8, 2), (64, 8, 2), (32, 1, 1), (128, 4, 1)),
    backward=((64, 4, 1), (32, 2, 1), (64, 8, 1), (32, 4, 1), (32, 2, 2), (64, 4, 2)),
)
CPU = SimpleNamespace(
    dtype=torch.float32,
    heads=1,
    sizes=(16,),
    texts=4,
    calls=1,
    checked=((torch.float32, 16, 40), (torch.float32, 16, 150)),
    cases=("short", "mixed"),
    forward=((64, 1, 1), (32, 1, 1)),
    backward=((64, 1, 1),),
)


def lengths_of(case, n_texts):
    """Return the lengths of texts, and the maximum that kernels are told."""
    if case.startswith("all "):
        length = int(case.removeprefix("all "))
        return torch.full((n_texts * 128 // length,), length), length
    name, _, many = case.partition(", ")
    longest, n_texts = (64, n_texts) if name == "short" else (256, n_texts // 2)
    tokens = random_tokens(*RANDOM[name], longest, n_texts, np.random.default_rng(SEED))
    return torch.from_numpy(tokens.lengths), 512 if many else longest


class Problem:
    """Queries, keys and values of packed texts, and the gradient of their attention."""

    def __init__(self, device, dtype, heads, size, lengths, longest):
        torch.manual_seed(SEED)
        self.lengths, self.longest = lengths, longest
        self.bounds = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().to(device)
        shape = int(lengths.sum()), heads, size
        self.parts = [torch.randn(shape, device=device).to(dtype) for _ in range(4)]

    def both(self, attend):
        """Return a function of the forward and backward pass."""
        return passes(lambda *inputs: attend(*inputs, self.bounds, self.longest), self.parts)

    def candidate(self):
        """Return functions of the forward pass of the candidate, and of its backward pass."""
        *inputs, gradient = self.parts
        others = self.bounds, self.longest
        given = *inputs, *tiled_attention.tiled_attention(*inputs, *others), *others
        return {
            "forward": lambda: tiled_attention.tiled_attention(*inputs, *others),
            "backward": lambda: tiled_attention.tiled_attention_gradients(gradient, *given),
        }

    def padded(self):
        """Return a function of both passes over texts that are padded to the longest one."""
        longest = -(-int(self.lengths.max()) // 32) * 32
        inside = (torch.arange(longest) < self.lengths[:, None]).to(self.bounds.device)
        # kernels that take no mask are faster
        mask = None if inside.all() else inside[:, None, None, :].expand(-1, -1, longest, -1)
        _, heads, size = self.parts[0].shape
        shape = len(self.lengths), heads, longest, size
        parts = [self.parts[0].new_empty(shape).normal_() for _ in range(4)]
        return passes(lambda *qkv: scaled_dot_product_attention(*qkv, attn_mask=mask), parts)

    def errors(self, attend):
        """Return the errors of result and gradients relative to the norm of those in float64."""
        poison(self.bounds.device)
        actual = [part.cpu() for part in self.both(attend)()]
        bounds, parts = self.bounds.cpu(), [part.cpu().double() for part in self.parts]
        exact = passes(lambda *qkv: plain.packed_attention(*qkv, bounds, self.longest), parts)()
        both = zip(PARTS, actual, exact, strict=True)
        return {part: ((a - e).norm() / e.norm()).item() for part, a, e in both}


def passes(attend, parts):
    """Return a function that computes the result and the gradients of queries, keys and values."""

    def work():
        leaves = [part.detach().requires_grad_() for part in parts[:3]]
        result = attend(*leaves)
        return result.detach(), *torch.autograd.grad(result, leaves, parts[3])

    return work


def check(device, dtype, size, longest):
    """Return the errors of the candidate for texts of random lengths, one of them empty."""
    lengths = torch.randint(1, longest + 1, (12 if device.type == "cuda" else 4,))
    lengths[0], lengths[1] = longest, 0
    problem = Problem(device, dtype, 3, size, lengths, longest)
    found = problem.errors(tiled_attention.packed_attention)
    tile = tiled_attention._tiling(size, longest, dtype.itemsize).tile
    verdict = "ok" if all(error < LIMITS[dtype] for error in found.values()) else "FAIL"
    return {**found, "tile": tile, "longest": longest, "verdict": verdict}


def microseconds(work, calls, repeat):
    """Return the median time of a call, on a GPU in a CUDA graph; None if it fails."""
    if not torch.cuda.is_available():
        return attempt(lambda: 1e3 * median_ms(lambda _: work(), repeat, warm=0))

    def measure():
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # what a first call does cannot be captured
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                work()
        return 1e3 * median_ms(lambda _: graph.replay(), repeat) / calls

    return attempt(measure)


def compare(problem, plan, repeat):
    """Return the time of both passes of each implementation."""
    works = {"candidate": problem.both(tiled_attention.packed_attention)}
    if problem.longest <= MAX_TOKENS:
        works["present"] = problem.both(short_attention)
    works |= {"varlen": problem.both(plain.packed_attention), "padded": problem.padded()}
    return {name: microseconds(work, plan.calls, repeat) for name, work in works.items()}


def sweep(problems, plan, repeat, results, end):
    """Record the time of each pass of the candidate by tiling and problem, until ``end``."""
    works = {key: problem.candidate() for key, problem in problems.items()}
    for both in zip_longest(plan.forward, plan.backward):
        for name, numbers in zip(("forward", "backward"), both, strict=True):
            if numbers is None or time.monotonic() > end:
                continue
            tiling, row = tiled_attention.Tiling(*numbers), {}
            with patch.object(tiled_attention, "_tiling", lambda *_, tiling=tiling: tiling):
                for key, work in works.items():
                    if time.monotonic() < end:
                        row[key] = microseconds(work[name], plan.calls, repeat)
            results(f"{name} {'/'.join(map(str, tiling))}", row)


def summary(entries, problems):
    """Print the times of all implementations, and the best tilings of the sweep."""
    rows = []
    for key in problems:
        times, best = entries[key], []
        for name in ("forward", "backward"):
            swept = ((row.get(key), tiling) for tiling, row in entries.items() if name in tiling)
            best += min((pair for pair in swept if pair[0]), default=(None, "-"))
        best = [part.split()[-1] if isinstance(part, str) else ms(part) for part in best]
        given = [ms(times.get(name)) for name in ("candidate", *OTHERS)]
        shares = (ratio(times.get(name), times["candidate"]) for name in OTHERS)
        rows.append((key, *given, *shares, *best))
    header = ("", "candidate", *OTHERS, *(f"{name}/it" for name in OTHERS))
    header += ("forward", "tile/warps/stages", "backward", "tile/warps/stages")
    table("forward and backward pass in µs, and each pass with its best tiling", header, rows)


def main():
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=110, help="the sweep ends then")
    parser.add_argument("--device", default="cuda", help="cpu: to test the script")
    given = parser.parse_args()
    device, results = torch.device(given.device), Results(given.out, "gpu_attention")
    plan, rows = GPU if device.type == "cuda" else CPU, []
    for dtype, size, longest in plan.checked:
        key = f"{str(dtype).removeprefix('torch.')}, head {size}, to {longest} tokens"
        results.attempt(key, lambda case=(dtype, size, longest): check(device, *case))
        entry = results.entries[key]
        errors = (f"{entry.get(part, math.nan):.1e}" for part in PARTS)
        rows.append((key, *errors, entry.get("verdict", "FAIL")))
    table("errors of the candidate against float64", ("", *PARTS, ""), rows)

    problems = {}
    for size, case in product(plan.sizes, plan.cases):
        texts = lengths_of(case, plan.texts)
        problem = Problem(device, plan.dtype, plan.heads, size, *texts)
        problems[key := f"head {size}, {case}"] = problem
        results(key, compare(problem, plan, given.repeat))
    attempt(lambda: sweep(problems, plan, given.repeat, results, start + given.seconds))
    summary(results.entries, problems)
    raise SystemExit(any(row[-1] == "FAIL" for row in rows))


if __name__ == "__main__":
    main()
