"""Label cells: recognised by their form, and by how labels repeat across cells."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from elias.data import load_corpus
from elias.errors import DataError

TAGS = ["python", "pandas", "numpy", "django", "flask", "sql", "regex", "excel", "html", "css"]
CITIES = ["New York City", "New Orleans", "San Francisco", "San Diego", "Paris", "Salt Lake City"]
HEADINGS = ["History of {}", "The law of {}", "{} in art", "Poems about {}", "{}"]
NOUNS = ["France", "the sea", "old England", "Rome", "trade", "wine", "ships", "war", "Spain"]


def read(path, cells, **options):
    rows = [{"text": f"text {number}", "labels": cell} for number, cell in enumerate(cells)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_corpus(path, test_size=0, **options)


def tag_lists(n=60, most=4):
    rng = random.Random(0)
    return [rng.sample(TAGS, rng.randint(1, most)) for _ in range(n)]


@pytest.mark.parametrize(
    ("form", "separator"),
    [
        (lambda tags: "".join(f"<{tag}>" for tag in tags), "><"),
        (lambda tags: " ".join(f"#{tag}" for tag in tags), "#"),
        (" / ".join, " / "),
        (" ".join, " "),
    ],
)
def test_the_form_of_cells_is_recognised_reported_and_recorded(tmp_path, form, separator):
    lists = tag_lists()

    corpus = read(tmp_path / "a.jsonl", map(form, lists))

    assert corpus.label_names == sorted(TAGS)
    frequencies = Counter(tag for tags in lists for tag in tags)
    assert corpus.label_frequencies().tolist() == [frequencies[tag] for tag in sorted(TAGS)]
    assert corpus.notes["labels"].endswith(f": split at {separator!r}")
    assert corpus.reading["separator"] == separator
    again = read(tmp_path / "b.jsonl", [form(["sql"])], separator=separator)
    assert again.label_names == ["sql"]


@pytest.mark.parametrize("most", [2, 6])
@pytest.mark.parametrize("n", [60, 3000])
def test_tags_between_spaces_are_labels_whether_few_or_many_combinations_occur(tmp_path, n, most):
    corpus = read(tmp_path / "a.jsonl", map(" ".join, tag_lists(n, most)))

    assert corpus.label_names == sorted(TAGS)


@pytest.mark.parametrize(
    "cells",
    [
        CITIES * 20,
        [form.format(noun) for form in HEADINGS for noun in NOUNS],
        [form.format(noun) for form in HEADINGS for noun in NOUNS] * 3,
        ["World News", "World", "News", "Sports", "Sports News", "Politics"] * 50,
        [f"Person{i} Name{i % 7}" for i in range(90)],
        ["Arts / Crafts", "Health / Fitness", "Beauty / Fitness", "Garden"] * 9,
        [f"Sports / Game {i} / Club {i % 40}" for i in range(80)],
        ["AC/DC", "TCP/IP", "I/O"] * 9,
        ["C#", "F#", "C++"] * 9,
        ["x < y", "<b> tag", "a > b"] * 9,
        ["new york"],
        ["Portland, Oregon", "Salem, Oregon", "Austin, Texas", "Boston"] * 5,
        ["Portland, Oregon", "Austin, Texas"] * 5,
        ["Antibodies, Monoclonal", "Antibodies", "Antibodies, Viral", "Child, Preschool"] * 5,
        [*["Paris", "Rome", "Oslo"] * 9, "Washington, D.C."],
    ],
)
def test_names_of_several_words_stay_whole(tmp_path, cells):
    corpus = read(tmp_path / "a.jsonl", cells)

    assert corpus.label_names == sorted(set(cells))
    assert "separator" not in corpus.reading


@pytest.mark.parametrize("order", [sorted, list])
@pytest.mark.parametrize("mark", [" ", " / "])
def test_tags_that_are_never_alone_are_recognised_by_their_order(tmp_path, order, mark):
    cells = [mark.join(order(tags)) for tags in tag_lists(200, 3) if len(tags) > 1]

    assert read(tmp_path / "a.jsonl", cells).label_names == sorted(TAGS)


@pytest.mark.parametrize(
    "cells",
    [
        ["fish, trade", "wine"],
        ["3,27", "3,27", "3,27", "14,27"],
        ["Drama, Comedy", "Drama, Comedy", "Comedy", "Crime, Drama", "Crime, Drama"],
        [f"{genre}, {decade}" for genre in "ABCDE" for decade in "12345"] * 3,
        ["a, b, c, d, e", "a, b, f, g, h"] * 3,
    ],
)
def test_commas_between_labels_still_separate_them(tmp_path, cells):
    labels = {part.strip() for cell in cells for part in cell.split(",")}

    assert set(read(tmp_path / "a.jsonl", cells).label_names) == labels


def test_a_few_commas_do_not_hide_the_spaces(tmp_path):
    cells = [*map(" ".join, tag_lists(400)), "sql, html"]

    corpus = read(tmp_path / "a.jsonl", cells)

    assert corpus.reading["separator"] == " "


def test_a_given_separator_beats_the_form(tmp_path):
    cells = ["<a><b>", "<c>"]

    assert read(tmp_path / "a.jsonl", cells, separator="").label_names == ["<a><b>", "<c>"]
    assert read(tmp_path / "a.jsonl", cells, separator="><").label_names == ["a", "b", "c"]


OBJECTS = [{"id": 28, "name": "Action"}, {"id": 12, "name": "Drama"}]


@pytest.mark.parametrize("form", [list, json.dumps, str])
def test_objects_are_labels_by_their_name(tmp_path, form):
    corpus = read(tmp_path / "a.jsonl", ["[]", form(OBJECTS), form(OBJECTS[:1])])

    assert corpus.label_names == ["Action", "Drama"]
    assert corpus.notes["labels"] == "column 'labels', the 'name' of each object"


def test_an_object_without_the_key_of_the_first_is_refused(tmp_path):
    cells = [OBJECTS, [{"label": "Drama"}]]

    with pytest.raises(DataError, match=r"a\.jsonl:2: .* is not a label; an object needs a 'name'"):
        read(tmp_path / "a.jsonl", cells)
