"""One-vs-all kernels that score a given number of labels at a time."""

import pytest

from elias.kernels import one_vs_all_loss
from elias.kernels.threads import split_range


def in_chunks(size, kernel, *args, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_vs_all_loss, "_chunks", lambda _, stop, *__: split_range(stop, size))
        return kernel(*args, **options)
