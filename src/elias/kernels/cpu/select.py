"""Select the n-th lowest value without sorting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def nth_lowest(values: NDArray[Any], count: int) -> Any:
    """Return the ``count``-th lowest value by Hoare's quickselect; reorder ``values`` in place."""
    wanted, left, right = count - 1, 0, values.shape[0] - 1
    while left < right:
        pivot = values[(left + right) // 2]
        low, high = left, right
        while low <= high:
            while values[low] < pivot:
                low += 1
            while values[high] > pivot:
                high -= 1
            if low <= high:
                values[low], values[high] = values[high], values[low]
                low += 1
                high -= 1
        if wanted <= high:
            right = high
        elif wanted >= low:
            left = low
        else:
            break
    return values[wanted]
