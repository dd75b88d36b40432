"""Rows that skipped the last steps, brought to where those left them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from elias.kernels.dense_update import round_by_chance
from elias.kernels.update import History

_PIECE = 2**22  # weights at a time: what is computed beside the table stays small


@torch.no_grad()
def catch_up(
    weight: Float[Tensor, "R D"],
    means: Sequence[Tensor],
    variances: Sequence[Tensor],
    last_step: Int[Tensor, " R"],
    history: History,
) -> None:
    """Decay the weights and fade the moments of all rows for the steps they skipped, in place.

    The decay of a row waits until it is touched again. Before weights are measured, averaged or
    saved it must not; a training that goes on afterwards differs by rounding alone. A weight in
    bfloat16 is rounded stochastically, as in a step: to nearest, a decay smaller than half of its
    last digit would be lost. A row that skipped nothing keeps its bits.
    """
    if not history.step:
        return
    logs, rates = history.kept_log, history.rates
    n_rows = max(1, _PIECE // weight.shape[1])
    for first in range(0, len(weight), n_rows):
        rows = slice(first, first + n_rows)
        before = last_step[rows].long()
        skipped = (history.step - before).double()
        kept = (logs[history.step] - logs[before]).exp2_().float().unsqueeze(1)
        if weight.dtype == torch.bfloat16:
            weight[rows] = round_by_chance(weight[rows].float().mul_(kept))
        else:
            weight[rows].mul_(kept)
        for moments, beta in ((means, rates.beta1), (variances, rates.beta2)):
            faded = (beta**skipped).float()
            for moment in moments:
                moment[rows].mul_(faded if moment.ndim == 1 else faded.unsqueeze(1))
    last_step.fill_(history.step)
