"""What a server can be told, checked before anything is started."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from elias.errors import HUB_PREFIX, ConfigError

MOST_LABELS = 100
"""The largest ``top_k``: as deep as the members of an ensemble are averaged."""
MOST_EXPLAINED = 8
"""Texts in one request to explain."""

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_SHORTEST_KEY = 16


UNHEALTHY_FILE = "unhealthy"
"""Beside the workers' metrics, while workers keep dying: what ``/health`` then says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a server takes on."""

    max_inputs: int = 64
    """Texts in one request; more is answered 413."""
    max_text: int = 20_000
    """Characters of one text; more is answered 413."""
    max_body: int = 4 * 2**20
    """Bytes of one request; more is answered 413."""
    max_batch: int = 32
    """Texts computed at a time, unless one request has more."""
    max_queue: int = 512
    """Texts that may wait; what would exceed it is answered 429."""
    timeout: float = 10.0
    """Seconds until a request is answered, one way or the other."""

    def __post_init__(self) -> None:
        """Check that each can be kept."""
        for name in ("max_inputs", "max_text", "max_body", "max_batch", "max_queue", "timeout"):
            if not 0 < getattr(self, name) < float("inf"):  # nor NaN, which is neither
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.max_queue < self.max_inputs:
            raise ConfigError(
                f"max_queue {self.max_queue} is less than max_inputs {self.max_inputs}: a request "
                "of that many texts could never wait; raise the one or lower the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """A server: what it serves, where, and to whom."""

    model: Path | str
    """The folder of a saved model or a run, or ``hf://user/model@revision``; a reload reads it."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any that is free."""
    workers: int = 1
    keys: tuple[str, ...] = ()
    """Any of these opens the server; none means that no key is asked for."""
    device: str = "auto"
    limits: Limits = Limits()
    examples: tuple[str, ...] = ()
    """Texts that the page offers to try; names of frequent labels where there are none."""
    log_texts: bool = False
    """Whether the access log holds the texts."""
    metrics_folder: Path | None = None
    """Where the workers keep their metrics to be added up; None for a worker alone."""

    def ailment(self) -> str | None:
        """Return what is wrong with the workers together; None if nothing is."""
        if self.metrics_folder is None:
            return None
        try:
            return (self.metrics_folder / UNHEALTHY_FILE).read_text(encoding="utf8")
        except OSError:  # it is not there
            return None

    @property
    def name(self) -> str:
        """Return the name of the model's folder, or ``user/model@revision``."""
        if isinstance(self.model, str):
            return self.model.removeprefix(HUB_PREFIX)
        return self.model.resolve().name  # even if it has moved away: /info shows no path

    @property
    def is_local(self) -> bool:
        """Say whether only this machine can reach it."""
        return self.host in ("127.0.0.1", "localhost", "::1")


def check_installed() -> None:
    """Refuse to serve without the packages it takes, which are an extra."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serving needs {', '.join(missing)}, not installed here; "
            "pip install 'elias-xmc[serve]' adds what is missing"
        )


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one per line; empty lines and those that begin with # are none.

    Raises:
        ConfigError: If there is none, or one that is too short or cannot stand in a header.
    """
    try:
        lines = path.read_text(encoding="utf8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from error
    numbered = [(i, line.strip()) for i, line in enumerate(lines, start=1)]
    keys = [(i, line) for i, line in numbered if line and not line.startswith("#")]
    for i, key in keys:
        # the key itself is not told: this line may end up in a log
        if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{path}:{i}: a key is at least {_SHORTEST_KEY} printable ASCII characters without "
                "spaces; `openssl rand -hex 32` makes a good one"
            )
    if not keys:
        raise ConfigError(f"{path}: holds no key; write one on a line of its own")
    return tuple(key for _, key in keys)


def read_examples(path: Path) -> tuple[str, ...]:
    """Return the texts in a file, one per line, without empty ones."""
    from elias.data.readers.files import read_lines

    found = tuple(line.strip() for line in read_lines(path) if line.strip())
    if not found:
        raise ConfigError(f"{path}: is empty; it should hold one example text per line")
    return found
