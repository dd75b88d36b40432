"""Resolve a configuration: derive every setting that is None from the encoder and the data.

The default schedule has two stages. Stage 1 trains the encoder and the classifiers W_L. It scores
every label if ``loss.reduction`` is sum and points × labels is at most `MAX_SCORES`. Otherwise it
uses the fixed graph of the paper. Stage 2 continues with this encoder and W_L, adds
clusters and edges, and learns the graph. `_STAGES` has the learning rates for each kind of stage
and encoder.

`fill_sizes` derives the sizes one after another, so that a derived size can depend on given sizes.
`check_sizes` checks that the sizes are consistent with each other and with the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

from elias.config.pretrained import pretrained_max_tokens, pretrained_pooling, pretrained_width
from elias.config.schema import (
    EliasConfig,
    EncoderConfig,
    EvalConfig,
    IndexConfig,
    LossConfig,
    RerankConfig,
    StageConfig,
    one_vs_all_stages,
)
from elias.errors import ConfigError

T = TypeVar("T")

RATES = ("encoder_lr", "bag_lr", "cluster_lr", "label_lr", "edge_lr", "label_eps", "weight_decay")
"""Settings of the optimizer in each stage."""

MIN_CLUSTERS = 32
MIN_LABELS_PER_CLUSTER = 4
EXTRA_TRAIN_CLUSTERS = 5  # added to the beam in training, for the clusters of a text's labels
MIN_SHORTLIST = 100


class _IndexRule(NamedTuple):
    """Constants from which the sizes of an index are derived."""

    labels_per_cluster: int
    edges_per_label: int
    beam_size: int
    max_shortlist: int
    shortlist_share: float  # of the labels
    train_share: float  # of the shortlist
    alpha_share: float  # of the beam
    beta_share: float  # of the edges of a cluster


MAX_SCORED_LABELS = 1000
"""Maximum number of labels for which, by default, every label is scored without an index.

With so few labels, scoring all of them is as precise as an index, and has a higher recall."""
MAX_FULLY_RANKED = 200
"""Maximum number of labels for which, without an index, the ranker scores every label."""
MAX_WIDE_LABELS = {"bag": 200_000, "transformer": 50_000}
WIDE = _IndexRule(50, 12, 40, 3000, 0.35, 2 / 3, 1.0, 0.3)
"""Sizes for at most `MAX_WIDE_LABELS` labels: more and smaller clusters, and a larger beam."""
PAPER = _IndexRule(100, 10, 20, 4000, 0.35, 0.5, 0.5, 0.15)
"""Sizes for more labels, as in the paper (Table 4), but with twice the shortlist in prediction."""
MIN_VALIDATION, MAX_VALIDATION = 20, 2000
# Within these limits, a CPU trains the ranker in minutes.
MAX_RERANKED_LABELS, MAX_RERANKED_POINTS = 200_000, 1_000_000
RANKER_COSTS = 1.0, 2.0
"""Costs C of the ranker, for many and for few labels."""
MAX_COST_POINTS = 50_000
"""Maximum number of points for which, by default, several costs are tried."""
CHAR_NGRAMS, FEW_CHAR_NGRAMS = (3, 5), (2, 5)
"""Character n-grams of the ranker, for many and for few labels."""
LONG_TEXT_BYTES = 500
"""Size from which texts count as long, about 80 words. The 95th percentile is compared with it."""
MAX_LENGTHS = (32, 64, 128, 256)
BYTES_PER_TOKEN = 3.5
"""Estimate for a model without a tokenizer file."""
MAX_SCORES = {"bag": 2e10, "transformer": 2e9}
"""Maximum of points × labels for which a stage scores every label.

A bag encoder then trains for some minutes on a CPU. The limit for a transformer is lower, because
it learns more from hard negatives if most labels have one or two points."""
LABEL_SAMPLE = 8192
"""Number of labels that a step of a bag encoder scores at first, if there are twice as many."""
MIN_BATCH_SIZE = 16
"""Minimum of derived batch sizes, also if a larger batch does not fit into the memory."""
BATCH_SIZES = {"bag": (MIN_BATCH_SIZE, 256), "transformer": (MIN_BATCH_SIZE, 1024)}
TUNED_WIDTH = 384
"""Dimension of MiniLM, for which the learning rates of a transformer were tuned.

The learning rate of a wider transformer is lower in proportion: half as high for BERT-base."""

_COMMON = {
    "steps": 80,  # approximate number of steps in an epoch, from which the batch size follows
    "label_share": 1.0,
    "cluster_with_encoder": False,
    "keep_labels": True,
    "first_classifiers": "centroids",
    "encoder_lr": 1e-3,
    "bag_lr": 1e-2,
    "cluster_lr": 1e-2,
    "label_lr": 4e-3,
    "label_eps": 1e-4,
    "edge_lr": 5e-2,
    "index_every": 1,
    "weight_decay": 0.01,
    "shortlist_loss_weight": 1.0,
    "average_from": 0.5,
}
_STAGES: dict[tuple[str, str], dict[str, Any]] = {
    ("bag", "all"): {"epochs": 15, "label_lr": 2e-3, "label_eps": 1e-3, "weight_decay": 0.1},
    ("bag", "learn after all"): {
        "epochs": 4,
        "encoder_lr": 5e-5,
        "bag_lr": 5e-4,
        "cluster_lr": 5e-3,
        "label_lr": 2e-4,
    },
    ("bag", "fixed"): {"epochs": 4, "cluster_with_encoder": True, "average_from": 1.0},
    ("bag", "learn after fixed"): {
        "epochs": 10,
        "encoder_lr": 5e-4,
        "bag_lr": 5e-3,
        "cluster_lr": 5e-3,
        "edge_lr": 1e-2,
        "index_every": 5,
        "weight_decay": 0.1,
    },
    ("transformer", "all"): {
        "epochs": 14,
        "steps": 300,
        "encoder_lr": 2e-4,
        "label_eps": 1e-3,
    },
    ("transformer", "learn after all"): {
        "epochs": 6,
        "steps": 300,
        "encoder_lr": 5e-5,
        "cluster_lr": 5e-3,
        "label_lr": 1e-3,
    },
    ("transformer", "fixed"): {
        "epochs": 16,
        "cluster_with_encoder": True,
        "first_classifiers": "random",
        "encoder_lr": 2e-4,
        "cluster_lr": 5e-3,
        "label_lr": 5e-3,
        "average_from": 0.6,
    },
    ("transformer", "learn after fixed"): {
        "epochs": 20,
        "steps": 160,
        "keep_labels": False,
        "first_classifiers": "random",
        "encoder_lr": 1e-4,
        "cluster_lr": 3e-4,
        "label_eps": 1e-5,
        "edge_lr": 3e-3,
        "index_every": 10,
        "shortlist_loss_weight": 2.0,
        "average_from": 0.6,
    },
}
"""Settings of a stage that differ from `_COMMON`, by kind of encoder and task of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEncoder(EncoderConfig):
    """A resolved `EncoderConfig`: every size has a value."""

    pooling: Literal["mean", "cls"] = "mean"
    max_length: int = MAX_LENGTHS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedIndex(IndexConfig):
    """A resolved `IndexConfig`: every size has a value."""

    kind: Literal["graph", "all"] = "graph"
    n_clusters: int
    edges_per_cluster: int
    beam_size: int
    shortlist_size: int
    alpha: float
    beta: float
    train_shortlist: int

    @property
    def train_clusters(self) -> int:
        """Return the number of clusters searched for a text in training.

        They are the strongest parents of its labels and then the best others. A text with more
        labels than this gets one cluster for each.
        """
        return self.beam_size + EXTRA_TRAIN_CLUSTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLoss(LossConfig):
    """A resolved `LossConfig`: every setting has a value."""

    label_contrast: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedStage(StageConfig):
    """A resolved `StageConfig`: every setting has a value."""

    score_all: bool
    label_share: float
    epochs: int
    batch_size: int
    cluster_with_encoder: bool
    keep_labels: bool
    first_classifiers: Literal["centroids", "random"]
    encoder_lr: float
    bag_lr: float
    cluster_lr: float
    label_lr: float
    label_eps: float
    edge_lr: float
    index_every: int
    weight_decay: float
    shortlist_loss_weight: float
    average_from: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRerank(RerankConfig):
    """A resolved `RerankConfig`: every setting has a value."""

    enabled: bool
    char_ngrams: tuple[int, int] = (3, 5)
    cost: float = 1.0
    choose_cost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEval(EvalConfig):
    """A resolved `EvalConfig`: the number of held-out points has a value."""

    validation_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EliasConfig):
    """A resolved `EliasConfig`, as `EliasConfig.resolve` returns it: every size has a value.

    Training, inference and saved models use this type. Its JSON format is the same as for
    `EliasConfig`.
    """

    encoder: ResolvedEncoder
    index: ResolvedIndex
    loss: ResolvedLoss
    stages: tuple[ResolvedStage, ...]
    rerank: ResolvedRerank
    eval: ResolvedEval

    @property
    def ranks_every_label(self) -> bool:
        """Return whether there are so few labels that the ranker scores all of them."""
        return self.index.kind == "all" and self.index.shortlist_size <= MAX_FULLY_RANKED


def fill_sizes(
    config: EliasConfig,
    n_points: int,
    n_labels: int,
    n_bytes: int | None = None,
    n_tokens: int | None = None,
) -> ResolvedConfig:
    """Return ``config`` with every None derived from N points, L labels and the length of texts.

    This function does not check that the sizes are consistent; `EliasConfig.resolve` does.

    >>> from elias.config import EliasConfig
    >>> config = fill_sizes(EliasConfig(), n_points=20_000, n_labels=8484)
    >>> index = config.index
    >>> index.n_clusters, index.edges_per_cluster, index.beam_size, index.shortlist_size
    (256, 398, 40, 2969)
    >>> [(stage.name, stage.score_all, stage.epochs) for stage in config.stages]
    [('stage1', True, 15), ('stage2', False, 4)]
    """
    config = replace(config, index=replace(config.index, kind=index_kind(config, n_labels)))
    held_out, enabled = config.eval.validation_size, config.rerank.enabled
    few = config.index.kind == "all" and n_labels <= MAX_FULLY_RANKED
    candidates = max(config.rerank.candidates, n_labels if few else 0)
    if held_out is None:
        refits = few and enabled is not False and config.ensemble.members == 1
        held_out = validation_size(n_points, refits=refits)
    contrast = config.loss.label_contrast
    if contrast is None:
        contrast = config.loss.label_text_weight > 0
    choose_cost = config.rerank.choose_cost
    if choose_cost is None:
        choose_cost = few and config.rerank.cost is None and n_points <= MAX_COST_POINTS
    if enabled is None:
        enabled = n_labels <= MAX_RERANKED_LABELS and n_points <= MAX_RERANKED_POINTS
    return _narrow(
        ResolvedConfig,
        config,
        encoder=_fill_encoder(config.encoder, n_bytes, n_tokens),
        index=_fill_index(config.index, config.encoder.kind, n_labels),
        loss=_narrow(ResolvedLoss, config.loss, label_contrast=contrast),
        stages=_fill_stages(config, n_points, n_labels),
        rerank=_narrow(
            ResolvedRerank,
            config.rerank,
            enabled=enabled,
            candidates=candidates,
            char_ngrams=char_ngrams(config.rerank, n_bytes, few=few),
            cost=config.rerank.cost or RANKER_COSTS[few],
            choose_cost=choose_cost,
        ),
        eval=_narrow(ResolvedEval, config.eval, validation_size=held_out),
    )


def char_ngrams(rerank: RerankConfig, n_bytes: int | None, *, few: bool) -> tuple[int, int]:
    """Return the character n-grams of the ranker: none for long texts, unless labels are few.

    >>> from elias.config import RerankConfig
    >>> char_ngrams(RerankConfig(), 100, few=False), char_ngrams(RerankConfig(), 1000, few=False)
    ((3, 5), (0, 0))
    >>> char_ngrams(RerankConfig(), 1000, few=True)
    (2, 5)
    """
    if rerank.char_ngrams is not None:
        return rerank.char_ngrams
    if few:
        return FEW_CHAR_NGRAMS
    return (0, 0) if rerank.word_ngrams > 0 and (n_bytes or 0) >= LONG_TEXT_BYTES else CHAR_NGRAMS


def _fill_encoder(
    encoder: EncoderConfig, n_bytes: int | None, n_tokens: int | None
) -> ResolvedEncoder:
    pooling, length = encoder.pooling, encoder.max_length
    pretrained = encoder.kind == "transformer"
    if pooling is None:
        pooling = pretrained_pooling(encoder.model) if pretrained else "mean"
    if length is None:
        limit = pretrained_max_tokens(encoder.model) if pretrained else None
        if n_tokens is None and n_bytes is not None:
            n_tokens = round(n_bytes / BYTES_PER_TOKEN) + 2
        length = min(max_length(n_tokens or 0), limit or MAX_LENGTHS[-1])
    return _narrow(ResolvedEncoder, encoder, pooling=pooling, max_length=length)


def _fill_stages(config: EliasConfig, n_points: int, n_labels: int) -> tuple[ResolvedStage, ...]:
    kind = config.encoder.kind
    affordable = n_points * n_labels <= MAX_SCORES[kind] and config.loss.reduction == "sum"
    resolved: list[ResolvedStage] = []
    for stage in config.stages:
        is_last = stage is config.stages[-1]
        every_label = stage.score_all
        if config.index.kind == "all":
            every_label = True
        elif every_label is None:
            every_label = affordable and not stage.learn_graph and not is_last
        elif every_label and is_last:
            raise ConfigError(
                f"stages.{stage.name}.score_all: the last stage must use the index; add a stage "
                "with learn_graph, or set index.kind to 'all'"
            )
        if stage.learn_graph:
            after_all = bool(resolved) and resolved[-1].score_all
            task = "learn after all" if after_all else "learn after fixed"
        else:
            task = "all" if every_label else "fixed"
        derived: dict[str, Any] = _COMMON | _STAGES[kind, task]
        derived["batch_size"] = batch_size(kind, n_points, derived.pop("steps"))
        if (kind, task) == ("bag", "all"):
            derived["label_share"] = label_share(n_labels)
        if stage.encoder_lr is None and kind == "transformer":
            width = pretrained_width(config.encoder.model) or TUNED_WIDTH
            derived["encoder_lr"] *= TUNED_WIDTH / max(width, TUNED_WIDTH)
        settings = {field.name: getattr(stage, field.name) for field in fields(stage)}
        derived |= {name: value for name, value in settings.items() if value is not None}
        resolved.append(ResolvedStage(**derived | {"score_all": every_label}))
    return tuple(resolved)


def default_stages(config: ResolvedConfig) -> dict[str, ResolvedStage]:
    """Return the stages by name, with derived values for all settings except the batch size."""
    stages = tuple(
        StageConfig(name=stage.name, learn_graph=stage.learn_graph, score_all=stage.score_all)
        for stage in config.stages
    )
    plain = EliasConfig(encoder=config.encoder, index=config.index, stages=stages)
    return {stage.name: stage for stage in _fill_stages(plain, n_points=1, n_labels=1)}


def batch_size(kind: str, n_points: int, steps: int) -> int:
    """Return the batch size, a power of two, with which an epoch has about ``steps`` steps.

    It is limited to the range in `BATCH_SIZES`.

    >>> batch_size("bag", 1000, 80), batch_size("bag", 10**6, 80)
    (16, 256)
    """
    least, most = BATCH_SIZES[kind]
    return min(1 << round(math.log2(max(n_points / steps, least))), most)


def label_share(n_labels: int) -> float:
    """Return the share of the labels that a step of a bag encoder scores at first.

    It is 1 for up to twice `LABEL_SAMPLE` labels, where sampling saves little time.

    >>> label_share(10_000), label_share(100_000)
    (1.0, 0.08192)
    """
    return 1.0 if n_labels <= 2 * LABEL_SAMPLE else LABEL_SAMPLE / n_labels


def max_length(n_tokens: int) -> int:
    """Return the length for texts of ``n_tokens``, one of `MAX_LENGTHS`.

    >>> max_length(30), max_length(3000)
    (32, 256)
    """
    return next((length for length in MAX_LENGTHS if length >= n_tokens), MAX_LENGTHS[-1])


def index_kind(config: EliasConfig, n_labels: int) -> Literal["graph", "all"]:
    """Return the configured kind of index or, if it is None, the default.

    The default is ``all`` for few labels, unless other settings require an index.

    >>> index_kind(EliasConfig(), 50), index_kind(EliasConfig(), 5000)
    ('all', 'graph')
    """
    index = config.index
    if index.kind is not None:
        return index.kind
    is_default = replace(index, label_storage="full") == IndexConfig()
    no_index = is_default and one_vs_all_stages(config.stages) is not None
    return "all" if no_index and n_labels <= MAX_SCORED_LABELS else "graph"


def _narrow(cls: type[T], config: Any, **values: Any) -> T:
    """Convert ``config`` to its subclass ``cls``, and replace the fields in ``values``."""
    return cls(**{field.name: getattr(config, field.name) for field in fields(config)} | values)


def n_clusters(n_labels: int, rule: _IndexRule) -> int:
    """Return C: the smallest power of two for at most ``labels_per_cluster`` labels per cluster.

    It is at least `MIN_CLUSTERS`, unless clusters would have fewer than `MIN_LABELS_PER_CLUSTER`
    labels.
    """
    share = n_labels / rule.labels_per_cluster
    clusters = 1 << math.ceil(math.log2(max(share, 1)))
    most = 1 << math.floor(math.log2(max(n_labels / MIN_LABELS_PER_CLUSTER, 1)))
    return min(max(clusters, MIN_CLUSTERS), most)


def shortlist_size(n_labels: int, n_paths: int, rule: _IndexRule) -> int:
    """Return K, the size of the shortlist: a share of the labels, but at least `MIN_SHORTLIST`.

    It is at most ``rule.max_shortlist``, the number of labels, and b·κ, the number of paths.
    """
    share = max(MIN_SHORTLIST, int(rule.shortlist_share * n_labels))
    return min(rule.max_shortlist, share, n_labels, n_paths)


def validation_size(n_points: int, *, refits: bool = False) -> int:
    """Return the number of points to hold out for validation.

    It is a tenth of the points, but at most 1000, or a twentieth if that is more. With ``refits``,
    it is a fifth, because the ranker is later trained on the held-out points, too. To choose a
    threshold, at least `MIN_VALIDATION` points are held out, if this is at most a third of all
    points. More than `MAX_VALIDATION` are never held out, because the labels that only held-out
    points have are not learned.

    >>> validation_size(4000), validation_size(4000, refits=True), validation_size(100)
    (400, 800, 20)
    """
    at_first = n_points // 5 if refits else min(n_points // 10, 1000)
    at_least = MIN_VALIDATION if n_points >= 3 * MIN_VALIDATION else 0
    return min(max(n_points // 20, at_first, at_least), MAX_VALIDATION)


def _fill_index(index: IndexConfig, kind: str, n_labels: int) -> ResolvedIndex:
    if index.kind == "all":  # one cluster that holds every label, each with a score of 1
        sizes = dict.fromkeys(("n_clusters", "beam_size"), 1)
        names = ("edges_per_cluster", "shortlist_size", "train_shortlist")
        sizes |= dict.fromkeys(names, n_labels)
        return _narrow(ResolvedIndex, index, **sizes, alpha=1.0, beta=1.0)
    rule = WIDE if n_labels <= MAX_WIDE_LABELS[kind] else PAPER
    clusters = index.n_clusters or n_clusters(n_labels, rule)
    edges = index.edges_per_cluster
    if edges is None:
        edges = min(n_labels, -(-rule.edges_per_label * n_labels // clusters))
    beam = index.beam_size or min(rule.beam_size, clusters)
    shortlist = index.shortlist_size or shortlist_size(n_labels, beam * edges, rule)
    train_shortlist = max(int(rule.train_share * shortlist), min(MIN_SHORTLIST, shortlist))
    return _narrow(
        ResolvedIndex,
        index,
        n_clusters=clusters,
        edges_per_cluster=edges,
        beam_size=beam,
        shortlist_size=shortlist,
        train_shortlist=index.train_shortlist or train_shortlist,
        alpha=index.alpha or beam * rule.alpha_share,
        beta=index.beta or float(max(1, round(rule.beta_share * edges))),
    )


def reasons(
    config: EliasConfig, resolved: ResolvedConfig, n_points: int, n_labels: int
) -> dict[str, str]:
    """Return the reason for the value of each derived setting, by key.

    A setting is derived if it is None in ``config``.

    >>> resolved = EliasConfig().resolve(20_000, 8484)
    >>> reasons(EliasConfig(), resolved, 20_000, 8484)["index.n_clusters"]
    'about 33 labels each'
    """
    kind, index = resolved.encoder.kind, resolved.index
    edges = index.n_clusters * index.edges_per_cluster / n_labels
    points = f"{n_points:,} points"
    shares = {n_points // 20: "a twentieth", n_points // 10: "a tenth", n_points // 5: "a fifth"}
    share = shares.get(resolved.eval.validation_size)
    why = {
        "encoder.max_length": "by the length of the texts",
        "encoder.pooling": "by the model",
        "index.kind": f"{n_labels:,} labels, at most {MAX_SCORED_LABELS:,}",
        "index.n_clusters": f"about {n_labels / index.n_clusters:.0f} labels each",
        "index.edges_per_cluster": f"about {edges:.0f} for each label",
        "index.beam_size": "all clusters" if index.beam_size == index.n_clusters else "default",
        "index.shortlist_size": f"{index.shortlist_size / n_labels:.0%} of the labels",
        "eval.validation_size": f"{share} of the points" if share else points,
        "rerank.enabled": f"{n_labels:,} labels, {points}",
        "rerank.char_ngrams": "long texts" if resolved.rerank.char_ngrams == (0, 0) else "default",
    }
    for key in list(why):
        section, name = key.split(".")
        if getattr(getattr(config, section), name) is not None:
            del why[key]
    config = replace(config, index=replace(config.index, kind=index.kind))  # it decides the stages
    unlimited = _fill_stages(config, n_points, n_labels)
    for stage, derived, usual in zip(config.stages, resolved.stages, unlimited, strict=True):
        where = f"stages.{derived.name}"
        if stage.epochs is None:
            why[f"{where}.epochs"] = f"default of a {kind}"
        if stage.batch_size is None:
            is_less = derived.batch_size < usual.batch_size
            why[f"{where}.batch_size"] = points + ", limited by the memory" * is_less
        if reason := _reason_of_rates(stage, resolved.encoder):
            why[f"{where}.rates"] = reason
        is_large = n_points * n_labels > MAX_SCORES[kind]
        if index.kind == "graph" and stage.score_all is None and derived.score_all != is_large:
            limit = "more than" if is_large else "at most"
            why[f"{where}.score_all"] = f"points × labels {limit} {MAX_SCORES[kind]:,.0f}"
    return why


def _reason_of_rates(stage: StageConfig, encoder: EncoderConfig) -> str:
    """Return the reason for the `RATES` of a stage; "" if all are given."""
    given = [name for name in RATES if getattr(stage, name) is not None]
    if len(given) == len(RATES):
        return ""
    reason = f"default of a {encoder.kind}"
    if encoder.kind == "transformer" and "encoder_lr" not in given:
        width = pretrained_width(encoder.model) or TUNED_WIDTH
        if width > TUNED_WIDTH:
            reason += f", encoder × {TUNED_WIDTH}/{width} for its width"
    return f"{reason}; given: {', '.join(given)}" if given else reason


def check_sizes(index: ResolvedIndex, n_labels: int) -> None:
    """Raise `ConfigError` if the sizes do not fit each other or the number of labels."""
    clusters, edges = index.n_clusters, index.edges_per_cluster
    labels = (n_labels, "the number of labels")
    paths = (index.beam_size * edges, "index.beam_size * index.edges_per_cluster")
    train_name = f"(index.beam_size + {EXTRA_TRAIN_CLUSTERS}) * index.edges_per_cluster"
    train_paths = (index.train_clusters * edges, train_name)
    for name, value, (limit, meaning) in (
        ("n_clusters", clusters, labels),
        ("edges_per_cluster", edges, labels),
        ("beam_size", index.beam_size, (clusters, "index.n_clusters")),
        ("shortlist_size", index.shortlist_size, labels),
        ("train_shortlist", index.train_shortlist, labels),
        ("shortlist_size", index.shortlist_size, paths),
        ("train_shortlist", index.train_shortlist, train_paths),
    ):
        if value > limit:
            raise ConfigError(
                f"index.{name} is {value}, more than {meaning} ({limit}); "
                "lower it, or set it to none to choose it automatically"
            )
    if edges * clusters < n_labels:
        raise ConfigError(
            f"index.edges_per_cluster * index.n_clusters is {edges * clusters}, but each of "
            f"{n_labels} labels needs an edge; raise one of the two settings, or set it to none"
        )
