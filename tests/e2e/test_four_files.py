"""Four files as people find them, through the commands of a first hour.

The files are small and invented. Their shapes are those of the Netflix titles, the movies of TMDB,
GoEmotions and the catalogue of Project Gutenberg. No option is given, except for a labels column
where two readings are possible.
"""

import csv
import io
import json
import random
import re

import pytest

from e2e.commands import elias

QUICK = ("--device", "cpu", "--set", "encoder.dim=16", "--set", "encoder.hidden_dim=16")
"""Options that make training a matter of a second."""
NUMBERS = "labels are numbers; to see names, give a label table of ids and names"
N_ROWS, N_TEST = 200, 40
TOPICS = {
    "Crime": ["detective", "robbery", "police", "alibi"],
    "Home Life": ["kitchen", "garden", "recipe", "bread"],
    "Romance": ["wedding", "letter", "kiss", "heart"],
    "Sea": ["sailor", "harbour", "storm", "whale"],
    "War": ["soldier", "trench", "general", "siege"],
}
NAMES = list(TOPICS)


def stories():
    """Yield the number of a row, a title, a description of its topics, and the topics."""
    rng = random.Random(0)
    for number in range(N_ROWS):
        topics = sorted(rng.sample(NAMES, 1 + number % 2))
        words = [word for topic in topics for word in rng.sample(TOPICS[topic], 2)]
        title = "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3))
        yield number, title.capitalize(), f"About the {' and the '.join(words)}.", topics


def table(header, rows):
    """Return rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header.split(","), *rows])
    return text.getvalue()


def titles_file():
    header = (
        "show_id,type,title,director,cast,country,date_added,release_year,rating,duration,"
        "listed_in,description"
    )
    rows = [
        [
            *(f"s{i + 1}", "TV Show" if i % 3 else "Movie", title, f"Ada {title}", ""),
            *("Norway", "September 25, 2021", 1990 + i % 30, "PG-13", f"{80 + i % 40} min"),
            *(", ".join(topics), description),
        ]
        for i, title, description, topics in stories()
    ]
    return "\ufeff" + table(header, rows)


def movies_file():
    def objects(names):
        return json.dumps([{"id": NAMES.index(name) + 10, "name": name} for name in names])

    header = "budget,genres,homepage,id,keywords,original_language,overview,release_date,title"
    rows = [
        [
            *(1000 * i, objects(topics), f"https://films.example/{i}", 500 + i),
            *(objects(topics[:1]), "en", description, f"2009-12-{1 + i % 28}", title),
        ]
        for i, title, description, topics in stories()
    ]
    return table(header, rows)


def emotions_file():
    lines = []
    for i, title, description, topics in stories():
        ids = ",".join(str(NAMES.index(topic)) for topic in topics)
        lines.append(f"{title}! {description}\t{ids}\ted{i:03x}q{i % 7}j\n")
    return "".join(lines)


def catalogue_file():
    header = "Text#,Type,Issued,Title,Language,Authors,Subjects,LoCC,Bookshelves"
    rows = [
        [
            *(i + 1, "Text", f"1971-12-{1 + i % 28:02}", f"{title}: {description}", "en"),
            *(f"{title}, Ada, 1800-1870", "; ".join(f"{topic} -- Fiction" for topic in topics)),
            *("PR", "Browsing: Fiction"),
        ]
        for i, title, description, topics in stories()
    ]
    return table(header, rows)


FILES = {
    "netflix_titles.csv": (
        *(titles_file, ["--labels", "listed_in"], NAMES),
        "text    2 columns, 'title', 'description'",
        "labels  column 'listed_in', separated by ','",
    ),
    "tmdb_5000_movies.csv": (
        *(movies_file, ["--labels", "genres"], NAMES),
        "text    2 columns, 'overview', 'title'",
        "labels  column 'genres', the 'name' of each object",
    ),
    "goemotions.tsv": (
        *(emotions_file, [], ["0", "1", "2", "3", "4"]),
        "text    column '1'",
        "labels  column '2', separated by ','",
    ),
    "pg_catalog.csv": (
        *(catalogue_file, [], [f"{name} -- Fiction" for name in NAMES]),
        "text    column 'Title'",
        "labels  column 'Subjects', separated by ';'",
    ),
}


@pytest.fixture(scope="module", params=FILES)
def first_hour(request, tmp_path_factory):
    """Run the four commands on a file, and return their results by name."""
    make, columns, *expected = FILES[request.param]
    folder = tmp_path_factory.mktemp("first-hour")
    path, run = folder / request.param, folder / "run"
    path.write_text(make(), encoding="utf8", newline="")
    results = {
        "info": elias("data", "info", path, *columns),
        "train": elias("train", path, *columns, "--out", run, *QUICK),
        "evaluate": elias("evaluate", run, path, "--device", "cpu"),
        "predict": elias("predict", run, path, "--device", "cpu", "-k", 2),
    }
    for result in results.values():
        assert result.code == 0, result.err
    return results, expected


def test_data_info_says_how_the_file_is_read(first_hour):
    (info, *_), (names, text, labels) = first_hour[0].values(), first_hour[1]

    lines = info.out.splitlines()
    assert any(line.startswith(text) for line in lines)
    assert any(line.startswith(labels) for line in lines)
    (frequent,) = (line[16:] for line in lines if line.startswith("frequent labels"))
    assert sorted(re.findall(r" (\S[^,]*) \(\d+\)", frequent)) == names
    hints = [line.split(None, 1)[1] for line in lines if line.startswith("hint")]
    assert hints == [NUMBERS] * names[0].isdecimal()


def test_training_says_the_same_and_ends_with_a_table(first_hour):
    train, (_, text, labels) = first_hour[0]["train"], first_hour[1]

    assert "5 labels" in train.err
    for read in (text, labels):
        assert ": ".join(read.split(None, 1)) in train.err
    assert f"{N_TEST} of {N_ROWS} points set aside" in train.err
    assert train.out.startswith(f"On the test split ({N_TEST} points")
    assert "With the best F1 on held-out points" in train.out


def test_evaluation_reads_the_columns_and_the_test_points_of_training(first_hour):
    evaluate = first_hour[0]["evaluate"]

    assert "read as in training" in evaluate.err
    assert f"on the {N_TEST} test points" in evaluate.err
    assert re.search(r"^P +\d+\.\d\d ", evaluate.out, re.MULTILINE)
    assert "decile" not in evaluate.out  # 5 labels have no tenths
    assert re.search(r"^micro +\d+\.\d\d ", evaluate.out, re.MULTILINE)


def test_prediction_reads_the_texts_and_finds_labels(first_hour):
    predict, (names, *_) = first_hour[0]["predict"], first_hour[1]

    rows = [json.loads(line) for line in predict.out.splitlines()]
    assert len(rows) == N_ROWS
    assert all(story[2] in row["text"] for row, story in zip(rows, stories(), strict=True))
    best = [row["labels"][0] for row in rows]
    assert {label["label"] for label in best} == set(names)
    assert all(0 <= label["probability"] <= 1 for label in best)
