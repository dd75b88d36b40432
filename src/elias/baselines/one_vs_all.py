"""The one-vs-all twin of a configuration: the same encoder, every label scored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from elias.config import ONE_VS_ALL_STAGES, IndexConfig, LossConfig

if TYPE_CHECKING:
    from elias.config import EliasConfig


def one_vs_all(config: EliasConfig) -> EliasConfig:
    """Return ``config`` with every label scored, in one stage.

    Encoder, seed, ranker and evaluation stay. The stage is one-vs-all's own, with the batches, the
    encoder's rate and the starts of the first stage, and the epochs of all of them. The loss is
    summed over labels: averaged over all of them, its gradients fall under AdamW's ε.

    >>> from elias import EliasConfig
    >>> twin = one_vs_all(EliasConfig.preset("mesh-titles"))
    >>> twin.index.kind, [(stage.name, stage.epochs) for stage in twin.stages]
    ('all', [('one-vs-all', 13)])
    """
    first, (usual,) = config.stages[0], ONE_VS_ALL_STAGES
    stage = replace(
        usual,
        epochs=sum(stage.epochs for stage in config.stages),
        batch_size=first.batch_size,
        encoder_lr=first.encoder_lr,
        first_classifiers=first.first_classifiers,
    )
    return replace(
        config, index=IndexConfig(kind="all"), loss=LossConfig(reduction="sum"), stages=(stage,)
    )
