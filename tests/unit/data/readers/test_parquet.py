"""Tables in memory are read like files: data frames, Arrow tables, `datasets`, lists."""

from types import SimpleNamespace

import pyarrow
import pytest

from elias import load_corpus
from elias.errors import DataError

ROWS = [
    {"title": "cod quotas", "overview": "fish in the sea", "genres": ["fish", "law"]},
    {"title": "wine labels", "overview": None, "genres": ["law"]},
    {"title": "oil rigs", "overview": "off the coast", "genres": []},
]
TEXTS = ["cod quotas fish in the sea", "wine labels", "oil rigs off the coast"]


def names_of(corpus, split="train"):
    rows = corpus.split(split).labels
    return [[corpus.label_names[i] for i in row.indices] for row in rows]


def check(corpus):
    assert corpus.train.texts == TEXTS
    assert names_of(corpus) == [["fish", "law"], ["law"], []]
    assert corpus.source is None
    assert corpus.reading["text"] == "title,overview"


def test_a_pandas_frame_is_read():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS, index=[7, 7, 9])

    check(load_corpus(frame, text=["title", "overview"], labels="genres", test_size=0))


def test_a_frame_with_separated_labels_sets_and_mixed_cells_is_read():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"text": ["a", 3, None], "tags": ["x|y", "y", None], "sets": [{"b", "a"}, {"a"}, None]}
    )

    strings = load_corpus(frame, test_size=0)
    sets = load_corpus(frame, labels="sets", test_size=0)

    assert strings.train.texts == ["a", "3", ""]
    assert names_of(strings) == [["x", "y"], ["y"], []]
    assert names_of(sets) == [["a", "b"], ["a"], []]


@pytest.mark.parametrize(
    "table",
    [pyarrow.Table.from_pylist(ROWS), ROWS, {key: [r[key] for r in ROWS] for key in ROWS[0]}],
    ids=["arrow", "dictionaries", "columns"],
)
def test_arrow_tables_dictionaries_and_columns_are_read(table):
    check(load_corpus(table, text=["title", "overview"], labels="genres", test_size=0))


def test_columns_of_0_and_1_are_labels():
    table = {"text": ["a cod", "a wine", "both"], "fish": [1, 0, 1], "drink": [0, 1, 1]}

    corpus = load_corpus(table, text="text", labels=["fish", "drink"], test_size=0)

    assert [sorted(names) for names in names_of(corpus)] == [["fish"], ["drink"], ["drink", "fish"]]


def test_a_table_of_another_package_is_read_through_its_arrow_stream():
    class Frame:
        columns = ("title", "overview", "genres")

        def __arrow_c_stream__(self, schema=None):
            return pyarrow.Table.from_pylist(ROWS).__arrow_c_stream__(schema)

    check(load_corpus(Frame(), text=["title", "overview"], labels="genres", test_size=0))


def test_a_mapping_of_splits_keeps_them():
    corpus = load_corpus({"train": ROWS, "valid": ROWS[:1]}, labels="genres")

    assert {name: len(split) for name, split in corpus.splits.items()} == {
        "train": 3,
        "validation": 1,
    }


def test_a_data_set_of_the_hub_has_class_names_as_labels():
    classes = SimpleNamespace(names=["joy", "fear"])

    class Dataset:
        def __init__(self):
            self.features = {"text": None, "labels": SimpleNamespace(feature=classes)}
            self.features["main"] = classes

        def with_format(self, kind):
            assert kind == "arrow"
            return self

        def __getitem__(self, rows):
            assert rows == slice(None)
            return pyarrow.table({"text": ["a", "b"], "labels": [[0, 1], []], "main": [1, None]})

    Dataset.__module__ = "datasets.arrow_dataset"

    many = load_corpus(Dataset(), test_size=0)
    one = load_corpus(Dataset(), labels="main", test_size=0)

    assert names_of(many) == [["fear", "joy"], []]
    assert names_of(one) == [["fear"], []]


def test_lists_of_texts_and_labels_are_read():
    corpus = load_corpus(
        texts=["a", "b", "c", "d"], labels=[["x", "y"], "North Sea, oil|gas", [], {3}], test_size=0
    )

    assert corpus.train.texts == ["a", "b", "c", "d"]
    assert names_of(corpus) == [["x", "y"], ["North Sea, oil|gas"], [], ["3"]]
    assert "separator" not in corpus.reading


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "pass either a path or a table, or texts= and labels="),
        ({"texts": ["a"]}, "labels= must be a list"),
        ({"texts": "a", "labels": ["x"]}, "texts= is a single text"),
        ({"texts": [], "labels": []}, "texts= is empty"),
        (
            {"texts": ["a"], "labels": ["x", "y"]},
            "texts= has 1 texts, but labels= has labels for 2",
        ),
        ({"texts": ["a", 1], "labels": ["x", "y"]}, r"texts\[1\] is int, not a string"),
        ({"source": 3}, "cannot read a corpus from int; give a path, a DataFrame"),
        (
            {"source": ROWS, "labels": [["x"]]},
            "with a file or table, labels= must name columns; to",
        ),
        ({"source": pyarrow.array(["a"])}, "cannot read a corpus from StringArray"),
        ({"source": pyarrow.chunked_array([["a"]])}, "cannot read a corpus from ChunkedArray"),
        ({"source": ROWS, "labels": "genre"}, "^list: no column 'genre' among .*; did you mean"),
        ({"source": {"text": ["a"], "labels": [[{1: 2}]]}}, "dict: cannot be converted to Arrow"),
        ({"source": "a.csv", "labels": [["x"]]}, "labels= must name columns"),
        ({"source": "a.csv", "texts": ["x"]}, "pass either a path or a table, or texts="),
    ],
)
def test_errors_name_the_argument(arguments, problem):
    with pytest.raises(DataError, match=problem):
        load_corpus(**arguments)
