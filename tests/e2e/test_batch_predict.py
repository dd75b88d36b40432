"""Predicting files with ``elias predict --out``: forms, interruptions, memory, mistakes."""

from __future__ import annotations

import csv
import gzip
import json
import signal
import threading
import time
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from e2e.commands import elias, start_elias
from elias.data.load import TextFile
from elias.errors import DataError
from elias.inference.batch_predict import FileTask, predict_file
from elias.inference.prediction_io import FORMATS, read_predictions

TEXTS = [f"roda vepi {word}" for word in ("dabuva", "roda", "", "mi", "vepi,\tx", 'a "q"', "zz")]


@pytest.fixture
def table(tmp_path):
    """Rows with an id, a text and something else."""
    path = tmp_path / "in.jsonl"
    rows = [{"id": i, "text": text, "year": None} for i, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def predict(run, source, out, *more):
    result = elias("predict", run, source, "--out", out, "--device", "cpu", "-k", 3, *more)
    assert result.code == 0, result.err
    return result


def rows_of(path):
    """Return the ids and scores of a file of predictions, and its kept cells, for each text."""
    opened = gzip.open if path.name.endswith(".gz") else open
    if ".parquet" in path.name:
        return pq.read_table(path).to_pylist()
    with opened(path, "rt", encoding="utf8", newline="") as stream:
        if ".jsonl" in path.name:
            return [json.loads(line) for line in stream]
        rows = list(csv.DictReader(stream, delimiter="\t" if ".tsv" in path.name else ","))
    lists = ("labels", "label_ids", "scores", "probabilities")
    return [{k: json.loads(v) if k in lists else v for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("name", ["out.csv", "out.tsv.gz", "out.parquet"])
def test_a_table_has_the_kept_columns_and_the_labels_of_each_text(
    run, model, table, tmp_path, name
):
    predict(run, table, tmp_path / name, "--keep", "id", "--chunk-size", 3)

    actual = rows_of(tmp_path / name)
    expected = model.predict(TEXTS, top_k=3)
    assert list(actual[0]) == ["id", "labels", "label_ids", "scores", "probabilities"]
    assert [int(row["id"]) for row in actual] == list(range(len(TEXTS)))
    assert [row["label_ids"] for row in actual] == [ranked.ids.tolist() for ranked in expected]
    assert [row["labels"] for row in actual] == [ranked.labels for ranked in expected]
    assert actual[0]["scores"] == pytest.approx(expected[0].scores.tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["out.jsonl", "out.ndjson.gz"])
def test_json_lines_are_those_of_stdout(run, table, tmp_path, name):
    predict(run, table, tmp_path / name)

    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "rt", encoding="utf8") as stream:
        written = stream.read()
    assert written == elias("predict", run, table, "-k", 3, "--device", "cpu").out


def test_lines_of_id_and_score_are_read_back_as_predictions(run, model, table, tmp_path):
    predict(run, table, tmp_path / "out.txt")

    actual = read_predictions(tmp_path / "out.txt", model.n_labels)
    expected = model.predict(TEXTS, top_k=3)
    assert actual.ids.tolist() == expected.ids.tolist()
    assert actual.scores.tolist() == expected.scores.tolist()


@pytest.mark.parametrize("name", ["in.csv", "in.tsv.gz", "in.parquet", "in.txt.gz"])
def test_every_input_gives_the_same_labels(run, model, tmp_path, name):
    source = tmp_path / name
    if name == "in.txt.gz":
        source.write_bytes(gzip.compress("\n".join(TEXTS).encode(), mtime=0))
    elif name == "in.parquet":
        pq.write_table(pa.table({"id": range(len(TEXTS)), "text": TEXTS}), source)
    else:
        quote = csv.QUOTE_MINIMAL
        opened = gzip.open if name.endswith(".gz") else open
        with opened(source, "wt", encoding="utf8", newline="") as stream:
            writer = csv.writer(stream, delimiter="\t" if "tsv" in name else ",", quoting=quote)
            writer.writerows([("id", "text"), *enumerate(TEXTS)])

    predict(run, source, tmp_path / "out.jsonl", "--chunk-size", 2)

    actual = rows_of(tmp_path / "out.jsonl")
    assert [row["text"] for row in actual] == TEXTS
    assert [row["labels"] for row in actual] == model.predict(TEXTS, top_k=3).to_dicts()


def test_parquet_keeps_the_types_of_kept_columns(run, tmp_path):
    source, again = tmp_path / "in.jsonl", tmp_path / "again.parquet"
    cells = [(1, 0.5, True, "a"), (None, 2, None, ["b"]), (3, None, False, 7)]
    rows = [{"text": "roda", "i": i, "f": f, "b": b, "s": s} for i, f, b, s in cells]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keep = [word for name in "ifbs" for word in ("--keep", name)]

    predict(run, source, tmp_path / "out.parquet", *keep, "--chunk-size", 1)
    predict(run, tmp_path / "out.parquet", again, "--text", "s", *keep[:-2], "--chunk-size", 2)

    first, second = pq.read_table(tmp_path / "out.parquet"), pq.read_table(again)
    types = [str(first.schema.field(name).type) for name in "ifbs"]
    assert types == ["int64", "double", "bool", "large_string"]
    assert first["s"].to_pylist() == ["a", '["b"]', "7"]
    assert second.select(["i", "f", "b"]).equals(first.select(["i", "f", "b"]))


# interruptions


class StoppedError(Exception):
    """Pulls the plug."""


def stop_after(model, n_calls, error):
    """Return a model that fails once it has answered so many times."""
    answered = []

    class Stopping:
        def __getattr__(self, name):
            return getattr(model, name)

        def predict(self, texts, **options):
            if len(answered) == n_calls:
                raise error
            answered.append(len(texts))
            return model.predict(texts, **options)

    return Stopping(), answered


@pytest.mark.parametrize("kind", FORMATS)
def test_an_interrupted_file_resumes_to_the_same_bytes(model, table, tmp_path, kind):
    source = TextFile.find(table)
    whole = FileTask.plan(source, tmp_path / f"whole.{kind}", chunk_size=2)
    broken = FileTask.plan(source, tmp_path / f"broken.{kind}", chunk_size=2)
    predict_file(model, whole, top_k=3)
    stopping, _ = stop_after(model, 2, StoppedError())

    with pytest.raises(StoppedError):
        predict_file(model, broken, predict=stopping.predict, top_k=3)
    assert not broken.out.exists()
    counting, answered = stop_after(model, 99, StoppedError())
    done = predict_file(model, broken, predict=counting.predict, top_k=3)

    assert (done.texts, done.resumed, answered) == (7, 4, [2, 1])
    assert broken.out.read_bytes() == whole.out.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"broken.{kind}", "in.jsonl", f"whole.{kind}",
    ]  # fmt: skip


def test_each_call_predicts_a_chunk_of_texts(model, tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("roda\n" * 1000)
    counting, answered = stop_after(model, 999, StoppedError())

    predict_file(counting, FileTask.plan(TextFile.find(source), tmp_path / "o.txt", chunk_size=64))

    assert sorted(answered) == [40] + [64] * 15


def test_chunks_predicted_in_pairs_give_the_bytes_of_one_after_the_other(model, tmp_path):
    source, threads = tmp_path / "in.txt", set()
    source.write_text("".join(f"roda vepi {i}\n" for i in range(500)))
    pairs, single = (
        FileTask.plan(TextFile.find(source), tmp_path / f"{name}.jsonl", chunk_size=32)
        for name in ("pairs", "single")
    )

    def predict(texts, **options):
        threads.add(threading.get_ident())
        return model.predict(texts, **options)

    predict_file(model, pairs)
    predict_file(model, single, predict=predict)

    assert threads == {threading.get_ident()}
    assert pairs.out.read_bytes() == single.out.read_bytes()


@pytest.mark.parametrize("name", ["in.csv", "in.parquet", "in.jsonl", "in.txt"])
def test_memory_does_not_grow_with_the_rows_of_a_file(tmp_path, name):
    source, n_rows = tmp_path / name, 50_000
    rows = {"in.csv": "7,roda\n", "in.jsonl": '{"id": 7, "text": "roda"}\n', "in.txt": "roda\n"}
    if name == "in.parquet":
        pq.write_table(pa.table({"id": range(n_rows), "text": ["roda"] * n_rows}), source)
    else:
        source.write_text("id,text\n" * (name == "in.csv") + rows[name] * n_rows)
    file = TextFile.find(source, keep=["id"] if name != "in.txt" else [])
    next(file.rows())  # what is imported on the way stays

    tracemalloc.start()
    count = sum(1 for _ in file.rows())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == n_rows
    assert most < 4_000_000  # some blocks of the file; a list of these rows takes over 10 MB


def test_a_killed_command_resumes(run, tmp_path):
    source, whole, out = tmp_path / "in.txt", tmp_path / "whole.csv.gz", tmp_path / "out.csv.gz"
    source.write_text("".join(f"roda vepi dabuva {i}\n" for i in range(6_000)))
    command = ("predict", run, source, "--device", "cpu", "--chunk-size", 100, "--out")
    assert elias(*command, whole).code == 0
    process = start_elias(*command, out)
    deadline = time.monotonic() + 60
    while not (tmp_path / ".out.csv.gz.partial" / "00000001.part").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)

    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert not out.exists()
    result = elias(*command, out)

    assert result.code == 0
    assert " of them before" in result.err
    assert out.read_bytes() == whole.read_bytes()


def test_an_interrupt_reports_the_progress(model, table, tmp_path):
    stopping, _ = stop_after(model, 1, KeyboardInterrupt())
    task = FileTask.plan(TextFile.find(table), tmp_path / "o.csv", chunk_size=2)

    with pytest.raises(
        KeyboardInterrupt, match="2 of 7 texts are done; run the same command to resume"
    ):
        predict_file(model, task, predict=stopping.predict)


def test_chunks_of_different_requests_are_not_mixed(model, table, tmp_path):
    task = FileTask.plan(TextFile.find(table), tmp_path / "o.jsonl", chunk_size=2)
    stopping, _ = stop_after(model, 2, StoppedError())
    with pytest.raises(StoppedError):
        predict_file(model, task, predict=stopping.predict, top_k=2)
    table.write_text(table.read_text().replace("vepi", "roda"))

    with pytest.raises(DataError, match="an unfinished run differs in: input, options; run"):
        predict_file(model, task, top_k=3)
    anew = FileTask.plan(task.source, task.out, chunk_size=2, overwrite=True)
    done = predict_file(model, anew, top_k=3)

    assert done.resumed == 0
    assert all(len(row["labels"]) == 3 for row in rows_of(task.out))


def test_two_processes_do_not_write_one_output(model, table, tmp_path):
    task = FileTask.plan(TextFile.find(table), tmp_path / "o.jsonl", chunk_size=2)

    class Meddling:
        def __getattr__(self, name):
            return getattr(model, name)

        def predict(self, texts, **options):
            with pytest.raises(DataError, match="another process is writing this output"):
                predict_file(model, task, **options)
            return model.predict(texts, **options)

    assert predict_file(Meddling(), task).texts == 7


# mistakes


BAD_ROWS = {
    "bad.jsonl": ('{"text": "a"}\n{"text": "b"}\n{"text":\n', "bad.jsonl:3: not a JSON object"),
    "none.jsonl": ('{"text": "a"}\n{"id": 2}\n', "none.jsonl:2: no 'text' in this row"),
    "list.jsonl": ('{"text": "a"}\n{"text": ["b"]}\n', "list.jsonl:2: column 'text' holds ['b']"),
    "short.csv": ("id,text\n1,a\n2\n", "short.csv:3: 1 cells in this row but 2 columns"),
    "empty.txt": ("", "empty.txt: is empty"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_before_anything_is_computed(run, tmp_path, name):
    content, expected = BAD_ROWS[name]
    (tmp_path / name).write_text(content)

    result = elias(
        "-q", "predict", run, tmp_path / name, "--out", tmp_path / "o.csv", "--chunk-size", 1
    )

    (line,) = result.err.splitlines()
    assert result.code == 2
    assert expected in line
    assert [path.name for path in tmp_path.iterdir()] == [name]


MISTAKES = {
    "{table} --out {tmp}/o.xlsx": "o.xlsx: the file extension does not name a format",
    "{table} --out {tmp}/o --format jsonk": "did you mean 'jsonl'?",
    "{table} --out {tmp}/o.parquet.gz": "Parquet is already compressed",
    "{table} --out {tmp}/no/o.csv": "its folder does not exist",
    "{table} --out {tmp} --format csv": "is a folder",
    "{table} --out {table} --overwrite": "is also the input file",
    "{table} --out {tmp}/there.csv": "already exists; choose another file, or add --overwrite",
    "{table} --out {tmp}/o.csv --keep idd": "no column 'idd' among 'id', 'text', 'year'; did you",
    "{table} --out {tmp}/o.csv --keep id --keep id": "it is given twice",
    "{table} --out {tmp}/o.txt --keep id": "the txt format has no columns",
    "{tmp}/labelled.csv --out {tmp}/o.csv --keep labels": "the output uses this name",
    "- --out {tmp}/o.csv": "stdin cannot be read twice",
    "{table} --format csv": "give --out FILE",
    "- --keep id": "lines on stdin have no columns",
    "{tmp}/gone.txt --out {tmp}/o.csv": "gone.txt: no such file",
    "{tmp}/there.csv --out {tmp}/o.csv": "no text column among 'x', 'y'; name one with --text",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_gets_one_line_and_leaves_nothing(run, table, tmp_path, command):
    (tmp_path / "there.csv").write_text("x,y\n1,2\n")
    (tmp_path / "labelled.csv").write_text("text,labels\nroda,x\n")
    before = sorted(tmp_path.iterdir())

    result = elias("-q", "predict", run, *command.format(table=table, tmp=tmp_path).split())

    (line,) = result.err.splitlines()
    assert result.code == 2
    assert MISTAKES[command] in line
    assert sorted(tmp_path.iterdir()) == before


def test_stdout_has_kept_columns_too(run, table):
    result = elias("predict", run, table, "--keep", "id", "-k", 1)

    assert [json.loads(line)["id"] for line in result.out.splitlines()] == list(range(len(TEXTS)))
    assert list(json.loads(result.out.splitlines()[0])) == ["id", "labels"]
