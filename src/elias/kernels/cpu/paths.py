"""Scores of paths and their gradients, compiled by numba for the CPU.

Each loop visits every path once; a chain of torch operations would write every intermediate result
to memory. Rows are divided among threads. Sums over rows are computed per block of rows, then over
blocks in order. The number of blocks does not depend on the number of threads, so neither does the
result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from elias.kernels.cpu.rows import Array
from elias.kernels.threads import over_ranges, thread_map

_SATURATED = np.float32(0.0)
_ZERO = np.float32(0.0)
_MAX_BLOCKS = 8


class _PathLog(torch.autograd.Function):
    """Autograd function of the path scores log ŝ_c + log ŝ_{c,ℓ}. A path id of -1 gives 0."""

    @staticmethod
    def forward(
        ctx: Any, cluster_log: Tensor, edge_log: Tensor, beam: Tensor, paths: Tensor
    ) -> Tensor:
        out = torch.empty(paths.shape)
        arrays = (cluster_log.numpy(), edge_log.numpy(), beam.numpy(), paths.numpy())
        over_ranges(lambda begin, end: _path_log(begin, end, *arrays, out.numpy()), len(paths))
        ctx.save_for_backward(cluster_log, edge_log, beam, paths)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        cluster_log, edge_log, beam, paths = ctx.saved_tensors
        with_edges = ctx.needs_input_grad[1]
        # each block holds one sum per edge: use few blocks if there are few paths per edge
        n_blocks = max(1, min(_MAX_BLOCKS, 4 * paths.numel() // max(1, edge_log.numel())))
        by_cluster = torch.zeros_like(cluster_log)
        blocks = torch.zeros((n_blocks, *(edge_log if with_edges else edge_log[:0]).shape))
        scores = (cluster_log.numpy(), edge_log.numpy())
        arrays = (beam.numpy(), paths.numpy(), grads[0].contiguous().numpy())
        sums = (by_cluster.numpy(), blocks.numpy())

        def sum_block(block: int, _: None) -> None:
            _path_log_backward(block, scores, *arrays, *sums)

        list(thread_map(sum_block, range(n_blocks), lambda: None))
        if not with_edges:
            return by_cluster, None, None, None
        by_edge = torch.empty_like(edge_log)
        numbers = (blocks.numpy(), by_edge.numpy())
        over_ranges(lambda begin, end: _add_blocks(begin, end, *numbers), len(by_edge))
        return by_cluster, by_edge, None, None


path_log = _PathLog.apply


@njit(cache=True, nogil=True)
def _split_path(path: int, n_edges: int, inverse: float) -> tuple[np.int64, np.int64]:
    """Return (position in the beam, edge) of a path without an integer division.

    ``inverse`` is 1 / n_edges. Adding 0.5 keeps the float64 product farther from an integer than
    its rounding error, so truncation is exact.
    """
    position = np.int64((np.float64(path) + 0.5) * inverse)
    return position, path - position * n_edges


@njit(cache=True, nogil=True)
def _path_log(
    begin: int,
    end: int,
    cluster_log: Array,
    edge_log: Array,
    beam: Array,
    paths: Array,
    out: Array,
) -> None:
    n_edges = edge_log.shape[1]
    inverse = 1.0 / n_edges
    for row in range(begin, end):
        for slot in range(paths.shape[1]):
            path = paths[row, slot]
            if path < 0:
                out[row, slot] = _SATURATED
                continue
            position, edge = _split_path(path, n_edges, inverse)
            cluster = beam[row, position]
            score = min(cluster_log[row, cluster], _SATURATED)
            out[row, slot] = score + min(edge_log[cluster, edge], _SATURATED)


@njit(cache=True, nogil=True)
def _path_log_backward(
    block: int,
    scores: tuple[Array, Array],
    beam: Array,
    paths: Array,
    grad: Array,
    by_cluster: Array,
    by_edge: Array,
) -> None:
    """Add the gradients of a block's paths to their clusters and edges, except saturated scores.

    A score is saturated where min(1, ·) is constant. ``scores`` is (cluster_log, edge_log).
    ``by_edge`` (blocks, C, E) gets one sum per block of rows; if its second dimension is 0, edge
    gradients are not computed. The caller initialises both outputs to zero.
    """
    cluster_log, edge_log = scores
    n_edges = edge_log.shape[1]
    inverse = 1.0 / n_edges
    n_rows = paths.shape[0]
    n_blocks = by_edge.shape[0]
    with_edges = by_edge.shape[1] > 0
    for row in range(block * n_rows // n_blocks, (block + 1) * n_rows // n_blocks):
        for slot in range(paths.shape[1]):
            path = paths[row, slot]
            if path < 0:
                continue
            position, edge = _split_path(path, n_edges, inverse)
            cluster = beam[row, position]
            gradient = grad[row, slot]
            is_open = cluster_log[row, cluster] <= _SATURATED
            by_cluster[row, cluster] += gradient if is_open else _ZERO
            if with_edges:
                is_open = edge_log[cluster, edge] <= _SATURATED
                by_edge[block, cluster, edge] += gradient if is_open else _ZERO


@njit(cache=True, nogil=True)
def _add_blocks(begin: int, end: int, blocks: Array, out: Array) -> None:
    """Write the sum of ``blocks`` (blocks, C, E) over the first axis to ``out``, in fixed order."""
    for row in range(begin, end):
        for edge in range(out.shape[1]):
            total = blocks[0, row, edge]
            for block in range(1, blocks.shape[0]):
                total += blocks[block, row, edge]
            out[row, edge] = total
