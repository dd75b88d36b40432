"""Tables: JSON lines, CSV, TSV, Parquet."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elias.data import load_corpus
from elias.errors import DataError


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return path


def jsonl(path, *rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def labels_of(corpus, split="train"):
    matrix = corpus.splits[split].labels
    return [[corpus.label_names[i] for i in row.indices] for row in matrix]


def load_all(path, **options):
    return load_corpus(path, test_size=0, **options)


def test_json_lines_hold_lists_of_names(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        {"text": "cod quotas", "labels": ["law", "fish"]},
        {"text": "wine", "labels": []},
        {"text": "bread"},
        {"text": "rye", "labels": None},
    )

    corpus = load_all(path)

    assert corpus.format == "jsonl"
    assert corpus.train.texts == ["cod quotas", "wine", "bread", "rye"]
    assert corpus.label_names == ["fish", "law"]
    assert labels_of(corpus) == [["fish", "law"], [], [], []]
    assert corpus.train.labels.dtype == np.float32


def test_the_content_decides_and_not_the_name(tmp_path):
    rows = '{"text": "a", "labels": ["x"]}\n'
    as_text = write(tmp_path / "a.txt", rows)
    packed = write(tmp_path / "b.csv", gzip.compress(rows.encode(), mtime=0))
    table = write(tmp_path / "c.txt", "text\tlabels\na\tx\n")

    formats = [load_all(path).format for path in (as_text, packed, table)]

    assert formats == ["jsonl", "jsonl", "tsv"]


def test_a_file_may_be_one_json_list(tmp_path):
    path = write(tmp_path / "a.json", '[\n {"text": "a", "labels": "x"},\n {"text": "b"}\n]\n')

    assert load_all(path).train.texts == ["a", "b"]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("Infant, Newborn;Humans", ["Humans", "Infant, Newborn"]),
        ("b|a", ["a", "b"]),
        ("b, a", ["a", "b"]),
        ('["b, c", "a"]', ["a", "b, c"]),
        ("['b, c', 'a']", ["a", "b, c"]),
        ("('b, c', 'a')", ["a", "b, c"]),
        ("{'b, c', 'a'}", ["a", "b, c"]),
        ("('b, c',)", ["b, c"]),
        ("""["b' 'c", "a"]""", ["a", "b' 'c"]),
        ("(R)-carvone (natural)", ["(R)-carvone (natural)"]),
        ("10 9", ["9", "10"]),
        ("new york", ["new york"]),
    ],
)
def test_the_separator_of_labels_is_found(tmp_path, cell, expected):
    quoted = cell.replace('"', '""')
    path = write(tmp_path / "a.csv", f'text,labels\nsome text,"{quoted}"\n')

    assert labels_of(load_all(path)) == [expected]


def test_a_rare_bar_does_not_beat_the_commas(tmp_path):
    rows = ["t,'a,b'"] * 99 + ["t,'a|b,c'"]
    path = write(tmp_path / "a.csv", "text,labels\n" + "\n".join(rows).replace("'", '"') + "\n")

    assert load_all(path).label_names == ["a", "a|b", "b", "c"]


def test_a_given_separator_is_used_and_an_empty_one_keeps_cells_whole(tmp_path):
    path = write(tmp_path / "a.csv", 'text,labels\nt,"a/b,c"\n')

    assert load_all(path, separator="/").label_names == ["a", "b,c"]
    assert load_all(path, separator="").label_names == ["a/b,c"]


def test_whole_numbers_are_sorted_as_numbers_and_keep_their_names(tmp_path):
    path = jsonl(tmp_path / "a", {"text": "a", "labels": [100142, 7]}, {"text": "b", "labels": 30})

    assert load_all(path).label_names == ["7", "30", "100142"]


def test_numbers_among_names_are_names(tmp_path):
    path = jsonl(tmp_path / "a", {"text": "a", "labels": [10, 9, "x"]})

    assert load_all(path).label_names == ["10", "9", "x"]


def test_a_label_given_twice_counts_once(tmp_path):
    path = jsonl(tmp_path / "a", {"text": "a", "labels": ["x", "x"]})

    assert load_all(path).train.labels.toarray().tolist() == [[1]]


def test_columns_are_found_by_common_names_in_any_case(tmp_path):
    path = write(tmp_path / "a.csv", "id,Title,Tags\n1,cod,fish\n")

    corpus = load_all(path)

    assert corpus.train.texts == ["cod"]
    assert corpus.label_names == ["fish"]
    assert corpus.notes["text"] == "column 'Title'"


def test_several_text_columns_are_joined_by_a_space(tmp_path):
    path = write(tmp_path / "a.csv", "title,abstract,mesh\ncod,about it,fish\n,only,law\n")

    corpus = load_all(path, text="title,abstract", labels="mesh")

    assert corpus.train.texts == ["cod about it", "only"]


def test_a_split_column_is_honoured(tmp_path):
    path = write(tmp_path / "a.csv", "text,labels,split\na,x,train\nb,x,test\nc,y,dev\nd,x,train\n")

    corpus = load_corpus(path)

    assert {name: list(split.texts) for name, split in corpus.splits.items()} == {
        "train": ["a", "d"],
        "validation": ["c"],
        "test": ["b"],
    }


def test_a_folder_has_a_file_for_each_split(tmp_path):
    write(tmp_path / "train.csv", "text,labels\na,x;y\n")
    write(tmp_path / "valid.csv", "text,labels\nb,y\n")
    write(tmp_path / "test.csv", "text,labels\nc,z\n")

    corpus = load_corpus(tmp_path)

    assert list(corpus.splits) == ["train", "validation", "test"]
    assert corpus.label_names == ["x", "y", "z"]
    assert labels_of(corpus, "test") == [["z"]]


def test_shards_are_read_as_one_split(tmp_path):
    for number in range(2):
        table = pa.table({"text": [f"t{number}"], "labels": [["x", "y"]]})
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "data" / f"train-0000{number}-of-00002.parquet")

    corpus = load_corpus(tmp_path)

    assert corpus.format == "parquet"
    assert corpus.train.texts == ["t0", "t1"]
    assert corpus.test is None


@pytest.mark.parametrize("name", ["train.jsonl", "points.jsonl"])
def test_labels_txt_in_a_folder_names_ids(tmp_path, name):
    jsonl(tmp_path / name, {"text": "a", "labels": [2, 0]})
    write(tmp_path / "labels.txt", "law\nfish\nlaw\n")

    corpus = load_all(tmp_path)

    assert corpus.label_names == ["law", "fish", "law"]
    assert corpus.train.labels.toarray().tolist() == [[1, 0, 1]]


def test_labels_txt_gives_the_order_of_names(tmp_path):
    jsonl(tmp_path / "train.jsonl", {"text": "a", "labels": ["a"]})
    write(tmp_path / "labels.txt", "z\na\n")

    assert load_all(tmp_path).train.labels.toarray().tolist() == [[0, 1]]


def test_parquet_holds_lists_strings_and_numbers(tmp_path):
    path = tmp_path / "a"
    pq.write_table(pa.table({"text": ["a", None], "tags": [["x", "y"], None]}), path)

    corpus = load_all(path)

    assert corpus.train.texts == ["a", ""]
    assert labels_of(corpus) == [["x", "y"], []]


def test_a_gzipped_parquet_file_is_read(tmp_path):
    plain, packed = tmp_path / "a.parquet", tmp_path / "b"
    pq.write_table(pa.table({"text": ["a"], "labels": [[1, 0]]}), plain)
    packed.write_bytes(gzip.compress(plain.read_bytes(), mtime=0))

    assert load_all(packed).label_names == ["0", "1"]


def test_a_tsv_file_need_not_quote(tmp_path):
    path = write(tmp_path / "a.tsv", 'text\tlabels\n"Quoted" start\tx\nan "open quote\ty\n')

    assert load_all(path).train.texts == ['"Quoted" start', 'an "open quote']


def test_csv_cells_may_hold_line_ends_and_be_very_long(tmp_path):
    path = write(tmp_path / "a.csv", f'text,labels\n"two\nlines",x\n{"long " * 40_000},y\n')

    texts = load_all(path).train.texts

    assert texts[0] == "two\nlines"
    assert len(texts[1]) == 200_000


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    path = write(tmp_path / "a.csv", "\ufefftext;labels\r\ncod;x\r\n\r\nwine;y\r\n")

    corpus = load_all(path)

    assert corpus.train.texts == ["cod", "wine"]
    assert corpus.label_names == ["x", "y"]


def test_label_ids_keep_repeated_names_apart(tmp_path):
    path = jsonl(
        tmp_path / "a",
        {"text": "a", "labels": ["law", "law"], "label_ids": [3, 0]},
        {"text": "b", "labels": ["fish"], "label_ids": [1]},
    )

    corpus = load_all(path)

    assert corpus.label_names == ["law", "fish", "2", "law"]
    assert corpus.train.labels.toarray().tolist() == [[1, 0, 0, 1], [0, 1, 0, 0]]


def test_label_weights_are_relevance_and_zero_is_none(tmp_path):
    path = jsonl(tmp_path / "a", {"text": "a", "labels": ["x", "y"], "label_weights": [0.5, 0]})

    corpus = load_all(path)

    assert corpus.train.labels.toarray().tolist() == [[0.5, 0]]
    assert corpus.train.labels.nnz == 1


def test_nuls_and_lone_surrogates_are_replaced_and_noted(tmp_path):
    path = write(tmp_path / "a", '{"text": "a\\u0000b \\ud800 \\ud83d\\ude00", "labels": ["x"]}\n')

    corpus = load_all(path)

    assert corpus.train.texts == ["a b \ufffd 😀"]
    assert "1 texts" in corpus.notes["sanitized"]


def csv_of(path, *cells):
    rows = [cell.replace('"', '""') for cell in cells]
    return write(path, "text,labels\n" + "".join(f't,"{row}"\n' for row in rows))


LISTS = ["['a b', 'c']", '["a b", "c"]', "('a b', 'c')"]


@pytest.mark.parametrize("cell", LISTS)
def test_where_most_cells_are_lists_any_other_is_one_label(tmp_path, cell):
    path = csv_of(tmp_path / "a.csv", *[cell] * 29, "c", "d, e", "f|g", "")

    corpus = load_all(path)

    assert corpus.label_names == ["a b", "c", "d, e", "f|g"]
    assert labels_of(corpus)[-4:] == [["c"], ["d, e"], ["f|g"], []]


@pytest.mark.parametrize("cell", LISTS)
@pytest.mark.parametrize("mark", ["|", "; ", ", "])
def test_one_list_does_not_change_how_the_other_cells_are_read(tmp_path, cell, mark):
    path = csv_of(tmp_path / "a.csv", f"a b{mark}d", "d", cell, f"d{mark}e")

    assert labels_of(load_all(path)) == [["a b", "d"], ["d"], ["a b", "c"], ["d", "e"]]


def test_empty_lists_say_nothing_about_the_other_cells(tmp_path):
    path = csv_of(tmp_path / "a.csv", "[]", "a|b", "[]", "[]", "b")

    assert labels_of(load_all(path)) == [[], ["a", "b"], [], [], ["b"]]


def test_a_string_among_json_lists_is_one_label(tmp_path):
    rows = [{"text": "t", "labels": labels} for labels in (["a"], ["b", "c"], "d, e")]

    assert labels_of(load_all(jsonl(tmp_path / "a.jsonl", *rows))) == [["a"], ["b", "c"], ["d, e"]]


@pytest.mark.parametrize(
    "cell",
    ["['a b' 'c']", "['a b'\n 'c']", "[1 2 3]", "[a, b]", "(a)", "{a,b}", "{'a': 1}", "('a')"],
)
@pytest.mark.parametrize("other", ["c", "['a', 'b']"])
def test_a_cell_that_only_looks_like_a_list_is_refused(tmp_path, cell, other):
    path = write(tmp_path / "a.csv", f'text,labels\nt,"{other}"\nt,"{cell}"\n')
    line = 3 + cell.count("\n")

    with pytest.raises(DataError) as caught:
        load_all(path)

    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    assert message.endswith("write a JSON list, or pass separator=")


def test_a_given_separator_leaves_brackets_alone(tmp_path):
    path = write(tmp_path / "a.csv", "text,labels\na,[1]\nb,[oops]|(c)\n")

    assert load_all(path, separator="|").label_names == ["(c)", "[1]", "[oops]"]
    assert load_all(path, separator="").label_names == ["[1]", "[oops]|(c)"]


def test_very_long_numbers_and_deep_lists_are_handled(tmp_path):
    long = write(tmp_path / "long.csv", f"text,labels\na,{'9' * 5000}\nb,x\n")
    deep = write(tmp_path / "deep.csv", f"text,labels\nb,{'[' * 5000}{']' * 5000}\n")

    assert len(load_all(long).label_names) == 2
    with pytest.raises(DataError, match=r"deep\.csv:2: .* (looks like a list|is not a label)"):
        load_all(deep)


BROKEN = {
    "a.csv": [
        ("text,labels\na,x\nb\n", "a.csv:3: 1 cells in this row but 2 columns"),
        ('text,labels\n"a,x\n', "a.csv:2: not a valid table row"),
        (b"text,labels\ncod,x\n\xff,y\n", "a.csv:3: not UTF-8 (byte 0xff)"),
        ("text,labels\n", "a.csv: has no rows"),
        ("text,labels\ra,x\r", "a.csv:1: not a valid table row (new-line character"),
        ("", "a.csv: is empty"),
        (" \n\n", "a.csv: is empty"),
        ("name,labels\na,x\n", "a.csv: no text column among 'name', 'labels'; name one with text="),
        ("text,foo\na,x\n", "a.csv: no labels column among 'text', 'foo'; name one with labels="),
        ("text,labels\na,\n", "a.csv: no training point has a label"),
        (
            "text,labels,text \na,x,b\n",
            "a.csv:1: 2 columns are called 'text'; rename all but one",
        ),
        ("text\tid\tid\tlabels\na\t1\t2\tx\n", "a.csv:1: 2 columns are called 'id'"),
        ("text,labels,split\na,x,train\nb,x,toast\n", "a.csv:3: split 'toast' is unknown"),
        ("text,labels,split\na,x,test\n", "a.csv: no training rows, only: test"),
        ("only prose here\nand more\n", "a.csv: no text column among 'only prose here'; name one"),
        (
            gzip.compress(b"text,labels\na,x\n" * 999, mtime=0)[:40],
            "a.csv: the gzip data is cut short",
        ),
        (b"PK\x03\x04....", "a.csv: is a zip or npz archive"),
        (b"PAR1abcdefgh", "a.csv: not a complete Parquet file"),
    ],
    "a.xlsx": [(b"PK\x03\x04....", "a.xlsx: not a complete Excel file")],
    "a.json": [
        ('[\n{"text": "a", "labels": [1]},\n\n 7]', "a.json:4: 7 is not a JSON object"),
        ('[\n{"text": "a", "labels": [1]},\n', "a.json:3: not a JSON list of objects"),
        ('[\n{"text": "a", "labels": [1]}\n', "a.json:3: the JSON list is cut short here"),
        ('[\n{"text": "a"},\n\n{"text": "b", "labels": [{}]}]', "a.json:4: {} is not a label"),
        ("[]", "a.json:1: not a JSON list of objects"),
    ],
    "a.jsonl": [
        ('{"text": "a", "labels": ["x"]}\n{"text": "b", "la\n', "a.jsonl:2: not a JSON object"),
        ('{"text": "a", "labels": ["x"]}\n[1]\n', "a.jsonl:2: [1] is not a JSON object"),
        ('{"text": "a", "labels": ["x"]}\n\n{"labels": []}\n', "a.jsonl:3: no 'text' in this row"),
        ('{"text": ["a"], "labels": ["x"]}\n', "a.jsonl:1: column 'text' holds ['a']"),
        ('{"text": "a", "labels": [true]}\n', "a.jsonl:1: True is not a label"),
        ('{"text": "a", "labels": [{"id": 1}]}\n', "a.jsonl:1: {'id': 1} is not a label"),
        (
            '{"text": "a", "labels": ["x"], "label_weights": [NaN]}\n',
            "a.jsonl:1: [nan]: relevance must be finite and not negative",
        ),
        (
            '{"text": "a", "labels": ["x"], "label_weights": [-1]}\n',
            "a.jsonl:1: [-1]: relevance must be finite and not negative",
        ),
        (
            '{"text": "a", "labels": ["x"], "label_weights": [1, 2]}\n',
            "a.jsonl:1: 1 labels but 2 relevance values",
        ),
        (
            '{"text": "a", "labels": ["x"], "label_ids": [99999999999999]}\n',
            "a.jsonl:1: label id '99999999999999' is not a whole number below 10^8",
        ),
        (
            '{"text": "a", "labels": ["x", "y"], "label_ids": [1, 1]}\n',
            "a.jsonl:1: label id 1 has two names",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [(name, content, message) for name, cases in BROKEN.items() for content, message in cases],
)
def test_broken_tables_are_refused_in_one_line_with_file_and_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)

    with pytest.raises(DataError) as caught:
        load_all(path)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_columns_without_a_name_may_be_several(tmp_path):
    path = write(tmp_path / "a.csv", "text,labels,,\na,x,,\n")

    assert load_all(path).label_names == ["x"]


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    columns = [pa.array(["a"]), pa.array(["x"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "labels", "text"]), path)

    with pytest.raises(DataError, match=r"a\.parquet: 2 columns are called 'text'; rename"):
        load_all(path)


def test_a_missing_column_names_the_nearest(tmp_path):
    path = write(tmp_path / "a.csv", "headline,category\na,x\n")

    with pytest.raises(DataError, match=r"no column 'headlin' among .*did you mean 'headline'"):
        load_all(path, text="headlin")


def test_a_split_without_the_column_is_refused(tmp_path):
    write(tmp_path / "train.csv", "text,labels\na,x\n")
    write(tmp_path / "test.csv", "text,label\na,x\n")

    with pytest.raises(DataError, match=r"test\.csv: no column 'labels'.*did you mean 'label'"):
        load_corpus(tmp_path)


def test_splits_in_two_formats_are_refused(tmp_path):
    write(tmp_path / "train.csv", "text,labels\na,x\n")
    jsonl(tmp_path / "test.jsonl", {"text": "a", "labels": []})

    with pytest.raises(DataError, match=r"test\.jsonl: is jsonl, but the training file is csv"):
        load_corpus(tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 2], "train.jsonl:2: label id 2 is out of range; ids go from 0 to 1"),
        ([10**17], "is out of range"),
        (["fsh"], "train.jsonl:2: label 'fsh' is not in the file of label names; did you mean 'f"),
    ],
)
def test_labels_outside_labels_txt_are_refused(tmp_path, labels, message):
    jsonl(tmp_path / "train.jsonl", {"text": "a"}, {"text": "b", "labels": labels})
    write(tmp_path / "labels.txt", "law\nfish\n")

    with pytest.raises(DataError) as caught:
        load_all(tmp_path)

    assert message in str(caught.value)


def test_a_name_that_stands_twice_in_labels_txt_is_ambiguous(tmp_path):
    jsonl(tmp_path / "train.jsonl", {"text": "a", "labels": ["law"]})
    write(tmp_path / "labels.txt", "law\nlaw\n")

    with pytest.raises(DataError, match="occurs 2 times in the label names; use row numbers"):
        load_all(tmp_path)


def test_a_truncated_parquet_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"] * 100, "labels": [["x"]] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(DataError, match=r"a\.parquet: not a complete Parquet file"):
        load_all(path)
