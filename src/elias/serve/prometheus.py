"""Prometheus metrics of requests, durations, batch sizes and queue depth.

With several workers, prometheus_client stores the metrics of each worker in files of a shared
folder. The supervisor sets the environment variable that names the folder. The worker that answers
``/metrics`` adds up the metrics of all workers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """The metrics of one worker."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        gauge = partial(Gauge, registry=self._registry)
        self.requests = counter(
            "elias_requests", "Requests answered, by route and status.", ["route", "status"]
        )
        self.request_seconds = histogram(
            "elias_request_duration_seconds",
            "Time from the first byte of a request to the last byte of its response.",
            ["route"],
            buckets=_SECONDS,
        )
        self.batch_size = histogram("elias_batch_size", "Texts per batch.", buckets=_SIZES)
        self.batch_seconds = histogram(
            "elias_batch_duration_seconds", "Time to compute a batch.", buckets=_SECONDS
        )
        self.queue_depth = gauge("elias_queue_depth", "Texts waiting.", multiprocess_mode="livesum")
        self.reloads = counter("elias_reloads", "Model reloads, by outcome.", ["outcome"])
        self.loaded_at = gauge(
            "elias_model_loaded_timestamp_seconds",
            "Time when the model was loaded (the earliest time of all workers).",
            multiprocess_mode="livemin",
        )
        self.workers = gauge("elias_workers", "Workers ready.", multiprocess_mode="livesum")

    def exposition(self) -> bytes:
        """Return the metrics of all workers in the Prometheus text format."""
        registry = self._registry
        if self._folder is not None:
            registry = CollectorRegistry()
            # The collector registers itself.
            MultiProcessCollector(registry, str(self._folder))  # type: ignore[no-untyped-call]
        return generate_latest(registry)
