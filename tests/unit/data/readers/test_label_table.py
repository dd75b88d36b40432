"""Tests of label tables: `load_label_table` and their use by `load_corpus`."""

import json

import pytest

from elias import load_corpus, load_label_table
from elias.data import convert
from elias.errors import DataError

ROWS = [
    ("u:1", "Fish", ("cod", "hake, silver"), "Animals in water."),
    ("u:2", "Law", (), ""),
    ("u:3", "Wine", ("claret",), ""),
]


BROADER = ("u:1", "u:9")


def write_table(path, kind):
    columns = ("URI", "prefLabel", "alt_label", "Definition", "broader")
    if kind == "jsonl":
        lines = [json.dumps(dict(zip(columns, (*row, BROADER), strict=True))) for row in ROWS]
    else:
        mark = "\t" if kind == "tsv" else ","
        lines = [mark.join(columns)]
        for key, name, synonyms, text in ROWS:
            lines.append(mark.join([key, name, f'"{"|".join(synonyms)}"', text, "|".join(BROADER)]))
    path.write_text("\n".join(lines) + "\n", encoding="utf8")
    return path


@pytest.fixture
def corpus_folder(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_text("text,labels\nherring quotas,u:1;Law\nstew,other\n")
    return folder


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_columns_are_recognised_in_every_format(tmp_path, kind):
    table = load_label_table(write_table(tmp_path / f"table.{kind}", kind))

    expected = [(name, key, synonyms, text, BROADER) for key, name, synonyms, text in ROWS]
    assert list(table.rows()) == expected


def test_a_table_in_memory_is_read():
    rows = [{"id": 7, "name": "Fish", "synonyms": ["cod"]}, {"id": 8, "name": "Law"}]

    table = load_label_table(rows)

    assert (table.ids, table.synonyms) == (("7", "8"), (("cod",), ()))


def test_the_first_row_of_a_table_in_memory_need_not_have_all_columns():
    table = load_label_table([{"name": "Law"}, {"name": "Fish", "synonyms": ["cod"]}])

    assert table.synonyms == ((), ("cod",))


def test_lines_of_names_are_a_table(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("Aged, 80 and over\nLaw\n\n")

    assert list(load_label_table(path)) == ["Aged, 80 and over", "Law"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("size,colour\n1,red\n", r"no column of label names among 'size', 'colour'"),
        ("id,name\n1,fish\n2,\n", r"t\.csv:3: the label has no name"),
        ("id,name\n1,fish\n1,law\n", r"t\.csv:3: id '1' is also in row 2"),
    ],
)
def test_an_unusable_table_is_an_error_with_its_line(tmp_path, content, problem):
    path = tmp_path / "t.csv"
    path.write_text(content)

    with pytest.raises(DataError, match=problem):
        load_label_table(path)


def test_a_missing_table_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_label_table(tmp_path / "none.csv")


def test_a_folder_is_not_a_table(tmp_path):
    with pytest.raises(DataError, match="is a folder; give a file"):
        load_label_table(tmp_path)


@pytest.mark.parametrize("suffix", ["txt", "tsv", "csv", "ttl"])
def test_an_empty_table_is_an_error(tmp_path, suffix):
    path = tmp_path / f"empty.{suffix}"
    path.write_text("\n")

    with pytest.raises(DataError, match="is empty; give a file with a row for each label"):
        load_label_table(path)


def test_a_corpus_takes_names_and_ids_from_a_table(corpus_folder, tmp_path):
    plain = load_corpus(corpus_folder)

    corpus = load_corpus(corpus_folder, label_table=write_table(tmp_path / "t.csv", "csv"))

    assert plain.label_names == ["Law", "other", "u:1"]
    assert list(corpus.label_names) == ["Law", "other", "Fish", "Wine"]
    assert corpus.label_table.ids == ("u:2", "", "u:1", "u:3")
    assert (corpus.train.labels[:, :3] != plain.train.labels).nnz == 0
    assert corpus.label_frequencies().tolist() == [1, 1, 1, 0]
    assert "1 labels of the points are not in the table" in corpus.notes["label table"]


def test_a_table_in_the_folder_is_found(corpus_folder):
    write_table(corpus_folder / "labels.jsonl", "jsonl")

    assert "Fish" in load_corpus(corpus_folder).label_names


def test_a_table_of_other_labels_is_refused(corpus_folder):
    with pytest.raises(DataError, match="no label matches the label table by id or name"):
        load_corpus(corpus_folder, label_table=[{"id": "x", "name": "y"}])


def test_the_fingerprint_depends_on_descriptions(corpus_folder):
    names = [{"name": name} for name in ("Law", "other", "u:1")]
    described = [{**row, "description": "text"} for row in names]

    plain, named, full = (
        load_corpus(corpus_folder, label_table=table).fingerprint()
        for table in (None, names, described)
    )

    assert plain == named != full


@pytest.mark.parametrize("on_disk", ["on", "off"])
def test_a_converted_folder_keeps_the_table(corpus_folder, tmp_path, on_disk):
    table = write_table(tmp_path / "t.csv", "csv")
    corpus = load_corpus(corpus_folder, label_table=table, on_disk=on_disk)

    convert(corpus, tmp_path / "converted")

    again = load_corpus(tmp_path / "converted")
    assert list(again.label_table.rows()) == list(corpus.label_table.rows())
    assert (again.train.labels != corpus.train.labels).nnz == 0


def test_points_with_ids_align_with_a_model_by_id(corpus_folder, tmp_path):
    model_labels = load_label_table(write_table(tmp_path / "t.csv", "csv"))

    aligned = load_corpus(corpus_folder).align_labels(model_labels)

    assert list(aligned.label_names) == ["Fish", "Law", "Wine", "other"]
    assert aligned.train.labels.toarray().tolist() == [[1, 1, 0, 0], [0, 0, 0, 1]]
