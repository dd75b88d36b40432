"""Settings of a server, which are checked before the server starts."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from typer import Option

from elias.config.io import HUB_PREFIX
from elias.errors import ConfigError

MAX_LABELS = 100
"""Maximum ``top_k``. An ensemble also averages this many labels of each member."""
MAX_EXPLAINED = 8
"""Maximum number of texts in one request to ``/explain``."""
UNHEALTHY_FILE = "unhealthy"
"""File in the metrics folder that exists while workers keep dying. ``/health`` then returns 503."""

MAX_HEADER_BYTES = 64 * 2**10
"""Maximum size of the request line and the headers; larger ones get status 431."""

_REQUIRED = ("fastapi", "httptools", "uvicorn", "prometheus_client")
_HOST_NAME = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]*:[0-9a-f:.]*")
_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_MIN_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the requests that a server accepts, which are also options of ``elias serve``."""

    max_inputs: Annotated[int, Option(min=1, help="Maximum texts per request.")] = 64
    """A request with more texts gets status 413."""
    max_text: Annotated[int, Option(min=1, help="Maximum characters per text.")] = 20_000
    """A request with a longer text gets status 413."""
    max_body: Annotated[int, Option(min=1, help="Maximum bytes per request.")] = 4 * 2**20
    """A request with a larger body gets status 413."""
    max_batch: Annotated[int, Option(min=1, help="Maximum texts per batch.")] = 32
    max_queue: Annotated[int, Option(min=1, help="Maximum waiting texts per worker.")] = 512
    """If more texts would wait, a request gets status 429."""
    max_connections: Annotated[int, Option(min=1, help="Maximum open connections.")] = 1000
    """The limit holds for each worker. Above it, the connection idle for longest is closed."""
    timeout: Annotated[float, Option(min=0.01, help="Maximum seconds per request.")] = 10.0
    """A request without a result after this time gets status 503."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):  # NaN fails this too
                raise ConfigError(f"{field.name} must be more than 0, not {value}")
        if self.max_queue < self.max_inputs:
            raise ConfigError(
                f"max_queue {self.max_queue} is less than max_inputs {self.max_inputs}: a request "
                "with that many texts would never be accepted; raise max_queue or lower max_inputs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of a server, such as the model, the address, the API keys and the limits."""

    model: Path | str
    """Folder of a saved model or a run, or ``hf://user/model@revision``.

    It is read again when the model is reloaded.
    """
    host: str = "127.0.0.1"
    port: int = 8000
    """TCP port; 0 selects a free port."""
    workers: int = 1
    keys: tuple[str, ...] = ()
    """Accepted API keys; if empty, no key is required."""
    host_names: tuple[str, ...] = ()
    """Host names that clients may use in URLs of the server, besides localhost."""
    allow_origins: tuple[str, ...] = ()
    """Origins of web pages on other hosts that may use the server, such as https://example.org."""
    device: str = "auto"
    limits: Limits = Limits()
    examples: tuple[str, ...] = ()
    """Example texts on the web page. If empty, names of frequent labels are used."""
    log_texts: bool = False
    """Write the texts to the access log."""
    metrics_folder: Path | None = None
    """Folder where several workers share their metrics; None for a single worker."""

    def __post_init__(self) -> None:
        """Check host names and origins. A server for other machines needs host names or keys."""
        for name in self.host_names:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"--host-name {name}: is not a host name; write it in lower case, without a "
                    "scheme or port, such as labels.example.org"
                )
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allow-origin {origin}: is not an origin; give scheme and host in lower "
                    "case, and the port if there is one, such as https://example.org"
                )
        if not (is_loopback(self.host) or self.keys or self.host_names):
            raise ConfigError(
                f"--host {self.host}: other machines and web pages could use the server; require a "
                "key with --api-key-file, or list the host names of the server with --host-name "
                "(localhost for this machine only)"
            )

    def is_served(self, host_name: str) -> bool:
        """Return whether requests to a host name are answered, to prevent DNS rebinding.

        In this attack, a web page lets its own host name resolve to the address of this server, and
        then uses the server through the browser of a visitor.
        """
        is_checked = is_loopback(self.host) or self.host_names
        return not is_checked or is_loopback(host_name) or host_name in self.host_names

    def health_error(self) -> str | None:
        """Return the reason why the group of workers is unhealthy, or None if it is healthy."""
        if self.metrics_folder is not None:
            with suppress(FileNotFoundError):
                return (self.metrics_folder / UNHEALTHY_FILE).read_text(encoding="utf8")
        return None

    @property
    def name(self) -> str:
        """Return ``user/model@revision``, or the name of the model folder without its path."""
        if isinstance(self.model, str):
            return self.model.removeprefix(HUB_PREFIX)
        return self.model.resolve().name


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether a host name or address always refers to this machine."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def check_installed() -> None:
    """Raise `ConfigError` if a package of the ``serve`` extra is missing."""
    missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serving needs {', '.join(missing)}; install with pip install 'elias-xmc[serve]'"
        )


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys in a file with one key per line. Skip empty lines and # comments.

    Raises:
        DataError: If the file cannot be read.
        ConfigError: If the file has no key, or one that is too short or not valid in a header.
    """
    from elias.data.readers.files import read_lines

    keys = []
    for number, key in enumerate(map(str.strip, read_lines(path)), start=1):
        if not key or key.startswith("#"):
            continue
        # The message does not quote the key, because it may end up in a log.
        if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{path}:{number}: a key must have at least {_MIN_KEY_LENGTH} printable ASCII "
                "characters and no spaces; generate one with `openssl rand -hex 32`"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path}: contains no API key; write one key per line")
    return tuple(keys)


def read_examples(path: Path) -> tuple[str, ...]:
    """Return the texts in a file, one per line. Skip empty lines."""
    from elias.data.readers.files import read_lines

    examples = tuple(filter(None, map(str.strip, read_lines(path))))
    if not examples:
        raise ConfigError(f"{path}: is empty; write one example text per line")
    return examples
