"""The REST API of Annif: the shapes that its backend ``http`` and its web page read."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import datetime

import pytest

from e2e.servers import live
from elias.serve.settings import Limits


@pytest.fixture(scope="module")
def client(run):
    with (
        live(run, limits=Limits(max_inputs=40, max_text=20_000)) as served,
        served.client() as client,
    ):
        yield client


@pytest.fixture(scope="module")
def project(client):
    return f"/v1/projects/{client.get('/v1/projects').json()['projects'][0]['project_id']}"


def test_the_model_is_a_trained_project(client, project, model):
    described = client.get(project).json()

    assert described["is_trained"] is True
    assert datetime.fromisoformat(described["modification_time"]).tzinfo is not None
    assert described["backend"] == {"backend_id": "elias"}
    assert described["vocab"]["size"] == model.n_labels
    assert client.get("/v1/projects").json() == {"projects": [described]}
    assert set(client.get("/v1/").json()) == {"title", "version"}


def test_a_form_is_answered_with_the_labels_that_the_model_predicts(client, project, model, texts):
    fields = {"text": texts[0], "limit": 7, "project": "p", "metadata_title": "a title"}

    results = client.post(f"{project}/suggest", data=fields).json()["results"]

    expected = model.predict(texts[0], top_k=7)
    assert [result["label"] for result in results] == expected.labels
    assert set(results[0]) == {"uri", "label", "notation", "score"}
    scores = [result["score"] for result in results]
    assert scores == sorted(set(scores), reverse=True)  # Annif sorts by score: no ties
    assert scores == pytest.approx(expected.probabilities.tolist(), rel=1e-4)


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (3, 3), (None, 10), (1000, 100)])
def test_the_limit_is_at_most_what_the_server_computes(client, project, texts, limit, count):
    fields = {"text": texts[0]} | ({} if limit is None else {"limit": limit})

    results = client.post(f"{project}/suggest", data=fields).json()["results"]

    assert len(results) <= count
    assert len(results) == count or count > 10


def test_a_threshold_leaves_out_lower_scores(client, project, texts):
    fields = {"text": texts[0], "threshold": 0.3}

    results = client.post(f"{project}/suggest", data=fields).json()["results"]

    assert all(result["score"] >= 0.3 for result in results)


def test_a_long_text_is_accepted_as_a_form(client, project, texts):
    long = (texts[0] + ' "quoted" ä\n') * 200

    answer = client.post(f"{project}/suggest", data={"text": long[:20_000]})

    assert answer.status_code == 200


def test_a_batch_is_answered_like_its_texts(client, project, texts):
    documents = [{"text": text, "document_id": f"d{i}"} for i, text in enumerate(texts)]
    documents.append({"text": texts[0], "metadata": {"title": "ignored"}})

    answers = client.post(
        f"{project}/suggest-batch", params={"limit": 4}, json={"documents": documents}
    ).json()

    assert [answer["document_id"] for answer in answers] == ["d0", "d1", "d2", None]
    for text, answer in zip([*texts, texts[0]], answers, strict=True):
        alone = client.post(f"{project}/suggest", data={"text": text, "limit": 4}).json()
        labels = [result["label"] for result in answer["results"]]
        assert labels == [result["label"] for result in alone["results"]]
    assert client.post(f"{project}/suggest-batch", json={"documents": []}).json() == []


def test_a_full_batch_may_have_metadata(client, project):
    metadata = {f"key {i}": f"value {i}" for i in range(10)}
    documents = [{"text": "a", "document_id": str(i), "metadata": metadata} for i in range(32)]

    answer = client.post(f"{project}/suggest-batch", json={"documents": documents})

    assert len(answer.json()) == 32


def test_an_id_that_is_not_unicode_is_no_error_of_ours(client, project):
    body = b'{"documents": [{"text": "a", "document_id": "d\\ud800"}, {"text": "b"}]}'

    headers = {"content-type": "application/json"}
    answer = client.post(f"{project}/suggest-batch", content=body, headers=headers)

    assert answer.status_code == 200
    assert [result["document_id"] for result in answer.json()] == ["d\ufffd", None]


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"limit=3", 422, "has no text"),
        (b'{"text": "a"}', 422, "send text=…&limit=10 as x-www-form-urlencoded"),
        (b"text=a&limit=x", 422, "limit: "),
        (b"text=a&threshold=2", 422, "threshold: "),
        (b"text=%00", 200, ""),
        ("text=ä".encode(), 422, "not a form"),
        (b"&".join(b"text=a" for _ in range(200)), 422, "not a form"),
        (b"text=" + b"a" * 20_001, 413, "shorten the text to at most 20,000"),
        (b"text=" + b"%41" * 1_000_000, 413, "longer than 20,000 characters"),
    ],
)
def test_what_is_not_a_form_with_a_text_is_refused(client, project, content, status, message):
    headers = {"content-type": "application/x-www-form-urlencoded"}

    answer = client.post(f"{project}/suggest", content=content, headers=headers)

    assert answer.status_code == status
    assert message in answer.json().get("error", "")


def test_the_longest_text_passes_in_any_form(client, project):
    answer = client.post(f"{project}/suggest", data={"text": "\U0001f41f" * 20_000})

    assert answer.status_code == 200


def test_the_project_is_described_when_its_folder_was_moved(run, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(run / "model", folder)
    with live(folder) as served, served.client() as client:
        folder.rename(tmp_path / "away")

        assert client.get("/v1/projects").status_code == 200


def test_there_is_no_other_project(client):
    for answer in (
        client.get("/v1/projects/other"),
        client.post("/v1/projects/other/suggest", data={"text": "a"}),
        client.post("/v1/projects/other/suggest-batch", json={"documents": [{"text": "a"}]}),
    ):
        assert answer.status_code == 404
        assert "there is no project" in answer.json()["error"]


def test_a_batch_has_at_most_32_texts(client, project):
    documents = [{"text": "a"}] * 33

    answer = client.post(f"{project}/suggest-batch", json={"documents": documents})

    assert answer.status_code == 422


@pytest.mark.skipif(shutil.which("annif") is None, reason="Annif is not installed")
def test_annif_itself_suggests_and_evaluates(client, project, model, texts, tmp_path):
    # the labels of this model have no URIs, so their names take this place
    vocabulary = "".join(f"<{name}>\t{name}\n" for name in model.label_names)
    (tmp_path / "vocabulary.tsv").write_text(vocabulary)
    rows = [f"{text}\t<{model.predict(text, top_k=1).labels[0]}>\n" for text in texts]
    (tmp_path / "corpus.tsv").write_text("".join(rows))
    (tmp_path / "projects.cfg").write_text(
        "[elias]\nname=ELIAS\nlanguage=en\nbackend=http\nvocab=v\nlimit=10\n"
        f"endpoint={str(client.base_url).rstrip('/')}{project}/suggest\n"
    )

    def annif(*args, given=""):
        command = ["annif", *map(str, args)]
        return subprocess.run(
            command, cwd=tmp_path, input=given, capture_output=True, text=True, check=True
        ).stdout

    annif("load-vocab", "--language", "en", "v", "vocabulary.tsv")
    suggested = annif("suggest", "--limit", 3, "elias", given=texts[0])
    measured = annif("eval", "--jobs", 1, "elias", "corpus.tsv")

    labels = [line.split("\t")[1] for line in suggested.splitlines()]
    assert labels == model.predict(texts[0], top_k=3).labels
    assert float(re.search(r"Precision@1:\s+([0-9.]+)", measured)[1]) == 1
