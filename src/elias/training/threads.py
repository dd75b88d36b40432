"""Which threads a training step runs on, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from elias.model.one_vs_all import OneVsAll

if TYPE_CHECKING:
    from elias.model.elias import EliasModel


@contextmanager
def torch_on_one_thread(model: EliasModel) -> Iterator[None]:
    """Keep torch to the calling thread while compiled loops do most of a model's work.

    What torch is left with are many small operations, which wait for threads longer than these
    save; and its sums would depend on how many there are. A transformer or one-vs-all works in
    torch, and keeps its threads.

    >>> from types import SimpleNamespace
    >>> with torch_on_one_thread(SimpleNamespace(encoder=SimpleNamespace(compiled_loops=True))):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    alone = model.encoder.compiled_loops and not isinstance(model, OneVsAll)
    if not alone or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
