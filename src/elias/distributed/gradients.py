"""Adding up gradients over processes: dense ones in one message, those of rows as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from elias.distributed.world import World

_TOGETHER = 2**22  # numbers: larger gradients travel alone, without a copy


@torch.no_grad()
def sum_gradients(world: World, parameters: Iterable[Tensor], rows: Iterable[Tensor]) -> None:
    """Give every parameter the sum of its gradients over all processes.

    ``parameters`` have dense gradients, of zeros where a process has no point; those that a model
    does not use have none, in any process. ``rows`` have sparse ones, or none.
    """
    together: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.numel() > _TOGETHER:
            sum_touched(world, parameter.grad)
        else:
            together.append(parameter.grad)
    if together:
        flat = torch.cat([gradient.reshape(-1) for gradient in together])
        world.sum_(flat, "gradients of shared parameters")
        first = 0
        for gradient in together:
            gradient.copy_(flat[first : first + gradient.numel()].view_as(gradient))
            first += gradient.numel()
    for table in rows:
        table.grad = _sum_of_rows(world, table)


@torch.no_grad()
def sum_touched(world: World, gradient: Tensor, touched: Tensor | None = None) -> None:
    """Add up a large gradient over processes, in place, of which most rows may be zero.

    Of A a batch touches the edges of B·b clusters at most: where that is little of the whole, those
    rows alone travel. ``touched`` says which are not zero here; it is added up as well.
    """
    what = "gradients of shared parameters"
    if gradient.dim() < 2 or gradient.numel() <= _TOGETHER:
        world.sum_(gradient, what)
        if touched is not None:
            world.sum_(touched, what)
        return
    if touched is None:
        touched = (gradient != 0).flatten(1).any(dim=1).to(torch.int32)
    rows = world.sum_(touched, what).nonzero()[:, 0]
    if 2 * len(rows) > len(gradient):
        world.sum_(gradient, what)
    else:
        gradient[rows] = world.sum_(gradient[rows], what)


def _sum_of_rows(world: World, table: Tensor) -> Tensor:
    """Return the sum of a table's sparse gradients: the rows that any process touched."""
    own = table.grad
    if own is None:
        indices = torch.zeros(1, 0, dtype=torch.int64)
        own = torch.sparse_coo_tensor(indices, table.new_zeros(0, *table.shape[1:]), table.shape)
    own = own.coalesce()
    counts = world.gather(torch.tensor([own._nnz()], device=table.device))
    most = int(counts.max())
    ids = torch.full((most,), len(table), dtype=torch.int64, device=table.device)
    ids[: own._nnz()] = own.indices()[0]
    values = own.values().new_zeros(most, *own.values().shape[1:])
    values[: own._nnz()] = own.values()
    all_ids = world.gather(ids, "gradients of rows")
    all_values = world.gather(values, "gradients of rows")
    kept = all_ids < len(table)
    return torch.sparse_coo_tensor(
        all_ids[kept].unsqueeze(0), all_values[kept], table.shape, check_invariants=False
    ).coalesce()
