"""What goes into the routes and what comes out, as OpenAPI shows it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from elias.serve.settings import MOST_LABELS


class _Request(BaseModel):
    # JSON as Python reads it knows NaN, and 1e999 is infinite: neither is a number to ask with
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, body: Any) -> Any:
        """Refuse a body with many unknown keys at once, not with an error for each."""
        if isinstance(body, dict) and len(body) > len(cls.model_fields):
            known = ", ".join(cls.model_fields)
            raise ValueError(f"unknown keys; the known ones are: {known}")
        return body


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _whole(value: Any) -> Any:
    """Return 5.0 as 5: to JSON they are one number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# after the bounds in an annotation: then these stay in the specification
Whole = BeforeValidator(_whole)
Target = Annotated[str, Field(pattern=r"^(f1|(precision|recall)=(0(\.[0-9]{1,9})?|1(\.0{1,9})?))$")]
Inputs = Annotated[
    list[str], FailFast(), Field(min_length=1, description="Texts; a list even for one.")
]
TopK = Annotated[int, Field(ge=1, le=MOST_LABELS, description="Labels per text, at most."), Whole]


class PredictRequest(_Request):
    """Texts to label."""

    inputs: Inputs
    top_k: Annotated[
        int | None,
        Field(
            ge=1,
            le=MOST_LABELS,
            description="Labels per text, at most; 5, or with a threshold 100, unless given.",
        ),
        Whole,
    ] = None
    threshold: Annotated[
        float | Target | None,
        Field(
            description="Leave out labels that are less probable (of a model without "
            "probabilities: that score less). Or what the threshold is to reach on the points "
            "held out of training: f1, precision=0.8, recall=0.6."
        ),
    ] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"inputs": ["cod quotas in the north sea"], "top_k": 5, "threshold": 0.3}]
        }
    )


class ExplainRequest(_Request):
    """Texts whose labels are to be explained."""

    inputs: Inputs
    top_k: TopK = 5
    paths: Annotated[int, Field(ge=1, le=20, description="Clusters shown for a label."), Whole] = 3
    label: Annotated[
        int | None, Field(ge=0, description="Explain this label alone, by its id."), Whole
    ] = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": ["cod quotas in the north sea"], "paths": 3}]}
    )


class ScoredLabel(_Answer):
    """A label and how well it fits."""

    id: int
    label: str
    score: float
    probability: Annotated[
        float | None, Field(description="How probable it is that the label is right, if known.")
    ] = None


class PathStep(_Answer):
    """A way from the root over a cluster to a label: its score is the product of both parts."""

    cluster: int
    cluster_score: float
    edge_score: float
    score: float
    won: bool


class WhyLabel(_Answer):
    """A predicted label, and what its score is made of."""

    id: int
    label: str
    score: float
    probability: float | None
    p: float
    classifier_score: float
    path_score: float
    ranker_score: float | None
    calibrated_score: float | None
    name_likeness: float | None
    name_coverage: float | None
    paths: list[PathStep]
    n_paths: int


class NamedCluster(_Answer):
    """A cluster, described by the labels that hang under it most firmly."""

    id: int
    labels: list[str]


class Why(_Answer):
    """The labels of a text with the clusters that led to them, in one member of an ensemble."""

    member: int
    labels: list[WhyLabel]
    clusters: list[NamedCluster]


class LabelHit(_Answer):
    """A label found by its name."""

    id: int
    label: str
    frequency: int | None


class LabelList(_Answer):
    """Labels found by name."""

    labels: list[LabelHit]


class LabelEdge(_Answer):
    """An edge of a cluster to a label."""

    id: int
    label: str
    edge_score: float


class ClusterEdge(_Answer):
    """An edge of a label to a cluster, which is described by its strongest labels."""

    id: int
    labels: list[str]
    edge_score: float


class LabelPage(LabelHit):
    """A label and the clusters it hangs under, strongest first."""

    member: int
    n_clusters: int
    clusters: list[ClusterEdge]


class ClusterPage(_Answer):
    """A cluster and the labels that hang under it, strongest first."""

    id: int
    member: int
    n_labels: int
    labels: list[LabelEdge]


class Decisions(_Answer):
    """How good decisions at each threshold were, on points held out of training."""

    thresholds: list[float]
    precision: list[float]
    recall: list[float]
    f1: Annotated[float, Field(description="The threshold with the best F1.")]


class ServedLimits(_Answer):
    """How much a request may ask for."""

    max_inputs: int
    max_text: int
    max_body: int
    max_top_k: int


class Info(_Answer):
    """What is served."""

    version: str
    model: str
    loaded_at: float
    n_labels: int
    n_clusters: int
    n_members: int
    encoder: str
    components: list[str]
    metrics: dict[str, float]
    decisions: Decisions | None
    limits: ServedLimits


class Examples(_Answer):
    """Texts to try."""

    examples: list[str]


class Status(_Answer):
    """How the server is."""

    status: Literal["ok", "ready"]


class Failure(_Answer):
    """Why there is no answer."""

    error: str
    error_type: str
