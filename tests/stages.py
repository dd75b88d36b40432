"""Stages for tests that do not resolve a whole configuration."""

from dataclasses import replace

from elias.config import EliasConfig, StageConfig, fill_sizes


def make_stage(**settings):
    """Return a resolved stage with these settings.

    Its learning rates are those of a bag encoder with a fixed graph. Nothing else happens in it
    that a test does not ask for: no averaging, no new clusters.
    """
    config = fill_sizes(EliasConfig(stages=(StageConfig(),)), n_points=1000, n_labels=10)
    plain = {
        "epochs": 5,
        "batch_size": 256,
        "cluster_with_encoder": False,
        "keep_labels": False,
        "label_eps": 1e-8,
        "average_from": 1.0,
    }
    return replace(config.stages[0], **plain | settings)
