"""Prometheus metrics: requests, durations, batch sizes, queue depth.

With several workers, prometheus_client stores the metrics of each worker in files of a shared
folder. The supervisor sets the environment variable that names the folder. The worker that answers
``/metrics`` adds up the metrics of all workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CONTENT_TYPE", "Metrics"]

_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one worker."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "elias_requests",
            "Requests answered, by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "elias_request_duration_seconds",
            "Time from the first byte of a request to the last byte of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "elias_batch_size", "Texts per batch.", buckets=_SIZES, registry=registry
        )
        self.batch_seconds = Histogram(
            "elias_batch_duration_seconds",
            "Time to compute a batch.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_depth = Gauge(
            "elias_queue_depth", "Texts waiting.", registry=registry, multiprocess_mode="livesum"
        )
        self.reloads = Counter(
            "elias_reloads", "Model reloads, by outcome.", ["outcome"], registry=registry
        )
        self.loaded_at = Gauge(
            "elias_model_loaded_timestamp_seconds",
            "Time when the model was loaded; the earliest of all workers.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.workers = Gauge(
            "elias_workers", "Workers ready.", registry=registry, multiprocess_mode="livesum"
        )

    def exposition(self) -> bytes:
        """Return the metrics of all workers in the Prometheus text format."""
        registry = self._registry
        if self._folder is not None:
            registry = CollectorRegistry()
            # The collector registers itself.
            MultiProcessCollector(registry, str(self._folder))  # type: ignore[no-untyped-call]
        return generate_latest(registry)
