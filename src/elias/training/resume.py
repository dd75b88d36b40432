"""Going on with a run that was stopped: what of it is whole, and the members it has finished.

A member of an ensemble that is finished is kept beside the checkpoints as a saved model, with what
the run had recorded by then, and sealed like a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

from elias.data.atomic import staged_folder
from elias.distributed import SingleProcess
from elias.errors import DataError, ModelError
from elias.inference.predictor import Elias
from elias.kernels.device import has_triton
from elias.persistence.manifest import MODEL_FOLDER
from elias.training.checkpoint import FACTS_FILE, Checkpoint, Keeper, damage, seal, write_facts
from elias.training.run import refuse_other_parts

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from elias.data.corpus import Corpus
    from elias.distributed import World
    from elias.training.run import Run


logger = logging.getLogger(__name__)


class Left(NamedTuple):
    """What a run that was stopped has left."""

    members: list[Elias]
    """Those that are finished; the first process has them."""
    n_members: int
    """How many are finished."""
    checkpoint: Checkpoint | None
    """Where the next one goes on."""


def parts_of(corpus: Corpus, init_from: Elias | None, device: torch.device) -> dict[str, Any]:
    """Return names for what a run is made of beside its configuration, and made on.

    The kind of device decides which moments the optimizer keeps, and so what a checkpoint holds.
    """
    by_kernels = device.type == "cuda" and has_triton()
    return {
        "device": f"{device.type} with Triton" if by_kernels else device.type,
        "corpus": corpus.fingerprint()[:16],
        "model to start from": None if init_from is None else _fingerprint(init_from),
    }


def take_up(run: Run, n_members: int, device: torch.device, world: World = SingleProcess()) -> Left:
    """Return what there is to go on from, and set the run's records back to that.

    Of several processes the first looks, and tells the others.

    Raises:
        RunError: If the run was begun with another corpus or another model to start from.
    """
    checkpoints = run.checkpoints
    members, place = world.run_on_rank0(lambda: _look(run, n_members, device)) or ([], None)
    n_done, place = world.broadcast((len(members), place))
    if checkpoints is None or place is None:
        return Left(members, n_done, None)
    return Left(members, n_done, checkpoints.read(place))


def _look(run: Run, n_members: int, device: torch.device) -> tuple[list[Elias], Path | None]:
    """Return the members that are finished, and the checkpoint to go on from."""
    if run.folder is None or run.checkpoints is None or not run.can_go_on:
        return [], None
    run.checkpoints.sweep()
    members: list[Elias] = []
    state: dict[str, Any] | None = None
    for number in range(n_members):
        place = _place(run, number)
        problem = damage(place) if place.is_dir() else "is not there"
        if problem:
            if place.is_dir():
                logger.warning("%s: %s; this member is trained again", place, problem)
                shutil.rmtree(place, ignore_errors=True)
            break
        state = json.loads((place / FACTS_FILE).read_text(encoding="utf8"))
        refuse_other_parts(run.folder, run.made_of, state["made_of"])
        members.append(Elias.from_pretrained(place / MODEL_FOLDER, device=str(device)))
    found = run.checkpoints.newest(lambda facts: facts["run"]["member"] == len(members))
    if found is not None:
        state = json.loads((found / FACTS_FILE).read_text(encoding="utf8"))["run"]
        refuse_other_parts(run.folder, run.made_of, state["made_of"])
    if state is None:
        logger.warning("%s: no checkpoint can be used, the run starts over", run.folder)
        state = {"records": [], "timings": {}, "under_way": {}}
    if members:
        logger.info("resumed after member %d of %d", len(members), n_members)
    run.restore(state)
    return members, found


def keep_member(run: Run, model: Elias) -> None:
    """Keep a finished member of an ensemble; a disk that is full is told and no more."""
    if run.checkpoints is None or not run.checkpoints.enabled:
        return
    try:
        with staged_folder(_place(run, run.number)) as staging:
            model.save_pretrained(staging / MODEL_FOLDER)
            write_facts(staging / FACTS_FILE, run.state())
            seal(staging)
    except (OSError, DataError, ModelError) as error:
        logger.warning("member %d could not be kept (%s); training goes on", run.number, error)
        return
    run.checkpoints.clear()


def keeper_of(run: Run, world: World = SingleProcess()) -> Keeper | None:
    """Return what writes the checkpoints of a member's run; None where it has no folder."""
    if run.checkpoints is None:
        return None
    return Keeper(run.checkpoints, run.interruption, lambda: {"run": run.state()}, world)


def _place(run: Run, number: int) -> Path:
    assert run.checkpoints is not None
    return run.checkpoints.folder / f"member-{number}"


def _fingerprint(model: Elias) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]
