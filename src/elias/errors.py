"""Errors that a user can fix, and helper functions for their messages.

An `EliasError` reports a problem that the user can fix, such as a bad file or setting. Its message
names the file or value and says how to fix it. The command line prints the message as one line and
exits with code 2. Any other exception is a bug, and its traceback is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nlargest
from pathlib import Path

_LONGEST_MESSAGE = 900
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


class EliasError(Exception):
    """Base class of all errors that the package raises on purpose. The message is one line.

    Long messages are shortened in the middle.
    """

    reported = False
    """True if the message has already been printed, so that it is not printed twice."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[: _LONGEST_MESSAGE - 200]} … {message[-200:]}"
        super().__init__(message)


class ConfigError(EliasError):
    """A configuration key or value is not valid."""


class DataError(EliasError):
    """A corpus, text or prediction file cannot be read."""


class ModelError(EliasError):
    """A saved model is damaged, is not an ELIAS model, or was saved by a newer version."""


class RunError(EliasError):
    """A run folder cannot be used, or training cannot continue."""


class Interrupted(KeyboardInterrupt):
    """A run was stopped by Ctrl-C or SIGTERM. The message says how to resume it."""

    def __init__(self, message: str = "", *, signal_number: int = 2) -> None:
        super().__init__(*([message] if message else []))
        self.signal_number = signal_number


_MAX_COMPARED = 5_000  # comparing more names would take seconds
_MAX_RANKED = 100  # number of names compared if there are more than that


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or an empty string.

    Case is ignored. To save time if there are many known names, compare only the names that have
    the most pairs of adjacent letters in common with ``name``.
    """
    plain = {known_name.casefold(): known_name for known_name in known}
    wanted, candidates = name.casefold(), list(plain)
    if len(candidates) > _MAX_COMPARED:
        pairs = {wanted[i : i + 2] for i in range(len(wanted) - 1)}

        def shared(other: str) -> int:
            return sum(pair in other for pair in pairs) - abs(len(other) - len(wanted))

        similar = (other for other in candidates if abs(len(other) - len(wanted)) <= len(wanted))
        candidates = nlargest(_MAX_RANKED, similar, key=shared)
    close = get_close_matches(wanted, candidates, n=1)
    return f"; did you mean {plain[close[0]]!r}?" if close else ""


def check_strings(name: str, values: Iterable[object]) -> None:
    """Raise a `DataError` if the argument ``name`` is a string or has items that are none."""
    if isinstance(values, str):
        raise DataError(f"{name} is a single string; wrap it in a list: [{values[:20]!r}]")
    for i, value in enumerate(values):
        if not isinstance(value, str):
            kind = type(value).__name__
            raise DataError(f"{name}[{i}] is {kind}, not a string; convert it to a string")


def check_positive(**values: object) -> None:
    """Raise a `DataError` if an argument is not a whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise DataError(f"{name} must be a whole number >= 1, not {value!r}")


_LONGEST_QUOTE = 160


def damaged_file(path: Path, what: str) -> ModelError:
    """Return the error for a damaged file of a saved model. ``what`` describes the damage."""
    return ModelError(f"{path}: {what}; save or download the model again")


def quoted(error: BaseException) -> str:
    """Return the message of another library's error as one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…"


def escape_controls(text: str) -> str:
    r"""Escape control characters as in JSON. Otherwise, a label name could control a terminal.

    >>> print(escape_controls("red \x1b[31mcod"))
    red \u001b[31mcod
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
