from types import SimpleNamespace

import pytest

from elias.cli.explain import _legend


@pytest.mark.parametrize(
    ("sharpness", "mixture", "expected"),
    [
        (0.5, "sum", "Labels are ranked by score = p · ranker."),
        (4.0, "sum", "Labels are ranked by score = p^0.25 · ranker."),
        (3.0, "blend", "score = 0.3 · calibrated + 0.7 · p^0.333 · ranker"),
    ],
)
def test_the_legend_has_the_formula_of_the_model(sharpness, mixture, expected):
    calibration = object() if mixture == "blend" else None
    reranker = SimpleNamespace(
        sharpness=sharpness, mixture=mixture, calibration=calibration, by_name=None
    )
    config = SimpleNamespace(index=SimpleNamespace(kind="graph"))
    members = [SimpleNamespace(reranker=reranker, config=config)]

    legend = _legend(SimpleNamespace(probabilities=None, others=(), members=members), 0)

    assert expected in legend
