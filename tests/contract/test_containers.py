"""Dockerfile, compose.yaml and dashboard refer to what there is; no daemon here to build them."""

import fnmatch
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from contract.documents import ROOT
from elias.cli.app import app
from elias.serve.settings import ServeSettings

pytest.importorskip("prometheus_client")

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/elias.json").read_text(encoding="utf8"))
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf8"))
SERVICES = COMPOSE["services"]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def instructions():
    """Return the Dockerfile's (instruction, rest), continued lines joined and comments gone."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def last_stage():
    steps = instructions()
    start = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    return steps[start:]


def exposed():
    """Return each sample the server tells Prometheus, with the labels it has."""
    from prometheus_client.parser import text_string_to_metric_families

    from elias.serve.prometheus import ServerMetrics

    metrics = ServerMetrics()
    metrics.requests.labels("/predict", "200").inc()
    metrics.request_seconds.labels("/predict").observe(0.1)
    metrics.reloads.labels("failure").inc()
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_hadolint_finds_nothing():
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")

    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, check=False)

    assert done.returncode == 0, done.stdout.decode()


def test_what_the_image_starts_is_a_command_that_parses():
    stage = dict(last_stage())
    words = [*json.loads(stage["ENTRYPOINT"]), *json.loads(stage["CMD"])]

    assert words[:2] == ["elias", "serve"]
    context = get_command(app).commands["serve"].make_context("serve", words[2:])
    assert context.params["host"] == "0.0.0.0"
    assert str(context.params["port"]) == stage["EXPOSE"]


def test_the_image_runs_as_an_unprivileged_user_with_a_health_check():
    stage = dict(last_stage())

    assert int(stage["USER"]) > 0
    assert f"http://127.0.0.1:{stage['EXPOSE']}/ready" in stage["HEALTHCHECK"]


def test_files_that_the_image_copies_exist_and_are_not_ignored():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf8").split()
    included = [line[1:] for line in lines if line.startswith("!")]
    copied = [
        path
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for path in shlex.split(rest)[:-1]
    ]

    assert lines[0] == "*"
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(fnmatch.fnmatch(path, pattern) for pattern in included), path


def test_every_file_that_a_service_mounts_is_there():
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), volume
            elif not volume.startswith("$"):
                assert volume.split(":")[0] in COMPOSE["volumes"], volume


def test_the_service_sees_a_model_that_is_renamed_into_place_and_starts_as_the_image_does():
    given = {"ELIAS_MODELS": "./runs", "ELIAS_MODEL": "articles"}
    service = SERVICES["elias"]
    fill = functools.partial(re.sub, r"\$\{(\w+):\?[^}]*\}", lambda match: given[match[1]])
    model, *options = map(fill, service["command"])
    ((source, target, mode),) = (fill(volume).split(":") for volume in service["volumes"])

    # what is mounted is the folder around the model, whose entries may be exchanged
    assert (source, str(Path(model).parent), mode) == ("./runs", target, "ro")
    assert options[:4] == json.loads(dict(last_stage())["CMD"])[1:5]
    for name, value in given.items():
        assert f"{name}={value}" in (ROOT / "docs/how-to/run-in-containers.md").read_text(
            encoding="utf8"
        )


def test_every_service_is_hardened_and_limited():
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["pids_limit"], name


def test_images_are_pinned_to_a_version_and_no_digest_is_invented():
    bases = {rest.split()[0] for name, rest in instructions() if name == "FROM"}
    images = bases | {one["image"] for one in SERVICES.values() if "build" not in one}

    assert all(re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+[a-z-]*", image) for image in images), images


def test_the_service_requires_a_key_and_prometheus_sends_it():
    (name,) = COMPOSE["secrets"]
    *_, option, file = SERVICES["elias"]["command"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]

    assert (option, file) == ("--api-key-file", f"/run/secrets/{name}")
    assert job["authorization"] == {"credentials_file": file}
    assert all(SERVICES[service]["secrets"] == [name] for service in ("elias", "prometheus"))


def test_the_image_starts_without_a_key_for_this_machine_only():
    words = json.loads(dict(last_stage())["CMD"])
    context = get_command(app).commands["serve"].make_context("serve", words)
    settings = ServeSettings(
        model=Path("m"),
        host=context.params["host"],
        host_names=tuple(context.params["host_name"]),
    )

    assert settings.is_served("127.0.0.1")
    assert not settings.is_served("labels.example.org")


def test_services_wait_for_services_and_listen_on_this_machine_alone():
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", [])) <= set(SERVICES), name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_arguments_of_the_build_are_those_of_the_dockerfile():
    known = {rest.split("=")[0] for name, rest in instructions() if name == "ARG"}

    assert set(SERVICES["elias"]["build"]["args"]) == known


def test_prometheus_asks_a_service_where_it_listens():
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf8"))
    (job,) = settings["scrape_configs"]
    ((host, port),) = (target.split(":") for target in job["static_configs"][0]["targets"])

    assert job["metrics_path"] == "/metrics"
    assert host in SERVICES
    assert port == dict(last_stage())["EXPOSE"]


def test_grafana_finds_prometheus_and_the_dashboard():
    folder = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/elias.yaml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in SERVICES["grafana"]["volumes"])

    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    assert mounted[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    for panel in DASHBOARD["panels"]:
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": source["type"], "uid": source["uid"]}


@pytest.mark.parametrize("query", sorted(set(QUERIES)))
def test_a_query_of_the_dashboard_uses_metrics_of_the_server(query):
    known = exposed()
    names = set(re.findall(r"\belias_\w+", query))
    asked = set(re.findall(r"(\w+)\s*=~?\s*\"", query))
    for listed in re.findall(r"\bby \(([^)]*)\)", query):
        asked |= {label.strip() for label in listed.split(",")}

    assert names
    assert names <= set(known)
    assert asked <= set.union(*(known[name] for name in names))
    assert query.count("(") == query.count(")")


def test_the_dashboard_shows_every_metric():
    shown = set(re.findall(r"\belias_\w+", " ".join(QUERIES)))
    families = {re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in exposed()}

    assert families == {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]

    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (a, b)
    assert max(position["x"] + position["w"] for position in places) <= 24
