"""The one-vs-all twin of a configuration: the same encoder, every label scored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from elias.config import ONE_VS_ALL_STAGES, IndexConfig, LossConfig

if TYPE_CHECKING:
    from elias.config import EliasConfig


def one_vs_all(config: EliasConfig) -> EliasConfig:
    """Return ``config`` with every label scored, in one stage.

    Encoder, seed, ranker and evaluation stay. The stage has the batches, the encoder's rates and
    the starts of the first stage, the epochs of all of them, and one-vs-all's own rates for labels.
    The loss is summed over labels: averaged over all of them, its gradients fall under AdamW's ε.

    >>> from elias import EliasConfig
    >>> twin = one_vs_all(EliasConfig.preset("mesh-titles"))
    >>> twin.index.kind, [(stage.name, stage.epochs) for stage in twin.stages]
    ('all', [('one-vs-all', 15)])
    """
    first, (usual,) = config.stages[0], ONE_VS_ALL_STAGES
    stage = replace(
        first,
        name=usual.name,
        epochs=sum(stage.epochs for stage in config.stages),
        learn_graph=False,
        cluster_with_encoder=False,
        label_lr=usual.label_lr,
        label_eps=usual.label_eps,
    )
    return replace(
        config, index=IndexConfig(kind="all"), loss=LossConfig(reduction="sum"), stages=(stage,)
    )
