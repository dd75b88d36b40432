"""Reading a few rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

CHUNK = 1 << 14
"""Rows at a time."""
LARGE = 1 << 22
"""Characters at a time."""


def few(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists that are neither long nor, by the sum of their sizes, large."""
    chunk: list[T] = []
    total = 0
    for item in items:
        chunk.append(item)
        total += size(item)
        if len(chunk) >= CHUNK or total >= LARGE:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk
