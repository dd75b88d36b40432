"""The specification is true: what it allows is answered, what it forbids is refused, as it says."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from e2e.servers import live
from elias.serve.settings import Limits

EXAMPLES = int(os.environ.get("ELIAS_FUZZ_EXAMPLES", "15"))


@pytest.fixture(scope="module")
def base_url(run):
    with live(run, limits=Limits(max_text=2000)) as served:
        yield served.url


@pytest.fixture(scope="module")
def api(base_url):
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    refusals = schema.config.checks.negative_data_rejection
    refusals.expected_statuses = [*refusals.expected_statuses, "413"]
    return schema


ROUTES = [
    *("POST /predict", "POST /explain", "GET /labels", "GET /labels/{label_id}"),
    *("GET /clusters/{cluster_id}", "GET /health", "GET /ready", "GET /info", "GET /examples"),
    *("GET /metrics", "GET /v1/", "GET /v1/projects", "GET /v1/projects/{project_id}"),
    *("POST /v1/projects/{project_id}/suggest", "POST /v1/projects/{project_id}/suggest-batch"),
]


WITHOUT_INPUT = {
    *("GET /health", "GET /ready", "GET /info", "GET /examples", "GET /metrics"),
    *("GET /v1/", "GET /v1/projects", "GET /v1/projects/{project_id}"),
}
"""Routes that cannot be asked wrongly."""
CASES = [
    *((route, GenerationMode.POSITIVE) for route in ROUTES),
    *((route, GenerationMode.NEGATIVE) for route in ROUTES if route not in WITHOUT_INPUT),
]


BEYOND_SCHEMAS = ("no threshold reached", "words=true explains one text per request")
"""Refusals of what the specification allows: more than the model can do, or too much at once."""


@pytest.fixture(scope="module")
def operations(api):
    return {schema.ok().label: schema.ok() for schema in api.get_all_operations()}


def test_the_routes_are_those_of_the_documentation(operations):
    assert set(operations) == set(ROUTES)
    no_input = {name for name, route in operations.items() if not (route.body or route.query)}
    assert no_input == WITHOUT_INPUT


# by hand, not by its pytest plug-in: that of 4.32 does not know pytest 9.2
@pytest.mark.hypothesis
@pytest.mark.parametrize(("route", "mode"), CASES)
def test_every_route_keeps_to_its_specification(route, mode, operations):
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=operations[route].as_strategy(generation_mode=mode))
    def fuzz(case):
        answer = case.call()
        if not any(reason in answer.text for reason in BEYOND_SCHEMAS):
            case.validate_response(answer)

    fuzz()


def test_every_route_is_documented_with_what_it_does_and_how_it_fails(api):
    for path, methods in api.raw_schema["paths"].items():
        for method, operation in methods.items():
            result = f"{method} {path}"
            assert operation["description"], result
            assert operation["tags"], result
            for status, answer in operation["responses"].items():
                if status.startswith(("4", "5")):
                    shown = answer["content"]["application/json"]["schema"]["$ref"]
                    assert shown.endswith("/Failure"), result
