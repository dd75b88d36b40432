"""Write, find and read checkpoints, and resume an interrupted run.

A checkpoint is a folder with tensors (safetensors), metadata (JSON) and a manifest. The manifest is
written last and lists the size and the SHA-256 of every other file. The folder is written under a
hidden name, flushed to disk and then renamed. Each finished ensemble member is saved next to the
checkpoints, with its model, the records of the run so far, and a manifest.

With several processes, each process writes its own rows of W_L to a separate file. A run can be
resumed with a different number of processes. With P processes, label ℓ is row ℓ div P in the file
of process ℓ mod P, as in `elias.distributed.sharded_linear`. A single process writes all rows to
the main file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from elias.data.atomic import (
    find_damage,
    manifest_entry,
    staged_file,
    staged_folder,
    write_manifest,
)
from elias.distributed import SingleProcess, World
from elias.errors import DataError, Interrupted, ModelError, RunError
from elias.inference.predictor import Elias
from elias.kernels import has_triton
from elias.model.elias import EliasModel, LinearRows
from elias.model.graph import LabelGraph
from elias.model.one_vs_all import OneVsAll
from elias.persistence.manifest import MODEL_FOLDER, all_finite

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from elias.config import CheckpointConfig
    from elias.data.corpus import Corpus
    from elias.model.encoder import TextEncoder
    from elias.training.run import Run


logger = logging.getLogger(__name__)

METADATA_FILE = "state.json"
TENSORS_FILE = "state.safetensors"
FORMAT_VERSION = 2
WEIGHTS = "model."
"""Name prefix of the model weights. If one of them is not finite, no checkpoint is written."""
_SHARDS = ".shards"
_CHUNK_ROWS = 2**16
_POLL_SECONDS = 0.05
_KEPT = 2  # number of checkpoints to keep: if the newest is damaged, the other one is used
_MAX_WAIT = 1800.0  # seconds to wait for another process that writes to a slow disk


class Checkpoint(NamedTuple):
    """The contents of a checkpoint."""

    metadata: dict[str, Any]
    """JSON-serialisable values."""
    tensors: dict[str, Tensor]
    """Tensors by name, on the CPU."""


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with ``prefix`` added to their names.

    >>> from torch import zeros
    >>> list(add_prefix("model.", {"bias": zeros(1)}))
    ['model.bias']
    """
    return {prefix + name: tensor for name, tensor in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with ``prefix``, and remove it from the names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def model_checkpoint(model: EliasModel, position: int, stage: str, score: float) -> Checkpoint:
    """Return a checkpoint of a model with the weights and metadata that `rebuild_model` needs.

    ``position`` and ``stage`` are the index and the name of the stage that trained the model.
    ``score`` is the validation metric of the stage, or -inf if there is none.
    """
    settings = {
        "alpha": model.alpha,
        "beta": model.graph.beta,
        "learned": model.graph.learned,
        "one_vs_all": isinstance(model, OneVsAll),
    }
    metadata = {"position": position, "stage": stage, "model": settings}
    if math.isfinite(score):
        metadata["score"] = score
    return Checkpoint(metadata, add_prefix(WEIGHTS, model.state_dict()))


def rebuild_model(
    checkpoint: Checkpoint,
    encoder: TextEncoder,
    n_labels: int,
    rows: LinearRows | None,
    *,
    one_vs_all: bool,
) -> EliasModel:
    """Build the model of a checkpoint around ``encoder``, and load all weights.

    ``rows`` are the label classifiers of this process. ``one_vs_all`` is True for a model without a
    graph. It is read only for checkpoints of older versions, which do not store this.
    """
    settings = checkpoint.metadata["model"]
    tensors = strip_prefix(WEIGHTS, checkpoint.tensors)
    model: EliasModel
    if settings.get("one_vs_all", one_vs_all):
        model = OneVsAll(encoder, n_labels, rows)
    else:
        graph = LabelGraph(
            tensors["graph.edge_labels"],
            n_labels,
            settings["beta"],
            edge_logits=tensors["graph.edge_logits"] if settings["learned"] else None,
            removed_log=tensors.get("graph.removed_log"),
        )
        model = EliasModel(encoder, graph, settings["alpha"], rows)
    if tensors["labels.weight"].dtype == torch.bfloat16:
        model.compact()
    model.load_state_dict(tensors)
    return model


def full_checkpoint(
    current: Checkpoint,
    device: torch.device,
    partition: NDArray[np.int64] | None,
    earlier: Checkpoint | None,
    progress: Checkpoint | None,
) -> Checkpoint:
    """Return a checkpoint from which training can continue.

    Args:
        current: The `model_checkpoint` of the model in training.
        device: The device, whose random state is included.
        partition: The cluster of each label, or None for a one-vs-all model.
        earlier: The `model_checkpoint` of the best earlier stage, or None.
        progress: The state of the current stage, or None if it is finished.
    """
    metadata: dict[str, Any] = {**current.metadata, "earlier": None}
    tensors = {**current.tensors, "random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    if partition is not None:
        tensors["partition"] = torch.from_numpy(partition)
    if progress is not None:
        metadata |= progress.metadata
    if earlier is not None:
        metadata["earlier"] = earlier.metadata
        tensors |= add_prefix("earlier.", earlier.tensors)
    return Checkpoint(metadata, tensors if progress is None else tensors | progress.tensors)


def restore_state(
    checkpoint: Checkpoint, device: torch.device
) -> tuple[Checkpoint | None, NDArray[np.int64] | None]:
    """Restore the state of the random generators from a `full_checkpoint`.

    Return the checkpoint of the best earlier stage, and the cluster of each label. Each of them is
    None if it was not saved.
    """
    metadata, tensors = checkpoint
    torch.set_rng_state(tensors["random.cpu"])
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
    where = "after {stage}" if "epoch" not in metadata else "{stage} epoch {epoch} step {step}"
    logger.info("resumed %s", where.format_map(metadata))
    partition, earlier = tensors.get("partition"), None
    if metadata.get("earlier") is not None:
        earlier = Checkpoint(metadata["earlier"], strip_prefix("earlier.", tensors))
    return earlier, None if partition is None else partition.numpy()


def has_checkpoints(folder: Path) -> bool:
    """Return whether a folder has any checkpoint or finished member, damaged or not."""
    return next(folder.glob("[!.]*"), None) is not None


class Checkpoints:
    """Manager of the checkpoints of one run: schedules, writes, finds and reads them."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, world: World = SingleProcess()
    ) -> None:
        self.folder = folder
        self.config = config
        self.world = world
        self._saved_at = time.monotonic()
        self._writing: Future[bool] = Future()
        self._writing.set_result(False)
        self._requests: Callable[[], list[int]] | None = None

    @property
    def enabled(self) -> bool:
        """Return whether checkpoints are written."""
        return self.config.minutes > 0

    def due(self) -> bool:
        """Return whether the time between checkpoints has passed and no write is in progress."""
        elapsed, seconds = time.monotonic() - self._saved_at, 60 * self.config.minutes
        return self.enabled and self._writing.done() and seconds <= elapsed

    def next_attempt(self) -> str:
        """Return the next free checkpoint number, and a random token for this attempt to write."""
        paths = self._paths()
        number = int(paths[-1].name) + 1 if paths else 1
        return f"{number:08d}.{secrets.token_hex(4)}"

    def save(self, checkpoint: Checkpoint, attempt: str) -> None:
        """Write a checkpoint in a background thread.

        The caller must not change the tensors afterwards. If the previous checkpoint is still
        being written, wait for it first. If writing fails, for example because the disk is full,
        log a warning and let training continue. With several processes, all must pass the same
        ``attempt``.
        """
        self.written()
        self._saved_at = time.monotonic()
        executor = ThreadPoolExecutor(1, "elias-checkpoint")
        self._writing = executor.submit(self._write, checkpoint, attempt)
        executor.shutdown(wait=False)

    def written(self) -> bool:
        """Wait until the last checkpoint is written, and return whether that succeeded.

        An unexpected error in the background thread is raised here.
        """
        return self._writing.result()

    def after_step(self, run: Run, where: str, make: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint if one is due. If a signal was received, write one and stop the run.

        With several processes, this happens one step later, because the processes tell each other
        during the next step whether a checkpoint is due. No process has to wait for the others.
        """
        stop, due = run.interruption.signal, self.due()
        if self.world.size > 1:
            stop, due = self._agree(stop, due)
        if stop is not None or due:
            self._save_copy(run, where, make(), stop)

    def after_stage(self, run: Run, where: str, make: Callable[[], Checkpoint]) -> None:
        """Write a checkpoint, then stop the run if a signal was received."""
        stop = run.interruption.signal
        if self.world.size > 1:
            self._agree(stop, False)  # returns the requests of the last step
            stop, _ = self._agree(stop, False)
            self._agree(None, False)
            self._requests = None
        self._save_copy(run, where, make(), stop)

    def _agree(self, stop: int | None, due: bool) -> tuple[int | None, bool]:
        """Send a request to stop or save to all processes. Return the requests of the last step."""
        due = due and self.world.is_rank0
        requests, self._requests = self._requests, self.world.max_async([stop or 0, int(due)])
        signal_number, any_due = (0, 0) if requests is None else requests()
        return signal_number or None, bool(any_due)

    def _save_copy(self, run: Run, where: str, checkpoint: Checkpoint, stop: int | None) -> None:
        """Save a copy of a checkpoint with the run's state. If ``stop`` is set, stop the run."""
        written = False
        if self.enabled:
            copies = {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in checkpoint.tensors.items()
                if self.world.is_rank0 or is_row(name)
            }
            self.written()  # the next number depends on the previous checkpoint
            attempt = self.world.broadcast(self.next_attempt())
            metadata = {**checkpoint.metadata, "run": run.state()}
            self.save(Checkpoint(metadata, copies), attempt)
            if stop is not None:
                written = self.world.broadcast_from_rank0(self.written)
        if stop is not None:
            problem = "" if written else ", but no checkpoint could be written"
            raise Interrupted(f"stopped after {where}{problem}", signal_number=stop)

    def newest(self, accept: Callable[[Mapping[str, Any]], bool]) -> Path | None:
        """Return the path of the newest checkpoint that can be used, or None if there is none.

        ``accept`` is called with the metadata of a checkpoint, and returns whether to use it.
        Damaged checkpoints are removed with a warning.
        """
        for path in reversed(self._paths()):
            problem = find_damage(path, FORMAT_VERSION)
            if problem:
                logger.warning("checkpoint %s: %s; using the previous one", path, problem)
                _remove(path)
            elif accept(_read_metadata(path)):
                return path
        return None

    def read(self, path: Path) -> Checkpoint:
        """Read a checkpoint, but only this process's rows of W_L."""
        return Checkpoint(_read_metadata(path), read_tensors(path, self.world))

    def clear(self) -> None:
        """Remove the checkpoints, but keep the trained members of an ensemble."""
        self.written()
        for path in self._paths():
            _remove(path)

    def remove_partial(self) -> None:
        """Remove incomplete files that killed processes left behind."""
        for path in self.folder.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("[0-9]*") if path.is_dir())

    def _write(self, checkpoint: Checkpoint, attempt: str) -> bool:
        """Write this process's part of a checkpoint, and return whether that succeeded."""
        path = self.folder / attempt.partition(".")[0]
        shards = self.folder / f".{attempt}{_SHARDS}"
        try:
            return self._write_parts(checkpoint, path, shards)
        except (OSError, SafetensorError, DataError) as error:
            logger.warning(
                "cannot write a checkpoint to %s (%s); training continues", self.folder, error
            )
            return False
        finally:
            if self.world.is_rank0 and self.world.size > 1:
                shutil.rmtree(shards, ignore_errors=True)

    def _write_parts(self, checkpoint: Checkpoint, path: Path, shards: Path) -> bool:
        problem, tensors, world = "", checkpoint.tensors, self.world
        if not all(map(all_finite, strip_prefix(WEIGHTS, tensors).values())):
            problem = "a weight is not finite"
            logger.warning("no checkpoint is written: %s", problem)
        if world.size > 1:
            if world.is_rank0:  # remove shards of earlier attempts that failed
                for old in set(self.folder.glob(f".*{_SHARDS}")) - {shards}:
                    shutil.rmtree(old, ignore_errors=True)
            write_shard(shards, world, {n: t for n, t in tensors.items() if is_row(n)}, problem)
            tensors = {name: tensor for name, tensor in tensors.items() if not is_row(name)}
        if problem or not world.is_rank0:
            return not problem
        with staged_folder(path) as staging:
            checksums = collect_shards(shards, world, staging) if world.size > 1 else {}
            save_file(tensors, staging / TENSORS_FILE)
            _write_json(staging / METADATA_FILE, checkpoint.metadata)
            write_manifest(staging, FORMAT_VERSION, checksums)
        for old in self._paths()[:-_KEPT]:
            _remove(old)
        logger.debug("checkpoint %s written", path)
        return True


def is_row(name: str) -> bool:
    """Return whether the checkpoint tensor with this name has one row per label.

    >>> [is_row(name) for name in ("model.labels.bias", "model.clusters.bias")]
    [True, False]
    """
    return ".labels." in name


def _shard_name(rank: int, size: int) -> str:
    return f"rows-{rank:05d}-of-{size:05d}.safetensors"


def write_shard(folder: Path, world: World, tensors: dict[str, Tensor], problem: str) -> None:
    """Write this process's rows, then a JSON file with their size and checksum.

    If there is a ``problem``, or the rows cannot be written, the JSON file describes the problem
    instead. It usually fits on the disk even if the rows do not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _shard_name(world.rank, world.size)
    note: dict[str, Any] = {"problem": problem or "unexpected error"}
    try:
        if not problem:
            save_file(tensors, path)
            note = manifest_entry(path)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        note = {"problem": str(error)}
        raise
    finally:
        with staged_file(path.with_name(f"{path.name}.json")) as staging:
            _write_json(staging, note)


def collect_shards(folder: Path, world: World, target: Path) -> dict[str, dict[str, Any]]:
    """Wait for the rows of all processes, and move their files to ``target``.

    Returns:
        The manifest entry of each file, by name.

    Raises:
        DataError: If a process died, could not write its rows, or took too long.
    """
    notes = {}
    end = time.monotonic() + _MAX_WAIT
    for rank in range(world.size):
        name = _shard_name(rank, world.size)
        path = folder / f"{name}.json"
        while not path.exists():
            if world.has_lost_process() or time.monotonic() > end:
                raise DataError(f"rank {rank} did not write its rows")
            time.sleep(_POLL_SECONDS)
        note = json.loads(path.read_text(encoding="utf8"))
        if note.get("problem"):
            raise DataError(f"rank {rank}: {note['problem']}")
        (folder / name).rename(target / name)
        notes[name] = note
    return notes


def read_tensors(folder: Path, world: World) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint.

    If a tensor has one row per label, read only this process's rows.
    """
    tensors: dict[str, Tensor] = {}
    with safe_open(folder / TENSORS_FILE, framework="pt") as file:
        names: list[str] = file.keys()
        for name in names:
            is_split = is_row(name) and world.size > 1
            tensors[name] = _own_rows([file], name, world) if is_split else file.get_tensor(name)
    shards = [safe_open(path, framework="pt") for path in sorted(folder.glob("rows-*.safetensors"))]
    names = shards[0].keys() if shards else []  # type: ignore[no-untyped-call]
    return tensors | {name: _own_rows(shards, name, world) for name in names}


def _own_rows(files: list[Any], name: str, world: World) -> Tensor:
    """Read this process's rows of the tensor ``name`` from ``files``, in chunks."""
    slices = [file.get_slice(name) for file in files]
    shapes = [part.get_shape() for part in slices]
    n_rows = len(range(world.rank, sum(shape[0] for shape in shapes), world.size))
    rows = torch.empty((n_rows, *shapes[0][1:]), dtype=slices[0][0:0].dtype)
    for rank, (part, shape) in enumerate(zip(slices, shapes, strict=True)):
        for first in range(0, shape[0], _CHUNK_ROWS):
            chunk = part[first : first + _CHUNK_ROWS]
            labels = torch.arange(first, first + len(chunk)) * len(files) + rank
            is_own = labels % world.size == world.rank
            rows[labels[is_own] // world.size] = chunk[is_own]
    return rows


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf8")


def _read_metadata(folder: Path) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads((folder / METADATA_FILE).read_text(encoding="utf8"))
    return metadata


def _remove(path: Path) -> None:
    """Rename a checkpoint to a hidden name, then remove it.

    A partly removed checkpoint is therefore never visible.
    """
    hidden = path.with_name(f".{path.name}.old")
    try:
        path.rename(hidden)
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", path, error)
    shutil.rmtree(hidden, ignore_errors=True)


def run_inputs(corpus: Corpus, init_from: Elias | None, device: torch.device) -> dict[str, Any]:
    """Return fingerprints of the inputs that must be the same when a run is resumed.

    The device type is included because it determines the format of the optimizer state in a
    checkpoint. The configuration is checked separately.
    """
    by_kernels = device.type == "cuda" and has_triton()
    return {
        "device": f"{device.type} with Triton" if by_kernels else device.type,
        "corpus": corpus.fingerprint()[:16],
        "model to start from": None if init_from is None else _fingerprint(init_from),
    }


def _fingerprint(model: Elias) -> str:
    checksum = hashlib.sha256()
    for name, tensor in model.model.state_dict().items():
        checksum.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        checksum.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return checksum.hexdigest()[:16]


def resume(
    run: Run, n_members: int, device: torch.device, world: World = SingleProcess()
) -> tuple[list[Elias], int, Checkpoint | None]:
    """Return the state of an interrupted run, and reset the run's records to that state.

    Returns:
        The finished members (an empty list on ranks other than 0), the number of finished members,
        and the checkpoint of the next member, if it has one.

    Raises:
        RunError: If the run was started with a different corpus, initial model or device type.
    """
    members, path = world.run_on_rank0(lambda: _find_state(run, n_members, device)) or ([], None)
    n_finished, path = world.broadcast((len(members), path))
    checkpoint = None if run.checkpoints is None or path is None else run.checkpoints.read(path)
    return members, n_finished, checkpoint


def _find_state(run: Run, n_members: int, device: torch.device) -> tuple[list[Elias], Path | None]:
    """Return the finished members and the checkpoint to resume from."""
    if run.checkpoints is None or not has_checkpoints(run.checkpoints.folder):
        return [], None
    run.checkpoints.remove_partial()
    members: list[Elias] = []
    state: dict[str, Any] | None = None
    for number in range(n_members):
        path = _member_path(run.checkpoints, number)
        if not path.is_dir():
            break
        problem = find_damage(path, FORMAT_VERSION)
        if problem:
            logger.warning("%s: %s; this member will be retrained", path, problem)
            shutil.rmtree(path, ignore_errors=True)
            break
        state = _checked_state(run, _read_metadata(path))
        members.append(Elias.from_pretrained(path / MODEL_FOLDER, device=str(device)))
    newest = run.checkpoints.newest(lambda metadata: metadata["run"]["member"] == len(members))
    if newest is not None:
        state = _checked_state(run, _read_metadata(newest)["run"])
    if state is None:
        logger.warning("%s: no checkpoint can be used, so the run starts over", run.folder)
        state = {"records": [], "timings": {}, "under_way": {}}
    if members:
        logger.info("resumed after member %d of %d", len(members), n_members)
    run.restore(state)
    return members, newest


def _checked_state(run: Run, state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state``, or raise a `RunError` if its inputs differ from those of ``run``."""
    for name, value in run.inputs.items():
        former = state["made_of"].get(name)
        if former != value:
            raise RunError(
                f"{run.folder}: a run was started here with another {name} ({former}, not "
                f"{value}); use the original {name}, overwrite=True to start over, or another out="
            )
    return state


def save_member(run: Run, model: Elias) -> None:
    """Save a finished ensemble member, then remove its checkpoints.

    If saving fails, log a warning and keep the checkpoints.
    """
    if run.checkpoints is None or not run.checkpoints.enabled:
        return
    try:
        with staged_folder(_member_path(run.checkpoints, run.number)) as staging:
            model.save_pretrained(staging / MODEL_FOLDER)
            _write_json(staging / METADATA_FILE, run.state())
            write_manifest(staging, FORMAT_VERSION)
    except (OSError, DataError, ModelError) as error:
        logger.warning("cannot save member %d (%s); training continues", run.number, error)
        return
    run.checkpoints.clear()


def _member_path(checkpoints: Checkpoints, number: int) -> Path:
    return checkpoints.folder / f"member-{number}"
