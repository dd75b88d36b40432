"""Use the whole life of a model in a program that passes ``mypy --strict``.

mypy checks this file with the package (``make lint``): public names must have the types that users
expect.
"""
# ruff: noqa: T201 - an example shows what it finds

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from elias import (
    Corpus,
    Elias,
    EliasConfig,
    EliasError,
    Explanation,
    Metrics,
    Predictions,
    Ranking,
    Split,
    evaluate,
    load_corpus,
    train,
)
from elias.data.synthetic import synthetic_corpus


@dataclass(frozen=True)
class Tag:
    """A label of one text."""

    name: str
    score: float


def settings() -> EliasConfig:
    """Return the settings of a tiny model."""
    return EliasConfig().override(
        {"encoder.dim": 16, "stages.stage1.epochs": 1, "stages.stage2.epochs": 1}
    )


def tags(model: Elias, text: str, *, at_most: int = 3) -> list[Tag]:
    """Return the best labels of a text."""
    ranking: Ranking = model.predict(text, top_k=at_most)
    return [
        Tag(name, float(score)) for name, score in zip(ranking.labels, ranking.scores, strict=True)
    ]


def tag_all(model: Elias, texts: Sequence[str]) -> list[list[str]]:
    """Return the names of the best labels of each text."""
    predictions: Predictions = model.predict(texts, top_k=2)
    return [list(ranking.labels) for ranking in predictions]


def trained(corpus: Corpus, folder: Path) -> Elias:
    """Train, save and load a model."""
    model: Elias = train(corpus, settings(), device="cpu")
    saved: Path = model.save_pretrained(folder)
    return Elias.from_pretrained(saved, device="cpu")


def main() -> None:
    """Train on a generated corpus, and use the model."""
    corpus: Corpus = synthetic_corpus(n_points=300, n_labels=30)
    test: Split = corpus.split("test")
    assert test.texts is not None  # a corpus may have features instead
    texts: Sequence[str] = test.texts
    with TemporaryDirectory() as folder:
        model = trained(corpus, Path(folder) / "model")
    metrics: Metrics = evaluate(model.predict(texts, top_k=30), corpus)
    explanation: Explanation = model.explain(texts[0], top_k=1)
    print(metrics)
    print(tags(model, texts[0]), tag_all(model, texts[:2]), len(explanation.labels))

    try:
        load_corpus("no-such-file.csv")
    except EliasError as error:
        print(f"one line: {error}")


if __name__ == "__main__":
    main()
