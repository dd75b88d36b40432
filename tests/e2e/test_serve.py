"""The routes of a server: what they answer, what they refuse, what they tell."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from e2e.commands import SOURCE
from e2e.servers import live
from elias import Elias
from elias.serve.settings import Limits

KEY = "a-key-of-sixteen-characters"
SMALL = Limits(max_inputs=4, max_text=200, max_body=2000, max_batch=4, max_queue=4, timeout=5)


@pytest.fixture(scope="module")
def server(run):
    with live(run, limits=Limits(max_inputs=8, max_text=500, max_body=40_000)) as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client


class Slow:
    """Holds up every batch of a server until it is let go."""

    def __init__(self, served, monkeypatch):
        self.may_go = threading.Event()
        self.begun = threading.Event()
        self.texts = []
        backend = served.backend
        true = backend.served.compute

        def compute(questions):
            self.texts += [text for question in questions for text in question.texts]
            self.begun.set()
            self.may_go.wait(20)
            return true(questions)

        monkeypatch.setattr(backend.served, "compute", compute)


def test_predict_answers_what_the_model_predicts(client, model, texts):
    answer = client.post("/predict", json={"inputs": texts, "top_k": 3})
    single = client.post("/predict", json={"inputs": texts[0], "top_k": 3})

    assert answer.status_code == 200
    expected = model.predict(texts, top_k=3).to_dicts()
    assert [[label["id"] for label in row] for row in answer.json()] == [
        [label["id"] for label in row] for row in expected
    ]
    assert answer.json()[0][0]["score"] == pytest.approx(expected[0][0]["score"], rel=1e-4)
    assert [[label["id"] for label in row] for row in single.json()] == [
        [label["id"] for label in expected[0]]
    ]


def test_requests_for_different_depths_get_their_own(client, texts):
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda k: client.post("/predict", json={"inputs": texts[:1], "top_k": k}).json(),
                [1, 20, 5, 3, 20, 2, 1, 7],
            )
        )

    assert [len(answer[0]) for answer in answers] == [1, 20, 5, 3, 20, 2, 1, 7]
    longest = [label["id"] for label in answers[1][0]]
    assert all(longest[: len(a[0])] == [label["id"] for label in a[0]] for a in answers)


def test_a_threshold_leaves_out_what_is_less_probable(client, texts):
    every = client.post("/predict", json={"inputs": texts[:1], "top_k": 100}).json()[0]
    lowest = every[3]["probability"]

    body = {"inputs": texts[:1], "threshold": lowest - 1e-6}
    remaining = client.post("/predict", json=body).json()[0]

    assert remaining == [label for label in every if label["probability"] >= lowest]


@pytest.mark.parametrize("target", ["f1", "precision=0.3", "recall=0.2"])
def test_a_threshold_may_be_a_target(client, model, texts, target):
    (remaining, *_) = client.post("/predict", json={"inputs": texts, "threshold": target}).json()

    expected = model.predict(texts, threshold=target)[0]
    assert [label["id"] for label in remaining] == expected.ids.tolist()


def test_info_returns_precision_and_recall_by_threshold(client, model):
    decisions = client.get("/info").json()["decisions"]

    assert decisions["f1"] == model.threshold("f1")
    assert len(decisions["thresholds"]) == len(decisions["precision"]) == len(decisions["recall"])


def test_explain_returns_the_paths_to_each_label(client, model, texts):
    (why,) = client.post("/explain", json={"inputs": texts[:1], "top_k": 2}).json()

    expected = model.explain(texts[:1], top_k=2)[0].to_dict()
    assert [label["id"] for label in why["labels"]] == [one["id"] for one in expected["labels"]]
    assert why["labels"][0]["paths"][0]["won"]
    known = {cluster["id"] for cluster in why["clusters"]}
    assert known == {path["cluster"] for label in why["labels"] for path in label["paths"]}
    assert "text" not in why


def test_explain_measures_the_effect_of_words_of_one_text(client, model, texts):
    (expected,) = model.explain(texts[:1], top_k=1, words=True)
    label = expected.to_dict()["labels"][0]

    body = {"inputs": texts[:1], "label": label["id"], "words": True}
    (why,) = client.post("/explain", json=body).json()
    refused = client.post("/explain", json={"inputs": texts[:2], "words": True})

    assert why["labels"][0]["words"] == list(label["words"])
    assert why["labels"][0]["terms"] == list(label["terms"])
    assert refused.status_code == 413


def test_web_pages_of_an_allowed_origin_can_use_the_server(run, texts):
    page = {"origin": "https://library.example"}
    wants = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    body = {"inputs": texts[:1]}
    settings = {"keys": (KEY,), "allow_origins": (page["origin"],)}
    with live(run, **settings) as served, served.client() as client:
        asked = client.options("/predict", headers=page | wants)
        other = client.options("/predict", headers=wants | {"origin": "https://evil.example"})
        answer = client.post("/predict", json=body, headers=page | {"x-api-key": KEY})
        refused = client.post("/predict", json=body, headers=page)

    allowed = "access-control-allow-origin"
    assert (asked.status_code, asked.headers[allowed]) == (200, page["origin"])
    assert other.status_code == 400
    assert allowed not in other.headers
    assert (answer.status_code, answer.headers[allowed]) == (200, page["origin"])
    assert (refused.status_code, refused.headers[allowed]) == (401, page["origin"])


def test_without_an_allowed_origin_no_page_is_told_that_it_may_ask(client):
    answer = client.get("/info", headers={"origin": "http://localhost"})

    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_explain_of_one_label_returns_only_that_label(client, texts):
    (every,) = client.post("/predict", json={"inputs": texts[:1], "top_k": 9}).json()

    (why,) = client.post("/explain", json={"inputs": texts[:1], "label": every[8]["id"]}).json()

    assert [label["id"] for label in why["labels"]] == [every[8]["id"]]


def test_a_label_is_found_by_name_and_leads_to_its_clusters_and_back(client, model):
    name = model.label_names[7]

    (hit, *_) = client.get("/labels", params={"q": name.upper()}).json()["labels"]
    label = client.get(f"/labels/{hit['id']}").json()
    cluster = client.get(f"/clusters/{label['clusters'][0]['id']}", params={"limit": 200}).json()

    assert hit["label"] == label["label"] == name
    assert 7 in [edge["id"] for edge in cluster["labels"]]
    strengths = [edge["edge_score"] for edge in cluster["labels"]]
    assert strengths == sorted(strengths, reverse=True)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "output"),
    [
        ("POST", "/predict", {"inputs": []}, 422, "inputs: List should have at least 1 item"),
        ("POST", "/predict", {"inputs": 3}, 422, "inputs: Input should be a valid list"),
        ("POST", "/predict", {"inputs": "a" * 501}, 413, "501 characters; shorten the text"),
        ("POST", "/predict", {"inputs": ["a"], "top_k": 0}, 422, "top_k"),
        ("POST", "/predict", {"inputs": ["a"], "top_k": 101}, 422, "top_k"),
        ("POST", "/predict", {"inputs": ["a"], "topk": 3}, 422, "'topk'; did you mean 'top_k'?"),
        (
            "POST",
            "/predict",
            {"text": "a"},
            422,
            "unknown key 'text'; use one of: inputs, top_k, threshold",
        ),
        ("POST", "/predict", {"inputs": [1]}, 422, "inputs.0: Input should be a valid string"),
        ("POST", "/predict", {"inputs": ["a"] * 9}, 413, "9 texts; send at most 8 per request"),
        ("POST", "/predict", {"inputs": ["a" * 501]}, 413, "501 characters; shorten the text"),
        ("POST", "/predict", {"inputs": ["a" * 50_000]}, 413, "larger than 40,000 bytes"),
        ("POST", "/explain", {"inputs": ["a"], "label": 10**6}, 404, "no label 1000000"),
        ("GET", "/labels/1000000", None, 404, "no label 1000000"),
        ("GET", "/labels/1?member=3", None, 404, "no member 3"),
        ("GET", "/clusters/1000000", None, 404, "no cluster 1000000"),
        ("GET", "/labels/fish", None, 422, "label_id"),
        ("GET", "/labels?query=oc", None, 422, "unknown parameter 'query'; use one of: q, limit"),
        ("GET", "/clusters/1?limits=2", None, 422, "'limits'; did you mean 'limit'?"),
        ("GET", "/nothing", None, 404, "Not Found"),
        ("GET", "/predict", None, 405, "Method Not Allowed"),
    ],
)
def test_invalid_requests_get_errors_of_one_form(client, method, path, body, status, output):
    answer = client.request(method, path, json=body)

    assert answer.status_code == status
    assert set(answer.json()) == {"error", "error_type"}
    assert output in answer.json()["error"]


@pytest.mark.parametrize("path", ["/predict", "/explain"])
@pytest.mark.parametrize(
    ("content", "status", "output"),
    [
        (b'{"inputs": [' + b"1," * 15_000 + b"1]}", 413, "bytes outside of strings"),
        (b'{"inputs": [' + b"1," * 3000 + b"1]}", 422, "inputs.0: Input should be a valid string"),
        (b'{"inputs": [' + b'"",' * 5000 + b'""]}', 413, "1,016 strings; send at most 8 texts"),
        (
            b"{" + b",".join(b'"%d": 1' % i for i in range(2000)) + b"}",
            413,
            "more than 1,016 strings",
        ),
        (
            b"{" + b",".join(b'"%d": 1' % i for i in range(900)) + b"}",
            422,
            "unknown key '0'; use one of: inputs, top_k",
        ),
        (b'{"inputs": ' + b"[" * 30_000, 413, "bytes outside of strings"),
        (b'{"inputs": ' + b"[" * 4000 + b"]" * 4000 + b"}", 422, "the body is not valid JSON"),
        ('{"inputs": ["a"]}'.encode("utf-16"), 422, "the body is not valid JSON"),
    ],
)
def test_a_body_with_very_many_values_is_refused(client, path, content, status, output):
    headers = {"content-type": "application/json"}

    answer = client.post(path, content=content, headers=headers)

    assert answer.status_code == status
    assert output in answer.json()["error"]
    assert answer.json()["error"].count("Input should be") <= 1


def test_a_body_that_is_not_json_is_refused_without_quoting_it(client):
    answer = client.post(
        "/predict", content=b'{"inputs": ["sec', headers={"content-type": "application/json"}
    )

    assert answer.status_code == 422
    assert answer.json()["error"].startswith("the body is not valid JSON")


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_body_that_is_not_sent_as_json_is_told_the_header(client, content_type):
    answer = client.post(
        "/predict", content=b'{"inputs": ["a"]}', headers={"content-type": content_type}
    )

    assert answer.status_code == 422
    assert answer.json()["error"].endswith("; send the header content-type: application/json")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/predict", "threshold"),
        ("/predict", "top_k"),
        ("/explain", "top_k"),
        ("/explain", "paths"),
        ("/explain", "label"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(client, path, name, number):
    answer = client.post(
        path,
        content=f'{{"inputs": ["a text"], "{name}": {number}}}',
        headers={"content-type": "application/json"},
    )

    assert answer.status_code == 422
    assert name in answer.json()["error"]


def test_a_body_without_a_length_is_cut_off_where_it_gets_too_large(client):
    def endless():
        for _ in range(30):
            yield b"x" * 1000

    answer = client.post("/predict", content=endless())

    assert answer.status_code == 413


@pytest.mark.parametrize("text", ["", " ", "\x00", "\U0001f41f fish", "עברית"])
def test_any_text_is_answered(client, text):
    answer = client.post("/predict", json={"inputs": [text]})

    assert answer.status_code == 200
    assert len(answer.json()) == 1


def test_a_lone_surrogate_is_answered_or_refused_but_no_error_of_ours(client):
    answer = client.post(
        "/predict",
        content=b'{"inputs": ["\\ud800 fish"]}',
        headers={"content-type": "application/json"},
    )

    assert answer.status_code in (200, 422)
    assert answer.json()


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/health", "/ready", "/info", "/metrics", "/labels/1", "/openapi.json"]
)
def test_head_answers_like_get_without_a_body(client, path):
    head, get = client.head(path), client.get(path)

    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_is_logged_by_its_route_and_refused_where_get_is(client, caplog):
    with caplog.at_level(logging.INFO, logger="elias.access"):
        actual = client.head("/labels/1")
        refused = client.head("/predict")
        client.get("/health")  # answered once the line above is written, and not logged itself
    output = [json.loads(record.getMessage()) for record in caplog.records]
    lines = [line for line in output if line["method"] == "HEAD"]

    assert [actual.status_code, refused.status_code] == [200, 405]
    assert [(line["method"], line["route"]) for line in lines] == [
        ("HEAD", "/labels/{label_id}"),
        ("HEAD", "/predict"),
    ]


def test_nothing_redirects_to_the_host_name_of_a_request(client):
    for path in ("/predict/", "/docs/", "/labels/"):
        answer = client.get(path)

        assert answer.status_code == 404
        assert "location" not in answer.headers


def test_a_name_that_a_web_page_has_rebound_is_not_served(client):
    rebound = {"host": "evil.example:8000"}

    assert client.get("/info", headers=rebound).status_code == 421
    assert client.get("/", headers=rebound).status_code == 421
    assert client.get("/health", headers=rebound).status_code == 200


def test_health_and_ready_return_the_state(client, model):
    info = client.get("/info").json()

    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready"}
    assert info["n_labels"] == model.n_labels
    assert info["components"] == list(model.components)
    assert info["limits"]["max_inputs"] == 8
    assert info["model"] == "run"  # a name, no path of the server's


def test_metrics_count_requests_texts_and_the_queue(client, texts):
    def number(line):
        actual = [ln for ln in client.get("/metrics").text.splitlines() if ln.startswith(line)]
        return float(actual[0].rpartition(" ")[2]) if actual else 0.0

    before = number("elias_batch_size_sum")
    asked = 'elias_requests_total{route="/predict",status="200"}'
    requests = number(asked)
    client.post("/predict", json={"inputs": texts})

    assert number("elias_batch_size_sum") == before + 3
    assert number(asked) == requests + 1
    assert number("elias_queue_depth") == 0
    assert number('elias_request_duration_seconds_count{route="/predict"}') >= 1


def test_every_answer_has_an_id_and_keeps_one_that_was_sent(client):
    assert client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == (
        "abc-1"
    )
    assert len(client.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 16


def test_the_log_has_a_line_of_json_for_each_request_without_its_text(client, caplog):
    with caplog.at_level(logging.INFO, logger="elias.access"):
        client.post("/predict", json={"inputs": ["a very secret text"]})
        client.get("/labels", params={"q": "secret too"})

    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [line["route"] for line in lines] == ["/predict", "/labels"]
    assert lines[0]["status"] == 200
    assert lines[0]["inputs"] == 1
    assert lines[0]["ms"] > 0
    assert "secret" not in caplog.text


def test_the_log_has_texts_with_log_texts(run, caplog):
    caplog.set_level(logging.INFO, logger="elias.access")
    with live(run, log_texts=True) as served, served.client() as client:
        client.post("/predict", json={"inputs": ["a text to log"]})

    assert "a text to log" in caplog.text


def test_control_characters_in_texts_and_headers_are_escaped_in_the_log(run, caplog):
    caplog.set_level(logging.INFO, logger="elias.access")
    with live(run, log_texts=True) as served, served.client() as client:
        client.post("/predict", json={"inputs": ["red \x9b31m"]})
        client.get("/info", headers={"x-forwarded-for": b"\x9b31m\x7f"})

    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() for line in lines)
    assert json.loads(lines[0])["texts"] == ["red \x9b31m"]


def test_labels_that_are_not_unicode_are_served(run, tmp_path):
    Elias.from_pretrained(run, device="cpu").rename_label(0, "a\udcff").save_pretrained(
        tmp_path / "m"
    )

    with live(tmp_path / "m") as served, served.client() as client:
        label = client.get("/labels/0")
        ranked = client.post("/predict", json={"inputs": ["a text"], "top_k": 100})

    assert label.json()["label"] == "a\ufffd"
    assert ranked.status_code == 200
    assert "a\ufffd" in {label["label"] for label in ranked.json()[0]}


def test_without_a_key_the_server_reveals_nothing_about_its_model(run):
    with live(run, keys=(f"{KEY}-other", KEY)) as served, served.client() as client:
        closed = ["/info", "/labels", "/labels/1", "/clusters/1", "/metrics", "/examples"]
        assert {client.get(path).status_code for path in [*closed, "/openapi.json"]} == {401}
        assert client.post("/predict", json={"inputs": ["a"]}).status_code == 401
        for path in ("/", "/page/page.js", "/page/page.css", "/docs", "/health", "/ready"):
            assert client.get(path).status_code == 200
        for header in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            assert client.get("/info", headers=header).status_code == 200
        for header in ({"authorization": f"Basic {KEY}"}, {"x-api-key": KEY[:-1]}):
            answer = client.get("/info", headers=header)
            assert answer.status_code == 401
            assert answer.json()["error_type"] == "Unauthorized"
            assert KEY not in answer.text


def test_overload_is_answered_429_with_retry_after(run, monkeypatch):
    with live(run, limits=SMALL) as served, served.client() as client:
        slow = Slow(served, monkeypatch)
        with ThreadPoolExecutor(12) as pool:
            sent = [
                pool.submit(client.post, "/predict", json={"inputs": [f"text {i}"]})
                for i in range(12)
            ]
            assert slow.begun.wait(10)
            deadline = time.monotonic() + 10
            while sum(one.done() for one in sent) < 4 and time.monotonic() < deadline:
                time.sleep(0.01)
            slow.may_go.set()
            answers = [one.result() for one in sent]

    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 5  # one computed, four in the queue
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error_type"] == "Overloaded"


def test_a_timeout_is_answered_503_and_the_server_continues(run, monkeypatch):
    limits = Limits(timeout=0.3)
    with live(run, limits=limits) as served, served.client() as client:
        slow = Slow(served, monkeypatch)
        late = client.post("/predict", json={"inputs": ["a"]})
        waiting = client.post("/predict", json={"inputs": ["was waiting, not computed"]})
        slow.may_go.set()
        time.sleep(0.05)
        after = client.post("/predict", json={"inputs": ["b"]})

    assert late.status_code == waiting.status_code == 503
    assert int(late.headers["retry-after"]) >= 1
    assert after.status_code == 200
    assert slow.texts == ["a", "b"]


def test_requests_of_disconnected_clients_are_not_computed(run, monkeypatch):
    with live(run) as served, served.client() as client:
        slow = Slow(served, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(client.post, "/predict", json={"inputs": ["first"]})
            assert slow.begun.wait(10)
            with pytest.raises(httpx.TimeoutException), served.client() as hasty:
                hasty.post("/predict", json={"inputs": ["given up"]}, timeout=0.2)
            time.sleep(0.1)
            slow.may_go.set()
            assert first.result().status_code == 200

    assert slow.texts == ["first"]


def test_a_body_that_does_not_arrive_times_out(run):
    with live(run, limits=Limits(timeout=0.3), load=False) as served:

        async def trickle():
            host, port = served.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
            )
            await writer.drain()
            status = await asyncio.wait_for(reader.readline(), 10)
            writer.close()
            return status

        assert b"408" in asyncio.run(trickle())


def test_without_a_model_a_server_is_healthy_but_not_ready(run):
    with live(run, load=False) as served, served.client() as client:
        assert client.get("/health").status_code == 200
        for answer in (client.get("/ready"), client.post("/predict", json={"inputs": ["a"]})):
            assert answer.status_code == 503
            assert answer.json()["error_type"] == "Unhealthy"
            assert answer.headers["retry-after"] == "1"


def test_a_bug_is_answered_500_and_logged_without_the_text(run, monkeypatch, caplog):
    def broken(questions):
        raise ValueError(f"cannot do {questions[0].texts}")

    with live(run) as served, served.client() as client:
        monkeypatch.setattr(served.backend.served, "compute", broken)
        with caplog.at_level(logging.INFO, logger="elias.access"):
            answer = client.post("/predict", json={"inputs": ["secret"]})

    assert answer.status_code == 500
    assert answer.json()["error_type"] == "Backend"
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


def test_a_reload_takes_the_new_model_and_a_broken_one_is_left(run, tmp_path):
    model = Elias.from_pretrained(run, device="cpu")
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    with live(folder) as served, served.client() as client:
        reload = served.backend.reload
        before = client.get("/info").json()["loaded_at"]
        done = asyncio.run_coroutine_threadsafe(reload(), served.loop).result(30)
        after = client.get("/info").json()["loaded_at"]
        (folder / "labels.tsv").unlink()
        broken = asyncio.run_coroutine_threadsafe(reload(), served.loop).result(30)

        assert done
        assert not broken
        assert after > before
        assert client.get("/info").json()["loaded_at"] == after
        assert client.post("/predict", json={"inputs": ["a"]}).status_code == 200
        assert 'elias_reloads_total{outcome="failure"} 1.0' in client.get("/metrics").text


def test_examples_are_those_given_or_else_names_of_labels(run, client, model):
    with live(run, examples=("one", "two")) as served, served.client() as other:
        assert other.get("/examples").json() == {"examples": ["one", "two"]}

    assert set(client.get("/examples").json()["examples"]) <= set(model.label_names)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's /proc")
def test_workers_share_the_weights_because_they_are_mapped_from_the_files(model, texts):
    model.predict(texts)  # makes what is made at first use
    (values, labels, _), _ = model.reranker.ranker._arrays
    large = {
        "W_L": model.model.labels.weight.data_ptr(),
        "word vectors": model.model.encoder.vectors.data_ptr(),
        "weights of the ranker": values.ctypes.data,
        "their labels": labels.ctypes.data,
    }
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(end, 16) for end in fields[0].split("-")] for fields in maps]

    for name, address in large.items():
        (number,) = [i for i, (start, end) in enumerate(ranges) if start <= address < end]
        assert maps[number][-1].endswith(".safetensors"), name


def test_loading_a_model_does_not_import_the_compiler_of_torch(run):
    code = f"import sys, elias; elias.Elias.from_pretrained({str(run)!r}); "
    code += "print('torch._dynamo' in sys.modules)"

    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )

    assert done.stdout.strip() == "False"
