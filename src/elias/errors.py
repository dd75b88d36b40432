"""Errors that a user can fix; each names the place and the remedy.

An `EliasError` is the user's to fix: the command line prints its one line and exits with 2.
Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from difflib import get_close_matches
from itertools import islice
from pathlib import Path
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


FORMAT_VERSION = 2
"""Raised when an older elias-xmc could not read what this one writes."""

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
LABELS_FILE = "labels.txt"
CARD_FILE = "README.md"
VOCABULARY_FILE = "vocabulary.txt"
"""Bag encoder: its words, then its n-grams."""
ENCODER_FOLDER = "encoder"
"""Transformer encoder: `CONFIG_FILE` as transformers reads it, and `TOKENIZER_FILE`."""
TOKENIZER_FILE = "tokenizer.json"

DATA_SETTINGS = "data_settings"
"""Key of the facts in `CONFIG_FILE`: how the training data was read. Older models lack it."""

HUB_PREFIX = "hf://"
"""Marks the name of a model on the Hugging Face hub: ``hf://user/model@revision``."""

_LONGEST_QUOTE = 160


def looks_like_path(name: str) -> bool:
    """Return whether a name is a path, and not ``user/model`` on the hub.

    >>> [looks_like_path(name) for name in ("./model", "~/model", "a/b/c", "user/model", "model")]
    [True, True, True, False, False]
    """
    return (
        name.startswith(("/", ".", "~"))
        or "\\" in name
        or name.count("/") > 1
        or ("/" in name and Path(name).parent.is_dir())
    )


def broken(path: Path, what: str) -> ModelError:
    """Return the error for a file that is not as it was saved."""
    return ModelError(f"{path}: {what}; save or download the model again")


def quoted(error: BaseException) -> str:
    """Return what another library's error says, as one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…"
