"""What can go wrong through no fault of ours, each saying where and how to mend it.

An `EliasError` is the user's to fix: the command line prints its one line and exits with 2.
Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class EliasError(Exception):
    """The base of every error the toolkit raises on purpose; its text is one line."""

    told = False
    """Whether the user has read it already."""


class ConfigError(EliasError):
    """A configuration key or value that cannot be used."""


class DataError(EliasError):
    """A corpus, text or prediction file that cannot be read as it stands."""


class ModelError(EliasError):
    """A saved model that is broken, foreign, or from a newer version."""


class RunError(EliasError):
    """A run folder that is in the way, or training that cannot go on."""


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop, by Ctrl-C or SIGTERM; its text says what is left of it."""

    def __init__(self, message: str = "", *, signal_number: int = 2) -> None:
        super().__init__(*([message] if message else []))
        self.signal_number = signal_number


_COMPARED = 5_000  # names: more would take seconds


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or an empty string.

    Of very many names, those that begin alike and are of like length are compared.
    """
    names = list(known)
    if len(names) > _COMPARED:
        first, size = name[:1].casefold(), len(name)
        alike = (n for n in names if abs(len(n) - size) <= 2 and n[:1].casefold() == first)
        names = list(islice(alike, _COMPARED))
    close = get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
