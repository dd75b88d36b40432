"""What Prometheus is told: counts and times of requests, sizes of batches, depth of the queue.

Where several workers serve, prometheus_client keeps the numbers of each in files of a folder that
the environment names (the supervisor sets it), and whichever worker is asked adds them up.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

__all__ = ["CONTENT_TYPE", "Measures"]

_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Measures:
    """The numbers of one worker."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._own = registry = CollectorRegistry()
        self.requests = Counter(
            "elias_requests",
            "Requests answered, by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "elias_request_duration_seconds",
            "From the first byte of a request to the last of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "elias_batch_size", "Texts computed together.", buckets=_SIZES, registry=registry
        )
        self.batch_seconds = Histogram(
            "elias_batch_duration_seconds",
            "Computing one batch.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queue_depth = Gauge(
            "elias_queue_depth",
            "Texts that wait to be computed.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.reloads = Counter(
            "elias_reloads",
            "Times the model was read again, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.loaded_at = Gauge(
            "elias_model_loaded_timestamp_seconds",
            "When the model was read: of several workers, by the one that did so first.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.workers = Gauge(
            "elias_workers",
            "Workers that are ready.",
            registry=registry,
            multiprocess_mode="livesum",
        )

    def exposition(self) -> bytes:
        """Return all numbers in Prometheus's text format, those of the other workers added."""
        registry = self._own
        if self._folder is not None:
            registry = CollectorRegistry()
            # the collector puts itself into the registry
            MultiProcessCollector(registry, str(self._folder))  # type: ignore[no-untyped-call]
        return generate_latest(registry)
