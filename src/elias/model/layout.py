"""What a saved model's folder holds, and what is said of one that does not."""

from __future__ import annotations

from pathlib import Path

from elias.errors import ModelError

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
