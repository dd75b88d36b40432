"""The configuration tree: frozen dataclasses, one field per setting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from elias.config.io import build, preset_tree, read_tree, set_key
from elias.errors import ConfigError

if TYPE_CHECKING:
    from elias.config.resolve import ResolvedConfig


def need(condition: bool, message: str) -> None:
    """Refuse a value whose condition does not hold."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankConfig:
    """The sparse ranker over the model's best labels, and the calibration of scores (§3.5)."""

    enabled: bool | None = None
    """Train the ranker after the last stage. Derived: where a CPU is done in minutes, up to
    200,000 labels and 1,000,000 points."""
    candidates: int = 100
    """Labels of each text that are ranked anew, the best of the model."""
    word_ngrams: int = 2
    """Longest run of words that is a feature: 1 words, 2 pairs of neighbours too; 0 none."""
    char_ngrams: tuple[int, int] = (3, 5)
    """Shortest and longest character n-gram that is a feature; (0, 0) for none."""
    min_count: int = 1
    """A feature must stand in this many training texts."""
    max_features: int = 1_000_000
    """Keep at most this many words and n-grams, the most frequent."""
    embedding: Literal["none", "encoder", "first"] = "none"
    """Dense features beside them: φ as trained (the paper's, but overfit on the points that the
    ranker trains on), or φ as it was before training, for a pretrained encoder."""
    loss: Literal["squared-hinge", "logistic"] = "squared-hinge"
    """What an error of the ranker is: that of the paper's program, or that of its Eq. 17, beside
    which q is best ``sigmoid`` (`transform`)."""
    cost: float = 1.0
    """C: what an error costs beside the length of the weights."""
    tolerance: float = 0.1
    """ε: a classifier is done when no step would change its gradient by more."""
    max_iterations: int = 100
    """Passes over the points of a label, at most."""
    prune: float = 0.1
    """Weights that are smaller are dropped."""
    transform: Literal["l3-hinge", "sigmoid"] = "l3-hinge"
    """How a margin s becomes q: exp(−max(1−s, 0)³), or σ(s)."""
    sharpness: float | None = None
    """γ: q is taken to this power, so that a small one lets p decide more. None: of 1, ½, ¼ and
    ⅛ the one that ranks the validation points best (nDCG@5 of p·q); 1, the paper's, without any."""
    calibrate: bool = True
    """Fit the decision trees T (appendix C.2) on the validation points, where there are any."""
    names: bool = True
    """Fit a second T beside the paper's that is also told how near the label's name is to the text
    (their likeness, and how much of the name stands in it), and rank by that. Beyond the paper; it
    takes texts, and names that are words."""
    trees: int = 40
    """How many trees T is the mean of, each grown on its own draw of the points, with half of the
    questions open to each node; 1 in the paper, grown on all points and free to ask anything."""
    tree_depth: int = 5
    """How many questions a tree may ask."""
    tree_leaf: int = 20
    """Pairs that each answer of a tree must rest on; 1 in the paper."""
    mixture: Literal["sum", "blend"] = "sum"
    """Final score: ``sum``, T + p·q as in the paper; ``blend``, 0.3·T + 0.7·p·q as in its
    program."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        for name in (
            "candidates",
            "min_count",
            "max_features",
            "max_iterations",
            "trees",
            "tree_depth",
            "tree_leaf",
        ):
            value = getattr(self, name)
            need(value >= 1, f"rerank.{name} must be >= 1, not {value}")
        need(
            0 <= self.word_ngrams <= 5,
            f"rerank.word_ngrams must be in 0..5, not {self.word_ngrams}",
        )
        low, high = self.char_ngrams
        need(
            0 <= low <= high <= 16,
            f"rerank.char_ngrams must be [shortest, longest] within 0..16, not {[low, high]}",
        )
        need(
            self.word_ngrams > 0 or high > 0 or self.embedding != "none",
            "rerank has no features: set rerank.word_ngrams, rerank.char_ngrams or "
            "rerank.embedding",
        )
        for name in ("cost", "tolerance"):
            value = getattr(self, name)
            need(
                0 < value < math.inf,
                f"rerank.{name} must be greater than 0 and finite, not {value}",
            )
        need(
            self.sharpness is None or 0 < self.sharpness < math.inf,
            f"rerank.sharpness must be greater than 0 and finite, not {self.sharpness}",
        )
        need(0 <= self.prune < math.inf, f"rerank.prune must be >= 0, not {self.prune}")
        need(self.tree_depth <= 20, f"rerank.tree_depth must be <= 20, not {self.tree_depth}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where the corpus lies while it is trained on."""

    on_disk: Literal["auto", "on", "off"] = "auto"
    """``on``: texts, labels and tokens stay on disk, memory-mapped; ``off``: in memory; ``auto``:
    on disk where the files are larger than 1 GiB."""
    setup_points: int | None = None
    """Compute what comes before training (the bag's vocabulary, clusters, first classifiers, edges)
    from so many points chosen at random, at least one of each label. None: from all of them, or
    from a million where the corpus is on disk."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        points = self.setup_points
        need(points is None or points >= 1, f"data.setup_points must be >= 1, not {points}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The text encoder φ (§3.1). Fields of the other kind are ignored."""

    kind: Literal["bag", "transformer"] = "bag"
    """``bag``: learned word and character n-gram vectors; ``transformer``: a pretrained one."""
    dropout: float = 0.5
    """Dropout on the embedding φ(x) while training."""
    model: str = "minilm"
    """transformer: a folder, a hub id, or ``minilm``."""
    pooling: Literal["mean", "cls"] = "mean"
    """transformer: how token vectors become one."""
    max_length: int = 32
    """transformer: longest text in tokens; what is over is cut off, and counted."""
    bottleneck: int | None = None
    """transformer: project φ to this width; None keeps the transformer's own."""
    gradient_checkpointing: bool = False
    """transformer: trade time for memory."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """transformer: ``auto`` is bfloat16 autocast on a GPU and float32 on a CPU."""
    compile: Literal["off", "on"] = "off"
    """transformer, on a GPU: ``on`` compiles a layer with torch.compile, for some seconds at the
    start of training, or once a saved model was asked about many texts."""
    capture: bool = True
    """transformer, on a GPU: record training steps and predictions that recur as CUDA graphs, each
    one launch; texts are padded to a multiple of 8 tokens for it."""
    dim: int = 256
    """bag: D, the width of φ."""
    hidden_dim: int = 512
    """bag: the width inside the residual block."""
    char_ngrams: tuple[int, int] = (3, 5)
    """bag: shortest and longest character n-gram; (0, 0) for words alone."""
    min_count: int | None = None
    """bag: a word or n-gram must stand in this many training texts. Derived: 2, or 1 where there
    are fewer than 100."""
    max_features: int = 400_000
    """bag: keep at most this many words and n-grams, the most frequent."""
    token_dropout: float = 0.3
    """bag: share of the words and n-grams dropped while training."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        need(0 <= self.dropout < 1, f"encoder.dropout must be in [0, 1), not {self.dropout}")
        need(
            0 <= self.token_dropout < 1,
            f"encoder.token_dropout must be in [0, 1), not {self.token_dropout}",
        )
        for name in ("max_length", "dim", "hidden_dim", "min_count", "max_features"):
            value = getattr(self, name)
            need(value is None or value >= 1, f"encoder.{name} must be >= 1, not {value}")
        need(self.max_length >= 3, f"encoder.max_length must be >= 3, not {self.max_length}")
        low, high = self.char_ngrams
        need(
            0 <= low <= high <= 16,
            f"encoder.char_ngrams must be [shortest, longest] within 0..16, not {[low, high]}",
        )
        need(
            self.bottleneck is None or self.bottleneck >= 1,
            f"encoder.bottleneck must be >= 1, not {self.bottleneck}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The learned graph from the root over clusters to labels (§3.1, §3.2), or none.

    Without one (``kind`` ``all``) the fields that size and start the graph are ignored.
    """

    kind: Literal["graph", "all"] = "graph"
    """``graph``: labels are found through clusters; ``all``: every label is scored (one-vs-all)."""
    label_storage: Literal["full", "compact"] = "full"
    """``full``: W_L and AdamW's moments in float32, 12 bytes a weight while training; ``compact``:
    W_L and the first moment in bfloat16, one second moment a label, 4 bytes. With a graph it takes
    a GPU."""
    n_clusters: int | None = None
    """C; a power of two keeps the clusters equal. Derived: 2^⌈log2(L/100)⌉, more for few labels."""
    edges_per_cluster: int | None = None
    """κ: edges kept for each cluster in the learned graph. Derived: about 10·L/C."""
    beam_size: int | None = None
    """b: clusters searched for a text. Derived: 20, or all where there are fewer."""
    shortlist_size: int | None = None
    """K: labels scored by their own classifier. Derived: 2000, less where there are few labels."""
    alpha: float = 10.0
    """α in Eq. 1: how many clusters may saturate at score 1."""
    beta: float | None = None
    """β in Eq. 5: how many labels of a cluster may saturate at score 1. Derived: about 1.5·L/C."""
    edge_init: Literal["counts", "random"] = "counts"
    """First edge logits: ½·log(A' + 0.1), or the paper's uniform random (Eq. 10)."""
    train_clusters: int | None = None
    """Clusters searched for a text while training: the strongest parents of its labels, then the
    best ones. As many as its labels where those are more. Derived: beam_size + 5."""
    train_shortlist: int | None = None
    """Labels scored by their own classifier while training. Derived: shortlist_size; less trains
    faster, and a larger shortlist_size finds more afterwards."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        for name in (
            "n_clusters",
            "edges_per_cluster",
            "beam_size",
            "shortlist_size",
            "train_clusters",
            "train_shortlist",
        ):
            value = getattr(self, name)
            need(value is None or value >= 1, f"index.{name} must be >= 1, not {value}")
        need(self.alpha >= 1, f"index.alpha must be >= 1, not {self.alpha}")
        need(self.beta is None or self.beta >= 1, f"index.beta must be >= 1, not {self.beta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The training loss L = L_c + λ·L_s (§3.3)."""

    reduction: Literal["mean", "sum"] = "sum"
    """``mean``: as the paper's program, over all shortlist slots; ``sum``: over the slots of a
    point, averaged over points. λ belongs to its reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stage of training (§3.4)."""

    name: str = "stage1"
    """What the stage is called in logs and metrics."""
    epochs: int = 5
    """Passes over the training points."""
    batch_size: int = 256
    """Points per step."""
    learn_graph: bool = False
    """False: the fixed partition, every edge score 1. True: edges from M'Y, then learned."""
    cluster_with_encoder: bool = False
    """Cluster the labels anew at the start, on φ as it stands beside bag of words."""
    keep_labels: bool = False
    """Go on with W_L of the stage before instead of fresh classifiers."""
    first_classifiers: Literal["centroids", "random"] = "centroids"
    """Fresh classifiers start at the mean φ of their points, or, as in the paper, at random."""
    keep_encoder: bool = True
    """Go on with φ of the stage before instead of the encoder's first weights."""
    encoder_lr: float = 1e-3
    """Learning rate of φ, but for the bag's vectors."""
    bag_lr: float = 1e-2
    """Learning rate of the bag encoder's word and n-gram vectors."""
    cluster_lr: float = 1e-2
    """Learning rate of Ŵ_C."""
    label_lr: float = 4e-3
    """Learning rate of W_L."""
    label_eps: float = 1e-8
    """AdamW's ε for W_L. Next to the gradient of a positive (about 1 over the batch size, under the
    ``sum`` reduction) it says how faint a gradient still moves a label at full rate."""
    edge_lr: float = 5e-2
    """Learning rate of the edge logits a."""
    index_every: int = 1
    """Move Ŵ_C, A and W_L every this many steps, on the gradient summed since; φ in every step.
    Classifiers of rare labels then overfit less (the published program does so in stage 2, with
    10)."""
    weight_decay: float = 0.01
    """AdamW's decay, on all but gains, biases, edges and the bag's vectors."""
    warmup: float = 0.1
    """Share of the steps over which learning rates rise; then they fall linearly to zero."""
    shortlist_loss_weight: float = 1.0
    """λ, the weight of the shortlist loss L_s."""
    average_from: float = 1.0
    """Average the weights (all but A) over the steps after this share of the stage; 1: do not."""
    max_grad_norm: float = 0.0
    """Clip the gradient of the dense parameters to this norm; 0: do not."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        where = f"stages[{self.name}]"
        need(self.epochs >= 1, f"{where}.epochs must be >= 1, not {self.epochs}")
        need(self.batch_size >= 1, f"{where}.batch_size must be >= 1, not {self.batch_size}")
        need(self.index_every >= 1, f"{where}.index_every must be >= 1, not {self.index_every}")
        for name in ("encoder_lr", "bag_lr", "cluster_lr", "label_lr", "edge_lr"):
            value = getattr(self, name)
            need(value >= 0 and math.isfinite(value), f"{where}.{name} must be >= 0, not {value}")
        for name in ("weight_decay", "shortlist_loss_weight", "max_grad_norm", "label_eps"):
            value = getattr(self, name)
            need(value >= 0, f"{where}.{name} must be >= 0, not {value}")
        for name in ("warmup", "average_from"):
            value = getattr(self, name)
            need(0 <= value <= 1, f"{where}.{name} must be in [0, 1], not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleConfig:
    """Several models whose scores are averaged label by label (§4)."""

    members: int = 1
    """How many models are trained, one after the other, with other clusters, first weights and
    batches; the points held out are the same for all."""
    first_member: int = 0
    """The number of the first of them. A saved member has its own here, so that its configuration
    trains it again by itself."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        need(self.members >= 1, f"ensemble.members must be >= 1, not {self.members}")
        need(
            0 <= self.first_member < 2**20,
            f"ensemble.first_member must be >= 0 and below 2^20, not {self.first_member}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Validation, metrics and the choice of the best epoch."""

    validation_size: int | None = None
    """Points held out of the training split where none are given. Derived; 0: none."""
    hold_out: Literal["covered", "random"] = "covered"
    """Which: ``covered`` takes only points whose labels all have another point, so that no label
    is lost to training; ``random`` takes any. Where many labels have a single point, the first are
    easier than new texts, and scores calibrated on them suit new texts less."""
    select_by: str = "nDCG@5"
    """The validation metric by which the best epoch is kept."""
    patience: int = 0
    """Stop a stage after this many epochs without a better validation metric; 0: never."""
    every: int = 1
    """Validate after every this many epochs (and after the last)."""
    propensity_a: float = 0.55
    """A of the propensity model."""
    propensity_b: float = 1.5
    """B of the propensity model."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        size = self.validation_size
        need(size is None or size >= 0, f"eval.validation_size must be >= 0, not {size}")
        need(self.every >= 1, f"eval.every must be >= 1, not {self.every}")
        need(self.patience >= 0, f"eval.patience must be >= 0, not {self.patience}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What is kept of a run while it trains, so that it goes on after a stop.

    None of it changes the model. Whatever is set here, a checkpoint is written at the end of each
    stage and when a run is interrupted.
    """

    minutes: float = 10.0
    """Write a checkpoint after this many minutes; 0: not by time."""
    steps: int | None = None
    """Write a checkpoint after this many steps too."""
    keep: int = 2
    """How many checkpoints are kept, the newest; 0: none is written."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        need(
            self.minutes >= 0 and math.isfinite(self.minutes),
            f"checkpoint.minutes must be >= 0, not {self.minutes}",
        )
        steps = self.steps
        need(steps is None or steps >= 1, f"checkpoint.steps must be >= 1 or none, not {steps}")
        need(self.keep >= 0, f"checkpoint.keep must be >= 0, not {self.keep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    """Where the numbers of ``metrics.jsonl`` go besides, while a run trains.

    None of it changes the model.
    """

    tensorboard: bool = False
    """Write them for TensorBoard too, to the folder ``tensorboard`` of the run; takes the extra
    ``tensorboard``."""
    wandb: str | None = None
    """Send them to this project of Weights & Biases too; takes the extra ``wandb``. Its own
    settings decide the rest, e.g. WANDB_MODE=offline."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        need(self.wandb is None or bool(self.wandb.strip()), "tracking.wandb must name a project")


DEFAULT_STAGES = (
    StageConfig(name="stage1", epochs=4),
    StageConfig(name="stage2", epochs=8, learn_graph=True, cluster_lr=5e-3, label_lr=8e-3),
)

ONE_VS_ALL_STAGES = (
    StageConfig(
        name="one-vs-all",
        epochs=15,
        bag_lr=2e-2,
        label_lr=2e-3,
        label_eps=1e-3,
        average_from=0.5,
    ),
)
"""The stages where none are given and every label is scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EliasConfig:
    """Everything that decides a run, given the data.

    >>> config = EliasConfig.preset("mesh-titles").override({"index.beta": 75})
    >>> config.index.beta
    75.0
    """

    seed: int = 0
    """The seed of every random choice, below 2^32."""
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    stages: tuple[StageConfig, ...] = DEFAULT_STAGES
    rerank: RerankConfig = field(default_factory=RerankConfig)
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        """Check what needs more than one value."""
        need(0 <= self.seed < 2**32, f"seed must be >= 0 and below 2^32, not {self.seed}")
        need(bool(self.stages), "stages must not be empty")
        names = [stage.name for stage in self.stages]
        need(len(set(names)) == len(names), f"stages must have different names, not {names}")
        self._fit_stages_to_index()

    def _fit_stages_to_index(self) -> None:
        """Take the usual stages of the kind of index where none were given; check given ones."""
        if self.index.kind == "graph":
            return
        if self.stages == DEFAULT_STAGES:
            object.__setattr__(self, "stages", ONE_VS_ALL_STAGES)  # frozen, and not yet seen
        for stage in self.stages:
            need(
                not stage.learn_graph,
                f"stages.{stage.name}.learn_graph: with index.kind='all' there is no graph to "
                "learn; give stages without it, e.g. in a --config file",
            )
            need(
                stage.index_every == 1,
                f"stages.{stage.name}.index_every must be 1 with index.kind='all', not "
                f"{stage.index_every}: there the labels move in every step",
            )

    @classmethod
    def preset(cls, name: str) -> EliasConfig:
        """Return the preset called ``name``; `preset_names` lists them."""
        return cls.from_dict(preset_tree(name))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Self:
        """Build the configuration from a nested mapping, refusing unknown keys."""
        return build(cls, tree)

    @classmethod
    def from_file(cls, path: str | Path) -> EliasConfig:
        """Read a TOML file, or the ``config.json`` of a run."""
        return cls.from_dict(read_tree(path))

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested dicts, ready for JSON."""
        tree: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return tree

    @property
    def member_seed(self) -> int:
        """Return the seed of what differs between the members of an ensemble."""
        return self.seed + (self.ensemble.first_member << 32)

    def member(self, number: int) -> Self:
        """Return the configuration of one member, counted from the first, by itself."""
        first = self.ensemble.first_member + number
        return replace(self, ensemble=EnsembleConfig(members=1, first_member=first))

    def override(self, changes: Mapping[str, Any]) -> EliasConfig:
        """Return a copy with dotted keys changed, e.g. ``{"stages.stage2.epochs": 3}``.

        Stages are named by position or by their name. A size may be set to None, so the copy is
        to be resolved again.
        """
        tree = self.to_dict()
        if "index.kind" in changes:  # first: it decides which stages there are to change
            set_key(tree, "index.kind", changes["index.kind"])
            tree = EliasConfig.from_dict(tree).to_dict()
        for key, value in changes.items():
            set_key(tree, key, value)
        return EliasConfig.from_dict(tree)

    def resolve(self, n_points: int, n_labels: int) -> ResolvedConfig:
        """Return a copy in which every size left open is derived from the data.

        Raises:
            ConfigError: If a given size does not fit the others or the number of labels.
        """
        from elias.config.resolve import check_sizes, fill_sizes  # its types derive from these

        if n_labels < 1:
            raise ConfigError(f"a model needs at least one label, not {n_labels}")
        resolved = fill_sizes(self, n_points, n_labels)
        check_sizes(resolved.index, n_labels)
        return resolved
