"""The section of a report on probabilities: how far they can be relied on, and decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from elias.analysis.axes import Axis
from elias.analysis.markup import Markup
from elias.analysis.page import figure, grid, paragraph, section, table
from elias.analysis.plots import Line, Words, line_plot
from elias.pipeline.deciding import ECE_AT, PROBABILITIES
from elias.rerank.probabilities import reliability

if TYPE_CHECKING:
    from elias.analysis.subject import Subject
    from elias.data.corpus import Split
    from elias.predictions import Predictions
    from elias.rerank.probabilities import Probabilities, Reliability

_NONE = (
    "The model knows no probabilities: fewer than twenty points were held out, or it is of before "
    "there were any. elias calibrate adds them."
)


def decisions_section(
    subject: Subject, judged: tuple[str, Split] | None, found: Predictions | None
) -> Markup:
    """Return the section; ``found`` are the last component's predictions for the points judged."""
    known = subject.model.probabilities
    if known is None:
        return section("decisions", "Probabilities and decisions", paragraph(_NONE, soft=True))
    figures = [threshold_figure(known)]
    if judged is not None and found is not None:
        figures.insert(0, reliability_figure(found, judged[1], judged[0]))
    return section("decisions", "Probabilities and decisions", _errors(subject), grid(figures))


def _errors(subject: Subject) -> Markup | None:
    """Return ECE@5 of each split as it was measured when the probabilities were learned."""
    told = subject.model.facts.get(PROBABILITIES, {}).get("errors", {})
    if not told:
        return None
    rows = [[name, f"{one['before']:.2f}", f"{one['after']:.2f}"] for name, one in told.items()]
    header = ["points", f"ECE@{ECE_AT} of the scores as they are, %", f"ECE@{ECE_AT}, %"]
    return table(header, rows)


def reliability_figure(found: Predictions, split: Split, name: str) -> Markup:
    """Return how often labels of a probability are relevant, before and after calibration."""
    measured = {
        "scores as they are": reliability(found, split.labels, ECE_AT, calibrated=False),
        "probabilities": reliability(found, split.labels, ECE_AT),
    }
    lines = [Line(name="as it should be", xs=[0.0, 1.0], ys=[0.0, 1.0])]
    lines += [_line(title, one) for title, one in measured.items()]
    errors = ", ".join(f"{one.error:.2f}% of the {title}" for title, one in measured.items())
    words = Words(
        title="Said and true",
        description=f"On the {name} points the calibration error is {errors}.",
    )
    plot = line_plot(
        lines,
        Axis(label="probability said", low=0.0, high=1.0),
        Axis(label="share that is relevant", low=0.0, high=1.0),
        words,
    )
    caption = f"The best {ECE_AT} labels of each point in fifteen bins. {words.description}"
    rows = [
        [title, f"{said:.3f}", f"{true:.3f}", f"{count:,}"]
        for title, one in measured.items()
        for said, true, count in zip(one.said, one.true, one.counts.tolist(), strict=True)
        if count
    ]
    return figure(
        "reliability", words.title, plot, caption, table(["", "said", "true", "labels"], rows)
    )


def _line(title: str, one: Reliability) -> Line:
    there = one.counts > 0
    return Line(name=title, xs=one.said[there], ys=one.true[there])


def threshold_figure(known: Probabilities) -> Markup:
    """Return what decisions at each threshold were worth on the held-out points."""
    best = known.threshold("f1")
    place = int(np.searchsorted(known.thresholds, best - 1e-9))
    curves = {"precision": known.precision, "recall": known.recall, "F1": known.f1}
    told = ", ".join(f"{name} {100 * one[place]:.1f}%" for name, one in curves.items())
    words = Words(title="Decisions by threshold", description=f"F1 is best at {best:g}: {told}.")
    plot = line_plot(
        [Line(name=name, xs=known.thresholds, ys=100 * one) for name, one in curves.items()],
        Axis(label="threshold of probability", low=0.0, high=1.0),
        Axis(label="on held-out points, %", low=0.0, high=100.0),
        words,
        rules={best: "best F1"},
    )
    rows = [
        [f"{known.thresholds[i]:.2f}", *(f"{100 * one[i]:.1f}" for one in curves.values())]
        for i in range(0, len(known.thresholds), 10)
    ]
    caption = f"Over all pairs of a point and a label. {words.description}"
    return figure("thresholds", words.title, plot, caption, table(["threshold", *curves], rows))
