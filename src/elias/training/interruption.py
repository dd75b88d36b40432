"""Ctrl-C and SIGTERM: at once where nothing would be lost, else when a checkpoint is written."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from elias.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class Interruption:
    """Whether the run was asked to stop.

    Inside `deferred` the first signal is only noted, and whoever is at work there looks; a second
    one, or one anywhere else, stops the run at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._deferred = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Note signals in this block instead of stopping at once."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the signals in this block, unless the program listens to them itself."""
        usual: dict[signal.Signals, Any] = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
        }
        if threading.current_thread() is not threading.main_thread():
            usual = {}
        ours = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
        for number in ours:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, usual[number])

    def _hear(self, number: int, _: FrameType | None) -> None:
        first = self.signal is None
        self.signal = number
        if not (self._deferred and first):
            raise Interrupted(signal_number=number)
