"""Columns chosen by content: texts, files without a header, columns of 0 and 1, fastText lines."""

from __future__ import annotations

import json
import random
import sys
import zipfile
from contextlib import suppress

import pytest

from elias.data import load_corpus
from elias.data.load import TextFile, reading_options
from elias.errors import DataError


def write(path, *lines, encoding="utf-8"):
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))
    return path


def load_all(path, **options):
    return load_corpus(path, test_size=0, **options)


def labels_of(corpus):
    return [[corpus.label_names[i] for i in row.indices] for row in corpus.train.labels]


FILMS = [
    "show_id,date_added,url,title,director,description,genre",
    "s1,2021-09-25,https://a.example/1,Dick is dead,Kirsten Q. Johnson,A father nears his end,a|b",
    "s2,2021-09-24,https://a.example/2,Blood and water,Ann Lee,A teen looks for her sister,a",
    "s3,2021-09-23,https://a.example/3,Ganglands,Julien Leclercq,A robber joins a new gang,b",
]


def test_all_columns_that_look_like_text_are_read_and_the_rest_is_named(tmp_path):
    rows = [row.replace("director", "plot outline") for row in FILMS]
    rows = [row.replace("Julien Leclercq", "What Julien Leclercq said") for row in rows]
    rows = [row.replace("Ann Lee", "What Ann Lee said") for row in rows]

    corpus = load_all(write(tmp_path / "films.csv", *rows))

    assert corpus.train.texts[0] == "Dick is dead A father nears his end"
    expected = "2 columns, 'title', 'description'; left out: column 'plot outline'"
    assert corpus.notes["text"] == expected
    assert corpus.reading["text"] == "title,description"


@pytest.mark.parametrize("cell", ["12.5", "2021-09-25", "https://a.example/1", "", "3f2504e04f89"])
def test_a_column_of_numbers_dates_links_or_ids_is_not_a_text(tmp_path, cell):
    path = write(tmp_path / "a.csv", "content,title,labels", f"{cell},red wine,x", f"{cell},sea,y")

    assert load_all(path).train.texts == ["red wine", "sea"]


def test_a_column_of_few_values_is_not_a_text(tmp_path):
    rows = [f"{'Mr' if i % 2 else 'Mrs'},a comment number {i},x" for i in range(40)]
    path = write(tmp_path / "a.csv", "title,comment,labels", *rows)

    assert load_all(path).reading["text"] == "comment"


def test_without_a_common_name_columns_of_prose_are_read(tmp_path):
    path = write(tmp_path / "a.csv", "id,story,tags", "1,a cod in the sea,x", "2,wine and bread,y")

    assert load_all(path).train.texts == ["a cod in the sea", "wine and bread"]


def test_a_json_row_may_omit_one_of_several_text_columns(tmp_path):
    rows = [{"title": "cod", "body": "in the sea", "tags": "x"}, {"title": "wine", "tags": "y"}]

    corpus = load_all(write(tmp_path / "a.jsonl", *map(json.dumps, rows)))

    assert corpus.train.texts == ["cod in the sea", "wine"]


def test_texts_to_predict_are_read_from_the_same_columns(tmp_path):
    path = write(tmp_path / "films.csv", *FILMS)

    assert [row.text for row in TextFile.find(path).rows()] == load_all(path).train.texts


EMOTIONS = [
    "My favourite food, of course, is anything I did not cook myself.\t27\teebbqej",
    'He said "now", and left at once\t27,3\ted00q6i',
    '"Why does everyone think so?\t3\teezlygj',
    "To make her feel threatened\t14\ted7ypvh",
    "Dirty southern wankers, all of them\t3\ted0bdzj",
]


def test_a_file_without_a_header_is_recognised(tmp_path):
    path = write(tmp_path / "emotions.tsv", *EMOTIONS)

    corpus = load_all(path)

    assert corpus.train.texts[0].startswith("My favourite")
    assert corpus.train.texts[2].startswith('"Why does')
    assert labels_of(corpus) == [["27"], ["3", "27"], ["3"], ["14"], ["3"]]
    assert corpus.notes["header"] == "none; columns are named by their numbers"
    recorded = {"text": "1", "labels": "2", "header": False, "separator": ","}
    assert {key: corpus.reading[key] for key in recorded} == recorded


def test_a_recorded_layout_applies_to_another_file(tmp_path):
    corpus = load_all(write(tmp_path / "train.tsv", *EMOTIONS))
    other = write(tmp_path / "other.tsv", "Sad\t14\tx")
    explicit = dict.fromkeys(("text", "labels", "separator", "header", "encoding"))

    options = reading_options(other, corpus.reading, explicit)

    assert options == {"text": "1", "labels": "2", "header": False, "separator": ","}
    assert labels_of(load_all(other, **options)) == [["14"]]


def test_columns_without_a_header_are_chosen_by_number(tmp_path):
    path = write(tmp_path / "a.csv", "x,cod,fish", "y,wine,drink")

    corpus = load_all(path, header=False, text="2", labels="3")

    assert corpus.train.texts == ["cod", "wine"]
    assert corpus.label_names == ["drink", "fish"]


def test_unclear_columns_without_a_header_are_refused(tmp_path):
    path = write(tmp_path / "a.csv", "1,a cod in the sea,x,u", "2,a glass of wine,x,u")

    with pytest.raises(DataError, match="no header, and no labels column is recognised"):
        load_all(path)


@pytest.mark.parametrize(
    "rows",
    [
        ["text,labels", "text,x", "b,labels"],
        ["headline,mood", "cod in the sea,sad", "wine,glad"],
        ["text,2019,2020", "cod,1,0", "wine,0,1"],
    ],
)
def test_a_header_is_recognised(tmp_path, rows):
    corpus = load_all(write(tmp_path / "a.csv", *rows), labels=rows[0].split(",", 1)[1])

    assert len(corpus.train) == 2


def test_a_header_line_can_be_demanded(tmp_path):
    path = write(tmp_path / "a.csv", "2019,x", "a cod in the sea,x", "a glass of wine,y")

    corpus = load_all(path, header=True, text="2019", labels="x")

    assert len(corpus.train) == 2


TOXIC = ["id,comment_text,toxic,insult", "1,You are so stupid,1,1", "2,What a good day,0,0"]


def test_columns_of_0_and_1_are_labels(tmp_path):
    corpus = load_all(write(tmp_path / "toxic.csv", *TOXIC))

    assert labels_of(corpus) == [["insult", "toxic"], []]
    assert corpus.notes["labels"] == "2 columns, 'toxic', 'insult', each 0 or 1"
    assert corpus.reading["labels"] == "toxic,insult"


def test_columns_of_0_and_1_are_chosen_by_name(tmp_path):
    path = write(tmp_path / "toxic.csv", *TOXIC)

    assert labels_of(load_all(path, labels="insult,toxic")) == [["insult", "toxic"], []]


def test_another_value_in_a_column_of_0_and_1_is_refused(tmp_path):
    rows = [f"{i},a good day number {i},0,1" for i in range(150)]
    path = write(tmp_path / "toxic.csv", *TOXIC, *rows, "x,What a day,0,7")

    with pytest.raises(DataError, match=r"csv:154: column 'insult' holds '7', which is neither 0"):
        load_all(path)


def test_fasttext_lines_are_read(tmp_path):
    path = write(tmp_path / "a.txt", "__label__fish __label__law cod quotas", "__label__wine red")

    corpus = load_all(path)

    assert corpus.format == "fasttext"
    assert corpus.train.texts == ["cod quotas", "red"]
    assert labels_of(corpus) == [["fish", "law"], ["wine"]]


def test_a_csv_file_may_have_a_text_column_only(tmp_path):
    path = write(tmp_path / "a.csv", "text", '"cod, salted"', "wine")

    assert [row.text for row in TextFile.find(path).rows()] == ["cod, salted", "wine"]
    with pytest.raises(DataError, match="no labels column among 'text'"):
        load_all(path)


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-be", "latin-1", "UTF-8"])
def test_an_encoding_can_be_given(tmp_path, encoding):
    path = write(tmp_path / "a.csv", "text,labels", "café,drink", encoding=encoding)

    corpus = load_all(path, encoding=encoding)

    assert corpus.train.texts == ["café"]
    assert corpus.reading["encoding"] == encoding
    assert [row.text for row in TextFile.find(path, encoding=encoding).rows()] == ["café"]


@pytest.mark.parametrize("encoding", ["nothing", "zlib", "rot13", "a\0b"])
def test_an_unknown_encoding_is_refused(tmp_path, encoding):
    path = write(tmp_path / "a.csv", "text,labels", "cod,fish")

    with pytest.raises(DataError, match="unknown encoding"):
        load_all(path, encoding=encoding)


def test_bytes_outside_the_encoding_are_refused(tmp_path):
    path = write(tmp_path / "a.csv", "text,labels", "café,drink")

    with pytest.raises(DataError, match="is not in the encoding ascii"):
        load_all(path, encoding="ascii")


def excel(path, *rows):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    book.save(path)
    return path


def test_the_first_sheet_of_an_excel_file_is_read(tmp_path):
    rows = [["title", "year", "labels"], ["cod quotas", 2019, "fish|law"], ["wine", 2.5, "law"]]
    path = excel(tmp_path / "a.xlsx", *rows, [None, None, None], ["bread", None, None])

    corpus = load_all(path)

    assert corpus.format == "xlsx"
    assert corpus.train.texts == ["cod quotas", "wine", "bread"]
    assert labels_of(corpus) == [["fish", "law"], ["law"], []]
    assert [row.text for row in TextFile.find(path, text="year").rows()] == ["2019", "2.5", ""]


def test_an_excel_file_may_have_no_header_and_columns_of_0_and_1(tmp_path):
    rows = [
        ["a cod in the sea", 27, "x1"],
        ["a glass of wine", 3, "x2"],
        ["oil and more", 27, "x3"],
    ]
    flags = [["text", "fish", "law"], ["cod", 1, 0], ["wine", 0, 1]]

    no_header = load_all(excel(tmp_path / "a.xlsx", *rows))
    indicators = load_all(excel(tmp_path / "b.xlsx", *flags))

    assert labels_of(no_header) == [["27"], ["3"], ["27"]]
    assert labels_of(indicators) == [["fish"], ["law"]]


def test_a_damaged_excel_file_is_read_or_refused(tmp_path):
    whole = excel(tmp_path / "a.xlsx", ["text", "labels"], ["cod", "fish"]).read_bytes()
    rng = random.Random(0)
    n_read = 0
    for number in range(60):
        content = bytearray(whole[: rng.randrange(200, len(whole) + 1)] if number % 2 else whole)
        for _ in range(4):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path = tmp_path / f"{number}.xlsx"
        path.write_bytes(content)
        with suppress(DataError):
            load_all(path)
            n_read += 1
    assert n_read < 40


def test_excel_without_its_package_names_the_extra(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "")
    monkeypatch.setitem(sys.modules, "openpyxl", None)

    with pytest.raises(DataError, match=r"need openpyxl; install elias-xmc\[excel\]"):
        load_all(tmp_path / "a.xlsx")


def test_common_names_may_be_plural_or_follow_other_words(tmp_path):
    header = "comment_id,Movie Title,original_title,short_descriptions,labels"
    path = write(tmp_path / "a.csv", header, "x1,Cod,Cod,In the sea,x", "x2,Wine,Wine,A drink,y")

    corpus = load_all(path)

    assert corpus.train.texts == ["Cod In the sea", "Wine A drink"]
    assert "left out: column 'original_title'" in corpus.notes["text"]


def test_a_git_lfs_pointer_is_named(tmp_path):
    path = write(tmp_path / "a.csv", "version https://git-lfs.github.com/spec/v1", "oid sha256:1")

    with pytest.raises(DataError, match="is a Git LFS pointer, not the data; run `git lfs pull`"):
        load_all(path)


def test_other_columns_of_labels_are_named(tmp_path):
    path = write(tmp_path / "a.csv", "text,tags,genres", "cod,a|b,x", "wine,b,y")

    assert load_all(path).notes["labels"].endswith("separated by '|'; left out: column 'genres'")
    assert load_all(path, labels="tags").notes["labels"].endswith("separated by '|'")


def test_the_last_word_of_a_name_may_be_a_common_name_of_labels(tmp_path):
    path = tmp_path / "news.csv"
    path.write_text("headline,News_Category\nA cod in the sea,fish\nWine is red,drink\n")

    assert load_corpus(path, test_size=0).notes["labels"] == "column 'News_Category'"

    path.write_text("headline,news_category,page_topic\nA cod in the sea,fish,a\nWine,drink,b\n")
    with pytest.raises(DataError, match="no labels column among"):
        load_corpus(path)


def test_the_labels_column_is_not_read_as_the_text_column(tmp_path):
    path = write(tmp_path / "a.csv", "text,number", "fish,1", "law,2")

    with pytest.raises(DataError, match="no text column among 'text', 'number'"):
        load_corpus(path, labels="text")
