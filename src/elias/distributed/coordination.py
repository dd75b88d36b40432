"""What the processes that train together do in turn, and what the first one does for all."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from elias.errors import ConfigError, RunError
from elias.model.build import build_encoder
from elias.model.encoder import BagEncoder
from elias.text.vectorizer import Featurizer
from elias.training.checkpoint import Checkpoints
from elias.training.checkpoint_shards import Share
from elias.training.run import CHECKPOINTS_FOLDER, CONFIG_FILE, Run, open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from elias.config import EliasConfig, ResolvedConfig, ResolvedEncoder
    from elias.distributed import World
    from elias.inference.predictor import Elias
    from elias.model.encoder import TextEncoder
    from elias.predictions import Predictions


T = TypeVar("T")


def check_together(config: EliasConfig) -> None:
    """Refuse what one process can do and several cannot."""
    encoder = config.encoder
    drops = encoder.kind == "transformer"
    if drops and encoder.gradient_checkpointing:
        raise ConfigError(
            "encoder.gradient_checkpointing: with several processes dropout is keyed by point, "
            "which cannot be computed again in the backward pass; set it to false"
        )
    if drops and encoder.compile != "off":
        raise ConfigError(
            "encoder.compile: with several processes dropout is keyed by point, and torch.compile "
            "would fix it at its first value; set it to 'off'"
        )


def told(world: World | None, work: Callable[[], T]) -> T:
    """Return what the first process finds out, and JSON can hold, to all."""
    if world is None:
        return work()
    return world.tell(world.first(work))  # type: ignore[return-value]


def in_turn(world: World | None, work: Callable[[], T]) -> T:
    """Have the first process of each machine do something, then the others, see `World.in_turn`."""
    return work() if world is None else world.in_turn(work)


def let_go(world: World | None, run: Run) -> None:
    """Have the processes beside the first end, whose help is done; their rows are written first."""
    if world is None:
        return
    if run.checkpoints is not None and not world.is_first:
        run.checkpoints.join()
    world.part()


@contextmanager
def leading(world: World | None, model: Elias) -> Iterator[Callable[..., Predictions]]:
    """Yield what does `Elias.predict` in the first process with the help of the others.

    These do `follow` meanwhile, so that they need not read what the first one reads.
    """
    if world is None:
        yield model.predict
        return

    def ask(texts: Sequence[str], **options: Any) -> Predictions:
        _hand_on(world, list(texts))
        return model.predict(texts, **options)

    yield ask
    _hand_on(world, None)


def follow(world: World, model: Elias, options: Mapping[str, Any]) -> None:
    """Help with all predictions that the first process makes in `leading`."""
    while (texts := _hand_on(world, None)) is not None:
        model.predict(texts, **options)


def _hand_on(world: World, texts: list[str] | None) -> list[str] | None:
    """Return the texts that the first process gives, however long that takes it."""
    world.first(lambda: None)
    return world.tell(texts)


def shared_encoder(
    world: World | None,
    config: ResolvedEncoder,
    texts: Sequence[str] | None,
    n_features: int | None,
) -> TextEncoder:
    """Return a fresh encoder; the vocabulary of a bag is counted by the first process for all."""
    if world is None or config.kind != "bag" or texts is None:
        return in_turn(world, lambda: build_encoder(config, texts, n_features))
    encoder = world.first(lambda: build_encoder(config, texts, n_features))
    said: dict[str, Any] = {}
    idf = None
    if encoder is not None:
        assert isinstance(encoder, BagEncoder)
        assert encoder.featurizer is not None
        found = encoder.featurizer
        idf, span = found.idf, list(found.char_ngrams)
        said = {"words": list(found.words), "ngrams": list(found.ngrams), "char_ngrams": span}
    said, idf = world.tell(said), world.tell_array(idf)
    if encoder is not None:
        return encoder
    low, high = said["char_ngrams"]
    featurizer = Featurizer(
        words=said["words"],
        ngrams=said["ngrams"],
        idf=idf.astype(np.float32),
        char_ngrams=(low, high),
    )
    return BagEncoder(config, featurizer, featurizer.n_features)


@contextmanager
def open_shared_run(
    world: World | None,
    folder: Path | None,
    config: ResolvedConfig,
    *,
    overwrite: bool,
    made_of: Mapping[str, Any],
) -> Iterator[Run]:
    """Open a run, see `open_run`; the processes beside the first only write their checkpoints."""
    if world is None:
        with open_run(folder, config, overwrite=overwrite, made_of=made_of) as run:
            yield run
        return
    share = Share(world.rank, world.size, world.has_lost)
    if world.is_first:
        with open_run(folder, config, overwrite=overwrite, made_of=made_of) as run:
            if run.checkpoints is not None:
                run.checkpoints.share = share
            world.tell(None)  # the folder is made and locked
            yield run
        return
    world.tell(None)
    run = Run()
    if folder is not None:
        if not (folder / CONFIG_FILE).exists():
            raise RunError(
                f"{folder}: rank {world.rank} does not see what rank 0 has written there; give an "
                "--out on a file system that all machines share"
            )
        run.checkpoints = Checkpoints(folder / CHECKPOINTS_FOLDER, config.checkpoint, share)
    with run.interruption.listening():
        try:
            yield run
        finally:
            if run.checkpoints is not None:
                run.checkpoints.join()
