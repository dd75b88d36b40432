"""The configuration tree: frozen dataclasses with one documented field per setting."""

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


PROPENSITY = (0.55, 1.5)
"""A and B of the propensity model, for data sets that are not from Wikipedia or Amazon."""


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with ``message`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def _at_least(least: int, config: object, section: str, *names: str, finite: bool = False) -> None:
    """Check that each of the named fields is None or at least ``least``."""
    for name in names:
        value = getattr(config, name)
        valid = value is None or (value >= least and not (finite and math.isinf(value)))
        require(valid, f"{section}.{name} must be >= {least}, not {value}")


def _check_span(span: tuple[int, int], key: str) -> None:
    require(
        0 <= span[0] <= span[1] <= 16,
        f"{key} must be [shortest, longest] within 0..16, not {list(span)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankConfig:
    """The sparse ranker over the model's best labels, and the calibration of scores (§3.5)."""

    enabled: bool | None = None
    """Train the ranker after the last stage. Derived: true for at most 200,000 labels and 1,000,000
    points, which a CPU trains in minutes."""
    candidates: int = 200
    """Number of the model's best labels that are reranked for each text. Without an index, all
    labels are reranked if there are at most 200."""
    word_ngrams: int = 2
    """Longest word n-gram that is a feature: 1 for words, 2 for words and pairs, 0 for none."""
    char_ngrams: tuple[int, int] | None = None
    """Shortest and longest character n-gram that is a feature; (0, 0) for none. Derived: (2, 5) if
    the ranker scores every label; else (3, 5), or none if texts are long."""
    embedding: Literal["none", "encoder", "first"] = "none"
    """Embedding φ(x) as additional features: ``encoder`` after training (as in the paper; it
    overfits, because the ranker trains on the same points), or ``first`` before training, for a
    pretrained encoder."""
    loss: Literal["squared-hinge", "logistic"] = "squared-hinge"
    """Loss of the ranker: ``squared-hinge`` as in the paper's program, or ``logistic`` as in
    Eq. 17. The margin s becomes q = exp(−max(1−s, 0)³), or q = σ(s) for ``logistic``."""
    cost: float | None = None
    """C: weight of the loss relative to the regularisation. Derived: 1, or 2 if the ranker
    scores every label."""
    choose_cost: bool | None = None
    """Choose C on the held-out points, from an eighth of ``cost`` to four times ``cost``. Derived:
    true if the ranker scores every label, ``cost`` is not given and there are at most 50,000
    points."""
    calibrate: bool = True
    """Combine the scores of model and ranker by decision trees T (appendix C.2), which are fitted
    on the validation points, if there are any."""
    names: bool = True
    """Also fit trees that use the similarity of text and label name as a further feature, add the
    50 labels with the most similar names to the candidates, and rank by the scores of these trees.
    Not in the paper. This needs texts, and label names that are words."""
    trees: int = 40
    """Number of trees that T averages. Each tree is fitted on its own random sample of the points,
    and each node can use a random half of the features. With 1, as in the paper, the tree uses all
    points and all features, and a leaf can hold a single pair."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        _at_least(1, self, "rerank", "candidates", "trees")
        words = self.word_ngrams
        require(0 <= words <= 5, f"rerank.word_ngrams must be in 0..5, not {words}")
        if self.char_ngrams is not None:
            _check_span(self.char_ngrams, "rerank.char_ngrams")
        require(
            words > 0 or self.char_ngrams != (0, 0) or self.embedding != "none",
            "rerank has no features: set rerank.word_ngrams, rerank.char_ngrams or "
            "rerank.embedding",
        )
        require(
            self.cost is None or 0 < self.cost < math.inf,
            f"rerank.cost must be greater than 0 and finite, not {self.cost}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Storage of the corpus during training."""

    on_disk: Literal["auto", "on", "off"] = "auto"
    """Storage of texts, labels and tokens. ``on``: on disk, memory-mapped; ``off``: in memory;
    ``auto``: on disk if the files are larger than 1 GiB."""
    setup_points: int | None = None
    """Number of training points used for vocabulary, clustering and initialisation, sampled with at
    least one point of each label. None: all points, or a million if the corpus is on disk."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        _at_least(1, self, "data", "setup_points")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The text encoder φ (§3.1). Settings for the other kind of encoder are ignored."""

    model: str = "bag"
    """``bag``: learned vectors of words and character n-grams; ``minilm``, a folder or a model on
    the Hugging Face hub: a pretrained transformer."""
    dropout: float = 0.5
    """Dropout on the embedding φ(x) during training."""
    pooling: Literal["mean", "cls"] | None = None
    """transformer: how token vectors are pooled into one. Derived from the model's files
    (``1_Pooling`` of sentence-transformers, ``classifier_pooling``), else ``mean``."""
    max_length: int | None = None
    """transformer: maximum number of tokens; longer texts are truncated, and their number is
    logged. Derived: the smallest of 32, 64, 128 and 256 that is enough for 95% of the texts, which
    a sample tells, but at most the limit of the model."""
    windows: int = 1
    """transformer: maximum number of windows of ``max_length`` tokens into which a longer text is
    split. φ is the mean over the windows, weighted by their numbers of tokens. Time and memory grow
    with the total number of tokens."""
    bottleneck: int | None = None
    """transformer: dimension to which φ(x) is projected; None: no projection."""
    gradient_checkpointing: bool = False
    """transformer: recompute activations in the backward pass, which takes less memory and more
    time."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """transformer: number format; ``auto`` is bfloat16 autocast on a GPU and float32 on a CPU."""
    compile: Literal["off", "on"] = "off"
    """transformer, on a GPU: ``on`` compiles the layers with torch.compile. That takes some seconds
    at the start of training, or after a saved model has predicted many texts."""
    dim: int = 256
    """bag: D, the dimension of the embedding φ(x)."""
    hidden_dim: int = 512
    """bag: the dimension of the hidden layer in the residual block."""
    char_ngrams: tuple[int, int] = (3, 5)
    """bag: shortest and longest character n-gram; (0, 0) for words only."""
    max_features: int = 400_000
    """bag: maximum number of words and n-grams; the most frequent are kept."""
    token_dropout: float = 0.5
    """bag: share of the words and n-grams dropped during training."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        for name in ("dropout", "token_dropout"):
            value = getattr(self, name)
            require(0 <= value < 1, f"encoder.{name} must be in [0, 1), not {value}")
        _at_least(1, self, "encoder", "dim", "hidden_dim", "max_features")
        _at_least(1, self, "encoder", "bottleneck", "windows")
        _at_least(3, self, "encoder", "max_length")
        _check_span(self.char_ngrams, "encoder.char_ngrams")
        require(bool(self.model.strip()), "encoder.model must name a model")

    @property
    def kind(self) -> Literal["bag", "transformer"]:
        """Return the kind of the encoder."""
        return "bag" if self.model == "bag" else "transformer"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The learned graph from clusters to labels (§3.1, §3.2), or no graph.

    With ``kind`` ``all`` there is no graph, and the fields that size and initialise it are ignored.
    Sizes that are not given are derived from the number of labels L. Some rules differ for *many
    labels*, which means more than 200,000, or more than 50,000 with a transformer.
    """

    kind: Literal["graph", "all"] | None = None
    """``graph``: labels are searched through clusters; ``all``: every label is scored (one-vs-all).
    Derived: ``all`` for at most 1000 labels, unless sizes of the index or settings of stage 2 other
    than epochs are given."""
    label_storage: Literal["full", "compact"] = "full"
    """``full``: W_L and the moments of AdamW in float32, 12 bytes per weight in training;
    ``compact``: W_L and the first moment in bfloat16 and one second moment per label, 4 bytes per
    weight. With a graph, ``compact`` needs a GPU."""
    n_clusters: int | None = None
    """C: number of clusters; a power of two gives clusters of equal size. Derived: 2^⌈log2(L/50)⌉
    (many labels: 2^⌈log2(L/100)⌉), but at least 32, with at least 4 labels per cluster."""
    edges_per_cluster: int | None = None
    """κ: edges of each cluster in the learned graph. Derived: 12·L/C (many labels:
    10·L/C)."""
    beam_size: int | None = None
    """b: clusters searched for a text. Derived: 40 (many labels: 20), or all clusters if there are
    fewer."""
    shortlist_size: int | None = None
    """K: size of the shortlist, the labels scored by their own classifier. Derived: 35% of the
    labels, at most 3000 (many labels: 4000)."""
    alpha: float | None = None
    """α in Eq. 1: number of clusters that can reach the score 1. Derived: b (many labels: b/2)."""
    beta: float | None = None
    """β in Eq. 5: number of labels of a cluster that can reach the score 1. Derived: 0.3·κ
    (many labels: 0.15·κ)."""
    edge_init: Literal["counts", "random"] = "counts"
    """Initial edge logits: ``counts`` is ½·log(A' + 0.1), where A' are the co-occurrence counts of
    Eq. 9; ``random`` is uniform as in the paper (Eq. 10)."""
    train_shortlist: int | None = None
    """Size of the shortlist in training. Derived: two thirds of shortlist_size (many labels: half
    of it). A smaller value makes training faster. Prediction uses shortlist_size."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        _at_least(1, self, "index", "n_clusters", "edges_per_cluster", "beam_size")
        _at_least(1, self, "index", "shortlist_size", "train_shortlist")
        _at_least(1, self, "index", "alpha", "beta")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The training loss L = L_c + λ·L_s (§3.3)."""

    reduction: Literal["mean", "sum"] = "sum"
    """``mean``: average over all labels of all shortlists, as in the paper's program; ``sum``: sum
    over the shortlist of a point, averaged over the points. A good λ depends on this choice."""
    label_text_weight: float = 1.0
    """Mean number of times per epoch that a label text is used as a training point, for a label
    whose name is a reliable keyword. For other labels, this number is multiplied by the share of
    points with the label among the training texts that contain all words of its name. These texts
    also count in centroids. 0: label texts are not training points, as in the paper."""
    label_contrast: bool | None = None
    """Stage 0: before the first stage, train the encoder on pairs of a text and the text of one of
    its labels or, if this label has none, another text with the label. Derived: true, unless
    label_text_weight is 0."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        _at_least(0, self, "loss", "label_text_weight", finite=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stage of training (§3.4).

    A stage scores every label, uses a fixed graph, or learns the graph. Fields that are None are
    derived from this choice, the kind of encoder and the data, see `elias.config.resolve`.
    """

    name: str = "stage1"
    """Name of the stage in logs and metrics."""
    learn_graph: bool = False
    """Learn the edges, starting from the co-occurrence counts of clusters and labels (M'Y, Eq. 9).
    If false, `score_all` selects what the stage does."""
    score_all: bool | None = None
    """Score every label in each step (one-vs-all), in a stage that does not learn the graph. If
    false, the graph is fixed: a partition with all edge scores 1, as in the paper. By default, a
    stage before the last one scores every label if points × labels is at most 2·10¹⁰
    (transformer: 2·10⁹)."""
    label_share: float | None = None
    """Share of the labels that a step scores in the first three quarters of a stage with
    `score_all`, drawn at random, in addition to the labels of its points; 1: all labels in all
    steps."""
    epochs: int | None = None
    """Maximum number of passes over the training points; see `EvalConfig.patience`."""
    batch_size: int | None = None
    """Number of points per training step."""
    cluster_with_encoder: bool | None = None
    """Cluster the labels again at the start of the stage, by φ and the bag of words."""
    keep_labels: bool | None = None
    """Keep the label classifiers W_L of the previous stage instead of new ones."""
    first_classifiers: Literal["centroids", "random"] | None = None
    """Initial weights of new label classifiers: the mean φ of their points, or random as in the
    paper."""
    keep_encoder: bool = True
    """Keep the encoder φ of the previous stage instead of its initial weights."""
    encoder_lr: float | None = None
    """Learning rate of the encoder φ, except the vectors of a bag encoder."""
    bag_lr: float | None = None
    """Learning rate of the word and n-gram vectors of a bag encoder."""
    cluster_lr: float | None = None
    """Learning rate of the cluster classifiers Ŵ_C."""
    label_lr: float | None = None
    """Learning rate of the label classifiers W_L."""
    label_eps: float | None = None
    """ε of AdamW for W_L. Gradients much smaller than ε hardly change a classifier; with the
    ``sum`` reduction, the gradient of a positive label is about 1 / batch size."""
    edge_lr: float | None = None
    """Learning rate of the edge logits a."""
    index_every: int | None = None
    """Number of steps between updates of Ŵ_C, A and W_L, which use the sum of the gradients; φ is
    updated in every step. Larger values reduce overfitting of rare labels (the paper's program uses
    10 in stage 2)."""
    weight_decay: float | None = None
    """Weight decay of AdamW, on all weights except layer norms, biases, edges and the vectors of a
    bag encoder."""
    shortlist_loss_weight: float | None = None
    """λ: weight of the shortlist loss L_s."""
    average_from: float | None = None
    """Average the weights (except the edges A) over all steps after this share of the stage; 1: no
    averaging."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        section = f"stages.{self.name}"
        _at_least(1, self, section, "epochs", "batch_size", "index_every")
        rates = ("encoder_lr", "bag_lr", "cluster_lr", "label_lr", "edge_lr")
        _at_least(0, self, section, *rates, finite=True)
        _at_least(0, self, section, "weight_decay", "shortlist_loss_weight", "label_eps")
        for name in ("label_share", "average_from"):
            share = getattr(self, name)
            valid = share is None or 0 <= share <= 1
            require(valid, f"{section}.{name} must be in [0, 1], not {share}")
        require(
            not (self.learn_graph and self.score_all),
            f"{section}.score_all: a stage that learns the graph scores a shortlist; set one of "
            "score_all and learn_graph to false",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleConfig:
    """Several models whose scores are averaged label by label (§4)."""

    members: int = 1
    """Number of models. They are trained one after the other with different clusters, initial
    weights and batches, but the same held-out points."""
    first_member: int = 0
    """Index of the first member, from 0. The configuration of a saved member has the member's index
    here, so that training with it reproduces the member."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        _at_least(1, self, "ensemble", "members")
        _at_least(0, self, "ensemble", "first_member")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Validation, metrics and the choice of the best epoch. Each epoch is validated."""

    validation_size: int | None = None
    """Number of training points held out if the corpus has no validation split; 0: none. Derived: a
    tenth of the points, at most 1000 (a fifth, at most 2000, if the ranker scores every label), or
    a twentieth, at most 2000, if that is more."""
    hold_out: Literal["covered", "random"] = "random"
    """``covered``: hold out only points whose labels all have another point, so that training sees
    every label; ``random``: any points. If many labels have a single point, covered points are
    easier to label than new texts, and scores calibrated on them fit new texts less well."""
    select_by: str = "nDCG@5"
    """Validation metric that selects the best epoch."""
    patience: int = 5
    """Stop a stage after this number of epochs without a better validation metric; 0: never."""
    drop_unhelpful: bool = True
    """Leave out the last stage, calibration or label names if they do not improve results on
    held-out points."""
    propensity: tuple[float, float] = PROPENSITY
    """A and B of the propensity model."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        _at_least(0, self, "eval", "validation_size", "patience")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a run, from which it resumes after an interruption.

    They do not change the model. A checkpoint is also written at the end of a stage and when a run
    is interrupted. The newest two are kept.
    """

    minutes: float = 10.0
    """Minutes between checkpoints; 0: write no checkpoints, so that a run cannot resume."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        _at_least(0, self, "checkpoint", "minutes", finite=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    """External loggers, which get the metrics in ``metrics.jsonl`` during training.

    They do not change the model.
    """

    tensorboard: bool = False
    """Log to TensorBoard, in the folder ``tensorboard`` of the run. Needs the extra
    ``tensorboard``."""
    wandb: str | None = None
    """Log to this project of Weights & Biases. Needs the extra ``wandb``. The environment variables
    of wandb apply, e.g. WANDB_MODE=offline."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if a value is not allowed."""
        require(
            self.wandb is None or bool(self.wandb.strip()), "tracking.wandb must name a project"
        )


DEFAULT_STAGES = (StageConfig(name="stage1"), StageConfig(name="stage2", learn_graph=True))
ONE_VS_ALL = "one-vs-all"
"""Name of the only stage of a model that scores every label, if it has the default stages."""


def one_vs_all_stages(stages: tuple[StageConfig, ...]) -> tuple[StageConfig, ...] | None:
    """Return the stages of a one-vs-all model: stage 1 only. Return None if an index is required.

    Stages require an index if they are not the two default stages, if ``score_all`` of stage 1 is
    False, or if a setting of stage 2 other than its number of epochs is changed.

    >>> one_vs_all_stages((StageConfig(epochs=3), StageConfig(name="stage2", learn_graph=True)))
    (StageConfig(name='one-vs-all', ...epochs=3...),)
    """
    first, *others = stages
    is_first = first.name == DEFAULT_STAGES[0].name and not first.learn_graph
    is_default = [replace(stage, epochs=None) for stage in others] == [DEFAULT_STAGES[1]]
    needs_index = first.score_all is False or not (is_first and is_default)
    return None if needs_index else (replace(first, name=ONE_VS_ALL),)


@dataclass(frozen=True, slots=True, kw_only=True)
class EliasConfig:
    """The complete configuration of a training run.

    >>> config = EliasConfig.preset("fast").override({"index.beta": 75})
    >>> config.index.beta
    75.0
    """

    seed: int = 0
    """Seed of all random numbers, below 2^32."""
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
        """Check the seed and the stages. If index.kind is 'all', use the one-vs-all stages."""
        require(0 <= self.seed < 2**32, f"seed must be >= 0 and below 2^32, not {self.seed}")
        require(bool(self.stages), "stages must not be empty")
        names = [stage.name for stage in self.stages]
        require(len(set(names)) == len(names), f"stages must have different names, not {names}")
        if self.index.kind != "all":
            return
        if one_stage := one_vs_all_stages(self.stages):
            object.__setattr__(self, "stages", one_stage)
        for stage in self.stages:
            require(
                not stage.learn_graph,
                f"stages.{stage.name}.learn_graph: with index.kind='all' there is no graph to "
                "learn; give stages without it, e.g. in a --config file",
            )
            require(
                stage.index_every in (None, 1),
                f"stages.{stage.name}.index_every must be 1 with index.kind='all', not "
                f"{stage.index_every}: one-vs-all updates the labels in every step",
            )

    @classmethod
    def preset(cls, name: str) -> EliasConfig:
        """Return the preset of this name. `preset_names` lists the names."""
        return cls.from_dict(preset_tree(name))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Self:
        """Build the configuration from a nested mapping; unknown keys raise `ConfigError`."""
        return build(cls, tree)

    @classmethod
    def from_file(cls, path: str | Path) -> EliasConfig:
        """Load a TOML file, or the ``config.json`` of a run."""
        return cls.from_dict(read_tree(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as nested dicts that JSON can hold."""
        tree: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return tree

    @property
    def member_seed(self) -> int:
        """Return the seed for random choices that differ between the members of an ensemble."""
        return self.seed + (self.ensemble.first_member << 32)

    def member(self, index: int) -> Self:
        """Return the configuration that trains only one member of the ensemble."""
        first = self.ensemble.first_member + index
        return replace(self, ensemble=EnsembleConfig(members=1, first_member=first))

    def override(self, changes: Mapping[str, Any]) -> EliasConfig:
        """Return a copy with dotted keys changed, e.g. ``{"stages.stage2.epochs": 3}``.

        A stage is given by its name or position. The copy is not resolved, so resolve it again.
        """
        tree, kind = self.to_dict(), changes.get("index.kind", self.index.kind)
        if kind is None and any(key.startswith(f"stages.{ONE_VS_ALL}.") for key in changes):
            kind = "all"
        of_first = f"stages.{self.stages[0].name}."
        for key, value in changes.items():
            if key.startswith(of_first):  # index.kind = "all" may rename this stage below
                set_key(tree, key, value)
        if kind != self.index.kind:  # set it before the other keys: it decides which stages exist
            set_key(tree, "index.kind", kind)
            tree = EliasConfig.from_dict(tree).to_dict()
        for key, value in changes.items():
            if not key.startswith(of_first):
                set_key(tree, key, value)
        return EliasConfig.from_dict(tree)

    def with_encoder(self, name: str) -> EliasConfig:
        """Return a copy with another encoder: ``bag``, ``minilm``, a folder or a hub id.

        If the model changes, its pooling is derived again. All other settings are kept.

        >>> EliasConfig().with_encoder("minilm").encoder.kind
        'transformer'
        """
        pooling = self.encoder.pooling if name == self.encoder.model else None
        return self.override({"encoder.model": name, "encoder.pooling": pooling})

    def resolve(
        self,
        n_points: int,
        n_labels: int,
        n_bytes: int | None = None,
        n_tokens: int | None = None,
    ) -> ResolvedConfig:
        """Return a copy in which every setting that is None is derived from the data.

        ``n_bytes`` is the 95th percentile of the size of texts in UTF-8, or None without texts.
        ``n_tokens`` is that of their number of tokens, or None to estimate it from ``n_bytes``.

        Raises:
            ConfigError: If sizes do not fit each other or the number of labels.
        """
        from elias.config.resolve import check_sizes, fill_sizes  # avoids a circular import

        if n_labels < 1:
            raise ConfigError(
                f"a model needs at least one label, but the corpus has {n_labels}; check its labels"
            )
        resolved = fill_sizes(self, n_points, n_labels, n_bytes, n_tokens)
        check_sizes(resolved.index, n_labels)
        return resolved
