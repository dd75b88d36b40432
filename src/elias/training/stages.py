"""The sequence of stages: cluster, train with the fixed graph, link, train with the learned one."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from elias.distributed.rows import SharedRows
from elias.errors import ConfigError
from elias.kernels.device import has_triton
from elias.model.elias import EliasModel
from elias.model.graph import LabelGraph
from elias.model.one_vs_all import OneVsAll
from elias.model.ranking import forget_graphs
from elias.training.checkpoints import WEIGHTS, Checkpoint, prefixed, under
from elias.training.keeping import random_state, restore_random_state
from elias.training.loop import EpochReport, Points, StageLoop
from elias.training.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from scipy.sparse import csr_matrix

    from elias.config import EliasConfig, StageConfig
    from elias.distributed import World
    from elias.model.encoder import TextEncoder
    from elias.training.keeping import Keeper

logger = logging.getLogger(__name__)

_FILLED = 0.7  # of a GPU's free memory, by W_L: searching takes some too


class _Place(NamedTuple):
    """A stage, and what it goes on from."""

    stage: StageConfig
    position: int
    partition: NDArray[np.int64] | None


def check_storage(config: EliasConfig, device: torch.device, world: World | None = None) -> None:
    """Refuse to train on a device for which a configuration takes kernels that it does not have.

    Raises:
        ConfigError: Says what to change.
    """
    index = config.index
    by_kernels = device.type == "cuda" and has_triton()
    if index.label_storage == "compact" and index.kind == "graph" and not by_kernels:
        raise ConfigError(
            "index.label_storage is 'compact', which with a graph takes a GPU and Triton; set "
            "it to 'full', or train with --device cuda"
        )
    if world is not None and device.type == "cuda" and not by_kernels:
        raise ConfigError(
            "several processes on GPUs take Triton, which is missing, or turned off by "
            "ELIAS_KERNELS; use --device cpu"
        )


@dataclass
class StageSequence:
    """Everything the stages share; `run` goes through them and returns the model."""

    config: EliasConfig
    encoder: TextEncoder
    points: Points
    bow: csr_matrix | None
    """Of the points to set up from, for the process that clusters."""
    device: torch.device
    validate: Callable[[EliasModel], dict[str, float]] | None
    report_epoch: Callable[[EpochReport], None]
    report_stage: Callable[[StageConfig, EliasModel, int], None]
    timed: Callable[[str], AbstractContextManager[None]]
    """Notes how long a step of this name takes."""
    keeper: Keeper | None = None
    """Writes checkpoints."""
    world: World | None = None
    """The processes that train together; None: this one alone."""
    setup_from: Points | None = None
    """Points that clusters, first classifiers and edges are computed from; None: all."""

    @property
    def setup(self) -> Setup:
        """Return what makes that which a stage begins with."""
        return Setup(
            self.config,
            self.encoder,
            self.points if self.setup_from is None else self.setup_from,
            self.bow,
            self.points.labels.nnz / max(len(self.points.tokens), 1),
            self.world,
        )

    def run(
        self, init_from: EliasModel | None = None, resumed: Checkpoint | None = None
    ) -> EliasModel:
        """Train all stages in order, from scratch or from a model over the same labels.

        A model to start from goes on where it is: with its classifiers and clusters, and, if it
        has learned a graph, from the first stage that learns one. A checkpoint goes on in the
        stage it was written in, or after it. With several processes, all return the model, the
        first one whole, the others with their share of W_L.
        """
        check_storage(self.config, self.device, self.world)
        self._begin_alike(init_from)
        first_encoder = {name: t.clone() for name, t in self.encoder.state_dict().items()}
        forget_graphs()  # of models that answered, an ensemble's first member say
        self.encoder.to(self.device)
        self.encoder.prepare(self.device)
        model = init_from
        partition = self._partition_of(init_from)
        if resumed is None:
            first = self._first_stage(init_from)
            self._warn_of_unused(first, init_from)
        else:
            first = resumed.facts["position"]
            model, partition = self._take_up(resumed)
        for position, stage in list(enumerate(self.config.stages))[first:]:
            if resumed is not None and position == first:
                assert model is not None
                if "epoch" in resumed.facts:
                    self._train(model, _Place(stage, position, partition), resumed)
                continue
            if stage.learn_graph:
                model = self._learned(model, partition, stage, position)
            else:
                fresh = partition is None or stage.cluster_with_encoder
                partition = self._clusters(partition, stage)
                if not stage.keep_encoder:
                    self.encoder.load_state_dict(first_encoder)
                keep_labels = stage.keep_labels or model is init_from
                model = self._fixed(model, partition, stage, fresh, keep_labels=keep_labels)
            if self.config.index.label_storage == "compact":
                model.compact()
            model.to(self.device)
            self._train(model, _Place(stage, position, partition))
        assert model is not None
        model.labels.float()  # whatever it was trained in
        return self._whole(model)

    def _begin_alike(self, init_from: EliasModel | None) -> None:
        """Have all processes begin with the first one's encoder, W_L shared out."""
        if self.world is None:
            return
        self.world.copy_from_first(list(self.encoder.state_dict().values()))
        if init_from is not None:
            init_from.labels = SharedRows.of(self.world, init_from.labels)

    def _whole(self, model: EliasModel) -> EliasModel:
        """Give the first process the rows of all; on the CPU where they do not fit its GPU."""
        if not isinstance(model.labels, SharedRows):
            return model
        whole = model.labels.gathered()
        if whole is None:
            return model
        model.labels = whole
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if whole.weight.nbytes > _FILLED * free:
                logger.warning("W_L does not fit one GPU: what follows is computed on the CPU")
                return model.to("cpu")
        return model.to(self.device)

    def _first_stage(self, init_from: EliasModel | None) -> int:
        """Return the position of the stage to begin with."""
        if init_from is None or not init_from.graph.learned:
            return 0
        learning = [i for i, stage in enumerate(self.config.stages) if stage.learn_graph]
        if not learning or learning[0] == 0:
            return 0
        left_out = ", ".join(stage.name for stage in self.config.stages[: learning[0]])
        logger.info("the model to start from has learned its graph: %s is left out", left_out)
        return learning[0]

    def _warn_of_unused(self, first: int, init_from: EliasModel | None) -> None:
        """Name the settings that a stage which learns the graph has no use for."""
        for stage in self.config.stages[first:]:
            given = {"keep_encoder": not stage.keep_encoder}
            given["cluster_with_encoder"] = stage.cluster_with_encoder
            unused = [f"stages.{stage.name}.{key}" for key, is_set in given.items() if is_set]
            if stage.learn_graph and unused:
                logger.warning(
                    "%s: no effect, since a stage that learns the graph goes on with the encoder "
                    "and the clusters before it",
                    ", ".join(unused),
                )
        if init_from is None or not self.config.stages[first].learn_graph:
            return
        kept = {"alpha": init_from.alpha}
        if init_from.graph.learned:
            n_clusters, n_edges = init_from.graph.edge_labels.shape
            kept |= {"n_clusters": n_clusters, "edges_per_cluster": n_edges}
            kept["beta"] = init_from.graph.beta
        differ = [key for key, value in kept.items() if getattr(self.config.index, key) != value]
        if differ:
            logger.warning(
                "%s: no effect, since the model to start from goes on with its own index (%s)",
                ", ".join(f"index.{key}" for key in differ),
                ", ".join(f"{kept[key]:g}" for key in differ),
            )

    def _partition_of(self, model: EliasModel | None) -> NDArray[np.int64] | None:
        """Return the fixed partition of a model to start from, if it has one of the right size."""
        if model is None or model.graph.learned:
            return None
        if isinstance(model, OneVsAll) != (self.config.index.kind == "all"):
            return None
        if model.graph.n_clusters != self.config.index.n_clusters:
            return None
        return model.graph.partition().cpu().numpy()

    def _learned(
        self,
        model: EliasModel | None,
        partition: NDArray[np.int64] | None,
        stage: StageConfig,
        position: int,
    ) -> EliasModel:
        if model is not None and model.graph.learned:
            return model
        if model is None or partition is None:
            raise ConfigError(
                f"stages.{stage.name}.learn_graph: the first stage needs the fixed graph, or a "
                "model with a learned one to start from"
            )
        with self.timed("edges"):
            return self.setup.link(model, partition, stage, position)

    def _train(self, model: EliasModel, place: _Place, resumed: Checkpoint | None = None) -> None:
        """Train one stage, and keep what came of it."""
        with nullcontext() if self.keeper is None else self.keeper.interruption.deferred():
            with self.timed(place.stage.name):
                best_epoch = self._loop(model, place, resumed).run()
            self.report_stage(place.stage, model, best_epoch)
            if self.keeper is not None:
                done = Checkpoint({}, {})
                make = partial(self._checkpoint, model, place, lambda: done)
                self.keeper.after_stage(place.stage.name, make)

    def _loop(self, model: EliasModel, place: _Place, resumed: Checkpoint | None) -> StageLoop:
        keeper = self.keeper

        def keep(where: str, make: Callable[[], Checkpoint]) -> None:
            assert keeper is not None
            keeper.after_step(where, partial(self._checkpoint, model, place, make))

        return StageLoop(
            model=model,
            stage=place.stage,
            config=self.config,
            points=self.points,
            rng=np.random.default_rng([self.config.member_seed, place.position]),
            validate=self.validate,
            report=self.report_epoch,
            keep=None if keeper is None else keep,
            resumed=resumed,
            world=self.world,
            position=place.position,
        )

    def _checkpoint(
        self, model: EliasModel, place: _Place, progress: Callable[[], Checkpoint]
    ) -> Checkpoint:
        """Return the model, where it is, and how far its stage is; no epoch: it is done."""
        done = progress()
        graph = model.graph
        facts = {"alpha": model.alpha, "beta": graph.beta, "learned": graph.learned}
        tensors = prefixed(WEIGHTS, model.state_dict()) | random_state(self.device)
        if place.partition is not None:
            tensors["partition"] = torch.from_numpy(place.partition)
        return Checkpoint(
            {"position": place.position, "stage": place.stage.name, "model": facts, **done.facts},
            tensors | done.tensors,
        )

    def _take_up(self, kept: Checkpoint) -> tuple[EliasModel, NDArray[np.int64] | None]:
        """Return the model of a checkpoint and its partition; random numbers go on from there."""
        facts, tensors = kept.facts["model"], under(WEIGHTS, kept.tensors)
        n_labels = self.points.labels.shape[1]
        model: EliasModel
        if self.config.index.kind == "all":
            model = OneVsAll(self.encoder, n_labels, self.setup.rows(n_labels))
        else:
            graph = LabelGraph(
                tensors["graph.edge_labels"],
                n_labels,
                facts["beta"],
                edge_logits=tensors["graph.edge_logits"] if facts["learned"] else None,
                removed_log=tensors.get("graph.removed_log"),
            )
            model = EliasModel(self.encoder, graph, facts["alpha"], self.setup.rows(n_labels))
        if tensors["labels.weight"].dtype == torch.bfloat16:
            model.compact()
        model.load_state_dict(tensors)
        restore_random_state(kept.tensors, self.device)
        where = (
            "after {stage}" if "epoch" not in kept.facts else "{stage} epoch {epoch} step {step}"
        )
        logger.info("resumed %s", where.format_map(kept.facts))
        partition = kept.tensors.get("partition")
        return model.to(self.device), None if partition is None else partition.numpy()

    def _clusters(self, before: NDArray[np.int64] | None, stage: StageConfig) -> NDArray[np.int64]:
        """Return the partition that a stage with the fixed graph trains on."""
        if before is not None and not stage.cluster_with_encoder:
            return before
        with self.timed("clusters"):
            return self.setup.partition(stage.cluster_with_encoder)

    def _fixed(
        self,
        before: EliasModel | None,
        partition: NDArray[np.int64],
        stage: StageConfig,
        fresh_clusters: bool,
        *,
        keep_labels: bool,
    ) -> EliasModel:
        """Return a model on the partition, with what the stage keeps of the one before."""
        model = self.setup.model(partition)
        self.setup.start(model, stage, partition)
        if before is not None and not fresh_clusters:
            model.clusters = before.clusters
        if before is not None and keep_labels:
            model.labels = before.labels
        return model
