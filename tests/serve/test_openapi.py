"""/openapi.json says what the server takes: every path, every field, and every reference in it leads somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

from headrace.errors import RequestError
from headrace.serve.fields import IGNORED, sift
from tests.fuzz.http_bodies import BODIES, PATHS
from tests.serve.http_api import Api


@pytest.fixture
def told(api: Api) -> Any:
    answer = api.http.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_path_of_the_server_is_told(api: Api, told: Any) -> None:
    routes = [route for route in api.live.app.routes if isinstance(route, Route)]
    served = {(r.path.replace(":path", ""), m.lower()) for r in routes for m in (r.methods or ()) if m != "HEAD"}
    assert served == {(path, method) for path, of in told["paths"].items() for method in of if method != "parameters"}
    assert {path for path, method in served if method == "post"} == set(PATHS)
    assert told["openapi"].startswith("3.1")


def test_every_reference_leads_somewhere(told: Any) -> None:
    for reference in references(told):
        where: Any = told
        for step in reference.removeprefix("#/").split("/"):
            where = where[step]
        assert isinstance(where, dict)


@pytest.mark.parametrize("path", PATHS)
def test_every_field_is_told(told: Any, path: str) -> None:
    body, refused = BODIES[path]
    of = told["paths"][path]["post"]
    schema = told["components"]["schemas"][body.__name__]
    assert of["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{body.__name__}")
    assert set(schema["properties"]) == {*body.model_fields, *refused, *IGNORED}
    assert schema["additionalProperties"] is False
    assert schema.get("required", []) == [name for name, field in body.model_fields.items() if field.is_required()]
    for name, field in body.model_fields.items():
        assert schema["properties"][name]["description"] == field.description
    assert {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503"} == set(of["responses"])


@pytest.mark.parametrize("path", PATHS)
def test_values_of_refused_fields_that_ask_for_nothing(told: Any, path: str) -> None:
    """The document allows exactly what the server takes."""
    body, refused = BODIES[path]
    schema = told["components"]["schemas"][body.__name__]
    for name, rule in refused.items():
        if name in body.model_fields:
            continue
        neutral = schema["properties"][name]["enum"]
        assert len(neutral) == 1 + len(rule.neutral)
        for value in neutral:
            assert sift({name: value}, body.model_fields, refused) == {}
        with pytest.raises(RequestError, match=f"^{name} is refused"):
            sift({name: "something else"}, body.model_fields, refused)
