"""Labels in several clusters and in one, as small pictures side by side (Fig. 8–9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elias.analysis.axes import colour
from elias.analysis.clouds import FEWEST_POINTS, LIKE_FREQUENCY, MOST_CLUSTERS
from elias.analysis.figures import ASSIGNED
from elias.analysis.markup import Markup, element
from elias.analysis.page import lines, number, paragraph
from elias.analysis.plots import Dots, Words, scatter_plot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elias.analysis.clouds import Clouds, Panel

OWN = 4
"""The colour of a label's own points: red, as in the paper."""
_OTHERS = (0, 2, 3, 1, 5)


def cloud_figures(clouds: Clouds, name: Callable[[int], str]) -> list[Markup]:
    """Return Figures 8 and 9, and what the spread of all such labels says of them."""
    own = element("span", class_="dot", style=f"background: {colour(OWN)}")
    key = paragraph(
        own,
        " the label's own training points; every other colour is a cluster it is assigned to, "
        f"by its training points with ŝ_c above {ASSIGNED}.",
    )
    several = f"Labels in 2 to {MOST_CLUSTERS} clusters (Fig. 8)"
    return [
        key,
        _figure("fig-8", several, clouds.several, name),
        _figure("fig-9", "Labels in one cluster (Fig. 9)", clouds.one, name),
        spread_words(clouds),
    ]


def _figure(key: str, title: str, panels: Sequence[Panel], name: Callable[[int], str]) -> Markup:
    heading = element("h3", title)
    if not panels:
        told = f"No label with {FEWEST_POINTS} training points or more is of this kind."
        return element("div", heading, paragraph(told, soft=True), id=key)
    drawn = [_panel(panel, name(panel.label)) for panel in panels]
    return element("div", heading, element("div", drawn, class_="panels"), id=key)


def _panel(panel: Panel, name: str) -> Markup:
    n_clusters = len(panel.clusters)
    told = f"{len(panel.own):,} points; {n_clusters} cluster{'s' if n_clusters > 1 else ''}"
    words = Words(title=f"t-SNE of the training points of {name}", description=told)
    groups = [
        Dots(name=f"cluster {c}", points=points, series=_OTHERS[i], radius=4.0, opacity=0.6)
        for i, (c, points) in enumerate(zip(panel.clusters, panel.others, strict=True))
    ]
    groups.append(Dots(name=name, points=panel.own, series=OWN, radius=6.0, opacity=0.95))
    caption = element("figcaption", element("strong", name), element("br"), told)
    return element("figure", scatter_plot(groups, words), caption)


def spread_words(clouds: Clouds) -> Markup:
    """Say whether points of labels in several clusters are spread more widely."""
    several, one = clouds.spread_several, clouds.spread_one
    low, high = LIKE_FREQUENCY
    if several is None or one is None:
        return paragraph(
            f"Too few labels with {low} to {high} points to compare their spread.", soft=True
        )
    verdict = "more widely" if several > one else "no more widely"
    return lines(
        paragraph(
            f"Over all labels with {low} to {high} points in the sample, those in several clusters "
            f"({clouds.n_several:,} labels) spread {verdict} than those in one "
            f"({clouds.n_one:,}): {number(several)} against {number(one)}, where 0 means that all "
            "embeddings point the same way and 1 that they cancel out. Clusters are those with "
            f"ŝ above {ASSIGNED}."
        )
    )
