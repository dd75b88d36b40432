import json
from pathlib import Path

import numpy as np
import pytest

from elias.errors import RunError
from elias.training.run import METRICS_FILE, PARTITION_FILE, read_partition, read_records

EVENTS = [
    {"event": "time", "step": "clusters", "seconds": 2.0},
    {"event": "data", "labels": 3, "source": "/data/fish.csv", "reading": {"text": "title"}},
    {"event": "epoch", "epoch": 1},
    {"event": "time", "step": "clusters", "seconds": 0.5},
]


def write(folder, lines):
    (folder / METRICS_FILE).write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def records(tmp_path):
    return read_records(write(tmp_path, map(json.dumps, EVENTS)))


def test_events_are_read_by_kind(records):
    assert records.of("epoch") == [{"event": "epoch", "epoch": 1}]


def test_times_of_a_step_add_up(records):
    assert records.times() == {"clusters": 2.5}


def test_records_are_of_the_first_member_and_times_of_all_members(tmp_path):
    second = [{**event, "member": 1} for event in EVENTS]

    records = read_records(write(tmp_path, map(json.dumps, [*EVENTS, *second])))

    assert len(records.of("epoch")) == 1
    assert records.times() == {"clusters": 5.0}


def test_a_run_knows_its_corpus_and_how_to_read_it(records):
    assert records.source() == Path("/data/fish.csv")
    assert records.reading() == {"text": "title"}


def test_a_run_of_an_older_version_does_not(tmp_path):
    records = read_records(write(tmp_path, ['{"event": "data", "labels": 3}']))

    assert records.source() is None
    assert records.reading() == {}


def test_a_model_without_a_run_has_no_events(tmp_path):
    assert read_records(tmp_path).events == ()


@pytest.mark.parametrize("line", ['{"event": "da', "[1]"])
def test_a_broken_line_is_named(tmp_path, line):
    with pytest.raises(RunError, match=r"metrics\.jsonl:2: is not a JSON object"):
        read_records(write(tmp_path, ["{}", line]))


def test_the_partition_is_read_back(tmp_path):
    np.save(tmp_path / PARTITION_FILE, np.array([1, 0, 1], dtype=np.int32))

    assert read_partition(tmp_path, n_labels=3, n_clusters=2).tolist() == [1, 0, 1]
    assert read_partition(tmp_path / "elsewhere", n_labels=3, n_clusters=2) is None


@pytest.mark.parametrize("content", [[0, 1], [0, 1, 2], [0, 1, -1], [0.0, 1.0, 0.0]])
def test_a_partition_of_other_labels_is_refused(tmp_path, content):
    np.save(tmp_path / PARTITION_FILE, np.array(content))

    with pytest.raises(RunError, match=r"remove the file"):
        read_partition(tmp_path, n_labels=3, n_clusters=2)


def test_a_partition_file_that_is_not_an_array_is_refused(tmp_path):
    (tmp_path / PARTITION_FILE).write_bytes(b"half")

    with pytest.raises(RunError, match=r"remove the file"):
        read_partition(tmp_path, n_labels=3, n_clusters=2)
