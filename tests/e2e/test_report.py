"""``elias report``: one page, whole and harmless, with the numbers of the run."""

import json
import re
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest

from e2e.commands import SMALL, elias
from elias import Elias, load_corpus
from elias.report import statistics
from elias.report.report import COMPONENTS, write_report
from elias.report.statistics import (
    clusters_per_label,
    graph_edges,
    ranked_edge_scores,
    recalls,
    stage1_edges_above,
)

HTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"
SECTIONS = [
    *("metrics", "learning", "recall", "probabilities", "index", "embeddings", "examples"),
    *("data", "times", "configuration"),
]
FIGURES = {
    *("learning-loss", "learning-validation", "fig-5-curve", "fig-5-deciles", "fig-5-found"),
    *("reliability", "thresholds"),
    *("fig-4", "fig-3", "fig-3-histogram", "fig-7a", "fig-7b", "cluster-labels"),
    "cluster-points",
}
NASTY = "<script>alert('x')</script>"


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    monkeypatch.setattr(statistics, "N_PANELS", 1)


def parsed(path):
    """Read a page as strictly as XML is read."""
    return ElementTree.fromstring(path.read_text(encoding="utf8").removeprefix("<!DOCTYPE html>"))


def ids(tree, tag):
    return [element.get("id") for element in tree.iter(f"{HTML}{tag}") if element.get("id")]


def find(tree, key):
    return next(element for element in tree.iter() if element.get("id") == key)


def cells(tree, key, *, table=0):
    """The cells of a table within the element of this id, row by row."""
    element = list(find(tree, key).iter(f"{HTML}table"))[table]
    rows = element.find(f"{HTML}tbody")
    return [["".join(cell.itertext()).strip() for cell in row] for row in rows]


@pytest.fixture(scope="module")
def page(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "N_PANELS", 1)
        result = elias("report", run, "--device", "cpu")
    assert result.code == 0, result.err
    assert result.out == f"{run / 'report.html'}\n"
    return parsed(run / "report.html")


def test_every_section_and_every_figure_is_there_once(page):
    assert ids(page, "section") == SECTIONS
    assert sorted(ids(page, "figure")) == sorted(FIGURES)
    every = [element.get("id") for element in page.iter() if element.get("id")]
    assert len(every) == len(set(every))
    links = [link.get("href") for link in page.iter(f"{HTML}a")]
    assert links == [f"#{key}" for key in SECTIONS]


def test_figures_have_titles_and_descriptions(page):
    pictures = list(page.iter(f"{SVG}svg"))

    assert len(pictures) == len(FIGURES) + sum(
        len(list(find(page, key).iter(f"{SVG}svg"))) for key in ("fig-8", "fig-9")
    )
    assert all(picture[0].text and picture[1].text for picture in pictures)


def test_the_page_is_self_contained(run, page):
    content = (run / "report.html").read_text(encoding="utf8")

    addresses = set(re.findall(r"https?://[^\"\s]+", content))
    assert addresses == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    assert not [
        element.tag for element in page.iter() if element.tag.endswith(("script", "link", "img"))
    ]
    assert "url(" not in content
    assert "prefers-color-scheme: dark" in content


def test_the_metrics_are_those_that_the_run_recorded(run, page):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    stages = [r for r in map(json.loads, lines) if r["event"] == "stage"]

    rows = cells(page, "metrics")

    assert rows == [
        [
            COMPONENTS.get(stage["stage"], stage["stage"]),
            *(f"{v:.2f}" for v in stage["test"].values()),
        ]
        for stage in stages
    ]


def test_the_numbers_of_the_figures_are_those_computed(run, corpus_folder, page):
    model, corpus = Elias.from_pretrained(run, device="cpu"), load_corpus(corpus_folder)
    frequencies, edges = corpus.label_frequencies(), graph_edges(model.model.graph)
    partition = np.load(run / "partition.npy")

    of_stage2, *_, of_all = (
        recalls(model.predict_split(corpus.test, component=name), corpus.test.labels, frequencies)
        for name in model.components
    )
    means = clusters_per_label(edges, frequencies, (0.1, 0.25, 0.5))
    stage1 = stage1_edges_above(edges, partition)
    mean = ranked_edge_scores(edges).mean(axis=0)

    for column, element in ((1, of_stage2), (-1, of_all)):
        assert [float(row[column]) for row in cells(page, "fig-5-curve")] == pytest.approx(
            element.curve.tolist(), abs=0.005
        )
        assert [float(row[column]) for row in cells(page, "fig-5-deciles")] == pytest.approx(
            element.by_decile.tolist(), rel=5e-3
        )
    assert np.array(cells(page, "fig-7b"))[:, 1:].astype(float) == pytest.approx(
        np.stack(list(means.values()), axis=1), rel=5e-3
    )
    by_threshold = {row[0]: float(row[1]) for row in cells(page, "fig-7a")}
    assert by_threshold["0.25"] == pytest.approx(100 * stage1[25], rel=5e-3)
    assert float(cells(page, "fig-3")[0][1]) == pytest.approx(mean[0], rel=5e-3)


def test_twenty_points_are_shown_with_what_predict_says_of_them(run, corpus_folder, page):
    model, corpus = Elias.from_pretrained(run, device="cpu"), load_corpus(corpus_folder)
    articles = list(find(page, "examples").iter(f"{HTML}article"))

    assert len(articles) == 20
    for article in articles:
        text = article.find(f"{HTML}blockquote").text
        row = list(corpus.test.texts).index(text)
        best = model.predict([text], top_k=1)[0]
        first = next(article.iter(f"{HTML}li"))
        shown = [span.text for span in first.iter(f"{HTML}span")]
        true = corpus.test.labels.indices[slice(*corpus.test.labels.indptr[row : row + 2])]
        assert f"{best.probabilities[0]:.0%}" in shown
        assert ("✓" in shown) == (best.ids[0] in true)


def test_the_configuration_and_the_times_are_the_runs(run, page):
    config = json.loads((run / "config.json").read_text())
    keys = dict(cells(page, "configuration"))

    assert keys["index.n_clusters"] == str(config["index"]["n_clusters"])
    assert keys["stages.stage2.epochs"] == "3"
    steps = [row[0] for row in cells(page, "times")]
    assert {"clusters", "stage1", "stage2", "all"} <= set(steps)


@pytest.mark.usefixtures("page")
def test_the_same_run_gives_the_same_page(run, tmp_path):
    again = write_report(run, out=tmp_path / "again.html", device="cpu")

    assert again.read_text() == (run / "report.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["again.html"]


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    """A run on a table whose texts, labels and columns look like markup."""
    folder = tmp_path_factory.mktemp("nasty")
    rows = "".join(
        f'"{NASTY} word{i % 7} ""quoted"" & so on","{NASTY}{i % 6}/b & c {i % 4}"\n'
        for i in range(120)
    )
    (folder / "points.csv").write_text(f"body,marks\n{rows}")
    result = elias(
        *("train", folder / "points.csv", "--text", "body", "--labels", "marks"),
        *("--separator", "/", "--out", folder / "run", *SMALL),
    )
    assert result.code == 0, result.err
    return folder


def test_texts_and_labels_that_look_like_markup_are_harmless(nasty):
    result = elias("report", nasty / "run")  # with the columns that the run remembers

    assert result.code == 0, result.err
    tree = parsed(nasty / "run" / "report.html")
    assert not [element for element in tree.iter() if element.tag.endswith("script")]
    assert not [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
    texts = [quote.text for quote in tree.iter(f"{HTML}blockquote")]
    assert all(text.startswith(NASTY) for text in texts)


def test_a_corpus_that_was_moved_is_one_line_with_the_remedy(nasty, tmp_path):
    moved = shutil.copytree(nasty, tmp_path / "there")
    record = (moved / "run" / "metrics.jsonl").read_text()
    (moved / "run" / "metrics.jsonl").write_text(
        record.replace(str(nasty / "points.csv"), str(tmp_path / "gone.csv"))
    )

    result = elias("report", moved / "run")
    given = elias("report", moved / "run", moved / "points.csv", "--out", tmp_path / "page.html")

    assert result.code == 2
    assert result.err.startswith(f"error: {tmp_path / 'gone.csv'}: the corpus of ")
    assert "elias report RUN DATA" in result.err
    assert result.err.count("\n") == 1
    assert given.code == 0, given.err


def test_another_corpus_is_refused(nasty, corpus_folder):
    result = elias("report", nasty / "run", corpus_folder, "--text", "x")

    assert result.code == 2
    assert result.err.count("\n") == 1


def test_a_corpus_with_other_points_is_refused(run, tmp_path):
    result = elias("data", "synthetic", tmp_path / "other", "--points", 90, "--labels", 120)
    assert result.code == 0

    result = elias("report", run, tmp_path / "other")

    assert result.code == 2
    assert "but the run had 400 with" in result.err


def test_a_model_without_a_run_needs_a_corpus_and_an_output_path(run, corpus_folder, tmp_path):
    model = shutil.copytree(run / "model", tmp_path / "mine")
    page = tmp_path / "page.html"

    nowhere = elias("report", model, corpus_folder)
    without = elias("report", model, "--out", page)
    written = elias("report", model, corpus_folder, "--out", page)

    assert (nowhere.code, without.code, written.code) == (2, 2, 0), written.err
    assert "--out" in nowhere.err
    assert "does not record the path of the corpus" in without.err
    missing = {"learning-loss", "learning-validation", "fig-7a"}
    assert set(ids(parsed(page), "figure")) == FIGURES - missing


@pytest.mark.parametrize("out", ["", "nowhere/page.html"])
def test_an_output_path_that_cannot_be_written_is_refused_before_the_work(run, tmp_path, out):
    result = elias("report", run, "--out", tmp_path / out)

    assert result.code == 2
    assert "--out" in result.err


def test_a_fixed_graph_has_a_report_too(corpus_folder, tmp_path):
    run = tmp_path / "fixed"
    fixed = ("--set", "stages.stage2.learn_graph=false", "--set", "eval.validation_size=0")
    assert elias("train", corpus_folder, "--out", run, *SMALL, *fixed).code == 0

    result = elias("report", run)

    assert result.code == 0, result.err
    tree = parsed(run / "report.html")
    assert "The graph is fixed" in "".join(find(tree, "index").itertext())
    assert not {"fig-3", "fig-7a", "fig-7b", "learning-validation"} & set(ids(tree, "figure"))


def test_one_vs_all_is_explained_and_reported_without_an_index(corpus_folder, tmp_path):
    run = tmp_path / "all"
    result = elias(
        *("train", corpus_folder, "--out", run, "--device", "cpu", "--set", "index.kind=all"),
        *("--set", "encoder.dim=16", "--set", "stages.one-vs-all.epochs=2"),
    )
    assert result.code == 0, result.err

    clusters = np.arange(load_corpus(corpus_folder).n_labels) % 4
    np.save(run / "partition.npy", clusters)  # as a stage 2 leaves it that was worse than stage 1

    explained = elias("explain", run, "some words", "--json", "--device", "cpu")
    result = elias("report", run, "--device", "cpu")

    labels = json.loads(explained.out)["labels"]
    assert [label["paths"] for label in labels] == [[]] * 5  # there is no index
    assert all(label["path_score"] == 1 for label in labels)
    assert [label["p"] for label in labels] == pytest.approx(
        [label["classifier_score"] for label in labels]
    )
    assert result.code == 0, result.err
    assert ids(parsed(run / "report.html"), "section") == SECTIONS


def test_probabilities_are_shown_with_the_share_of_relevant_labels(run, page):
    model = Elias.from_pretrained(run, device="cpu")
    errors = model.metadata["probabilities"]["errors"]
    rows = cells(page, "probabilities")

    assert rows[:2] == [
        [name, f"{one['before']:.2f}", f"{one['after']:.2f}"] for name, one in errors.items()
    ]
    by_threshold = {row[0]: row[1:] for row in cells(page, "thresholds")}
    assert float(by_threshold["0.5"][0]) == pytest.approx(
        100 * model.probabilities.precision[100], rel=1e-3
    )
    assert sum(int(row[3]) for row in cells(page, "reliability")) == 2 * 5 * 100


def test_a_model_without_probabilities_has_a_section_that_says_so(run, corpus_folder, tmp_path):
    model = Elias.from_pretrained(run, device="cpu")
    model.probabilities = None
    folder = model.save_pretrained(tmp_path / "model")

    result = elias("report", folder, corpus_folder, "--out", tmp_path / "r.html", "--device", "cpu")

    assert result.code == 0, result.err
    tree = parsed(tmp_path / "r.html")
    assert ids(tree, "section") == SECTIONS
    assert not {"reliability", "thresholds"} & set(ids(tree, "figure"))


def test_an_ensemble_has_a_row_and_a_curve_beside_its_first_member(corpus_folder, tmp_path):
    run = tmp_path / "several"
    members = ("--set", "ensemble.members=2", "--set", "rerank.enabled=false")
    assert elias("train", corpus_folder, "--out", run, *SMALL, *members).code == 0

    result = elias("report", run, "--device", "cpu")

    assert result.code == 0, result.err
    tree = parsed(run / "report.html")
    assert [row[0] for row in cells(tree, "metrics")] == ["stage1", "stage2", "ensemble"]
    recorded = Elias.from_pretrained(run, device="cpu").metadata["metrics"]
    assert [float(cell) for cell in cells(tree, "fig-5-curve")[-1][1:]] == pytest.approx(
        [recorded[name]["test"]["R@100"] for name in ("stage2", "ensemble")], abs=0.01
    )
    epochs = [row[0] for row in cells(tree, "learning-loss")]
    assert epochs == ["1", "2", "3", "4"]


def test_without_test_points_the_held_out_points_are_used(tmp_path):
    table = tmp_path / "points.csv"
    rows = "".join(f"text {i % 17} of {i % 5},label {i % 3}\n" for i in range(200))
    table.write_text(f"text,labels\n{rows}")
    assert elias("train", table, "--test-size", 0, "--out", tmp_path / "run", *SMALL).code == 0

    result = elias("report", tmp_path / "run")

    assert result.code == 0, result.err
    words = "".join(find(parsed(tmp_path / "run" / "report.html"), "recall").itertext())
    assert "validation points" in words
