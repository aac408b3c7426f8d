"""The documents at ``/openapi.json`` against the doors: every route is in them, and every answer as they say."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import CHECKS

from serve_app import tensors
from serve_app.doors import openapi
from serve_app.types import Call, Event, ModelSpec, Reply, Worker

DOCUMENTS = {
    "inference": openapi.inference(),
    "both": openapi.inference(True),
    "management": openapi.management(),
    "metrics": openapi.metrics(),
}
ASKED = ("GET", "POST", "PUT", "DELETE")
# Where every method is answered alike.
ANY_METHOD = {"TorchServe: inference", "Metrics", "Description"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_valid(name: str) -> None:
    assert list(OpenAPIV31SpecValidator(DOCUMENTS[name]).iter_errors()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nothing_stands_in_it_unused(name: str) -> None:
    said = json.dumps(DOCUMENTS[name])
    for kind in ("schemas", "responses"):
        assert [part for part in DOCUMENTS[name]["components"][kind] if f'/{kind}/{part}"' not in said] == []


# Routes


def routes() -> set[tuple[str, ...]]:
    """Whatever could be a path: what the doors' sources compare paths with, behind all that may stand before it."""
    found: set[tuple[str, ...]] = {()}

    def expanded(pattern: ast.pattern) -> list[list[str]]:
        match pattern:
            case ast.MatchValue(value=ast.Constant(value=str(word))):
                return [[word]]
            case ast.MatchStar():
                return [[], ["m"]]
            case ast.MatchAs(pattern=ast.pattern() as inner):
                return expanded(inner)
            case ast.MatchOr(patterns=some):
                return [each for one in some for each in expanded(one)]
            case ast.MatchSequence(patterns=parts):
                return [sum(each, []) for each in itertools.product(*map(expanded, parts))]
        return [["m"]]

    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.match_case):
                for words in expanded(node.pattern):
                    found.add(tuple(words))
                    found.add(tuple(words[1:]))  # where the first is the method
            if isinstance(node, ast.Dict):  # the inference port's routes, by their first segment
                for key in map(ast.literal_eval, filter(lambda key: isinstance(key, ast.Constant), node.keys)):
                    if isinstance(key, str) and re.fullmatch("[a-z-]+", key):
                        found |= {(key, *rest) for rest in ((), ("m",), ("m", "1.0"))}
    before = [(), ("v1",), ("v2",), ("v2", "models"), ("v2", "models", "m"), ("v2", "models", "m", "versions", "1.0")]
    before += [("models",), ("models", "m"), ("models", "m", "rollout"), ("experiments",), ("workflows",), ("async",)]
    return {(*first, *rest) for first in before for rest in found if "" not in rest}


_DOORS = Path(__file__).parents[2] / "serve_app/doors"
SOURCES = [path for path in sorted(_DOORS.rglob("*.py")) if path.parent.name not in ("openapi", "grpc", "proto")]


def documented(document: dict[str, Any]) -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    def pattern(path: str) -> re.Pattern[str]:
        parts = re.split(r"(\{\w+\})", path)
        inner = {"{url_path}": ".+"}
        rest = "(/.*)?" if path.startswith(("/ping", "/wfpredict")) else ""  # which TorchServe passes over
        return re.compile("".join(inner.get(p, "[^/]+") if p.startswith("{") else re.escape(p) for p in parts) + rest)

    # What is more exact comes first, as the doors have it.
    paths = sorted(document["paths"].items(), key=lambda item: item[0].count("{"))
    return [(pattern(path), operations) for path, operations in paths]


def answered(app: Any, asked: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of the methods and paths that the app has a route for."""

    async def reason(method: str, path: str) -> str | None:
        started: dict[bytes, bytes] = {}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            started.update(message.get("headers", ()))

        scope = {"type": "http", "method": method, "path": path, "headers": [], "http_version": "1.1"}
        await app(scope, receive, send)
        return started.get(b"x-torchrelay-reason", b"").decode()

    async def those() -> list[tuple[str, str]]:
        return [one for one in asked if await reason(*one) not in ("no_route", "method_not_allowed")]

    return asyncio.run(those())


@pytest.fixture
def ports(inference: Any, management: Any) -> dict[str, Any]:
    """The app behind each document, with a model ``m`` of two versions."""
    managed = management()
    for shelf in (managed.shelf,):
        shelf.put(ModelSpec("m", "1.0", "m.mar", "", ""), Worker("w", 1.0, 1, ""))
    return {"inference": inference(), "management": managed, "both": inference(also_management=True)}


@pytest.mark.parametrize("port", ["inference", "management", "both"])
def test_every_route_is_described(ports: dict[str, Any], port: str) -> None:
    described = documented(DOCUMENTS[port])
    missing = []
    paths = sorted("/" + "/".join(words) for words in routes())
    for method, path in answered(ports[port].app, itertools.product(ASKED, paths)):
        fits = [operations for pattern, operations in described if pattern.fullmatch(path)]
        tags = {operation["tags"][0] for operations in fits for operation in operations.values()}
        if not tags & ANY_METHOD and not any(method.lower() in operations for operations in fits):
            missing.append(f"{method} {path}")
    assert missing == []


@pytest.mark.parametrize("port", ["inference", "management", "both"])
def test_everything_that_is_described_is_answered(ports: dict[str, Any], port: str) -> None:
    values = {"model_version": "1.0", "experiment_id": "e1", "id": "0" * 32, "url_path": "v1/completions"}
    asked = []
    for path, operations in DOCUMENTS[port]["paths"].items():
        if path not in ("/token", "/metrics"):  # there where keys are wanted, and where metrics are
            here = {**values, "id": "m"} if path.startswith("/v1/models/") else values
            filled = re.sub(r"\{(\w+)\}", lambda found, here=here: here.get(found[1], "m"), path)
            asked += [(method.upper(), filled) for method in operations]
    assert sorted(set(asked) - set(answered(ports[port].app, asked))) == []


def test_a_port_says_its_document(inference: Any) -> None:
    assert json.loads(inference()("GET", "/openapi.json").body) == DOCUMENTS["inference"]
    assert inference()("POST", "/openapi.json").status == 405
    assert {"/metrics", "/openapi.json"} < set(DOCUMENTS["metrics"]["paths"])


@pytest.mark.parametrize("port", ["inference", "management", "both"])
def test_a_refused_method_is_told_which_there_are(ports: dict[str, Any], port: str) -> None:
    for path, operations in DOCUMENTS[port]["paths"].items():
        here = {"id": "m" if path.startswith("/v1/models/") else "0" * 32, "url_path": "v1/completions"}
        answer = ports[port]("TRACE", re.sub(r"\{(\w+)\}", lambda found, here=here: here.get(found[1], "m"), path))
        assert answer.status == 405, path
        allowed = set(answer["allow"].split(", "))
        assert {method.upper() for method in operations} <= allowed <= {*METHODS, "HEAD", "OPTIONS"}, path
    refused = ports[port]("DELETE", "/openapi.json")
    assert (refused.status, refused["allow"]) == (405, "GET, HEAD, OPTIONS")


# Answers

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")
CHECKED = ("status_code_conformance", "content_type_conformance", "response_headers_conformance")
CHECKED += ("response_schema_conformance",)


async def echo(call: Call) -> Reply:
    """Takes whatever comes: tensors as themselves, what is asked by OpenAI's API in its form."""
    if "embeddings" in call.headers.get("url_path", ""):
        return Reply(b"[0.5]", "application/json", version="1.0")
    tensors_ = [part for part in call.inputs if (part.content_type or "").startswith("application/x-tensor;")]
    if tensors_:
        given = [tensors.received(part.name, part.value, part.content_type or "") for part in tensors_]
        return Reply(tensors.pack(given), tensors.PACKED, version="1.0")
    return Reply(b'{"choices": [{"text": "x"}]}', version="1.0")


def kept(shelf: Any) -> None:
    """Answers to what the shelf does not keep, in the form of the ones that do."""
    policy = {"policy": "default", "in_force": {"by": "policy", "default": "1.0", "versions": {"1.0": 10000}}}
    arms = {name: {"version": version, "weight": 5000} for name, version in (("a", "1.0"), ("b", "2.0"))}
    experiment = {"id": "e1", "name": "e", "model": "m", "state": "running", "arms": arms, "baseline": "a"}
    rollout = {"model": "m", "id": "r", "baseline": "1.0", "to": "2.0", "state": "running", "percent": 5.0, "plan": {}}
    rollout |= {"figures": {}, "guardrails": [], "decisions": []}
    workflow = {"workflowName": "w", "workflowUrl": "", "workflowVersion": "1.0", "defaultVersion": True}
    deferral = {"id": "0" * 32, "state": "queued", "model": "m", "version": None, "created": 1.0, "self": "/async/0"}

    def says(answer: Any) -> Any:
        async def said(*_: Any) -> Any:
            return answer

        return said

    shelf.traffic = shelf.set_traffic = says(policy)
    shelf.begin_experiment = shelf.experiment = shelf.stop_experiment = says(experiment)
    shelf.experiments = says([experiment])
    shelf.reward = says({"counted": 1, "repeated": 0})
    shelf.begin_rollout = shelf.rollout = shelf.steer_rollout = says(rollout)
    shelf.workflows = says([("w", "")])
    shelf.workflow = says([{**workflow, "steps": {}, "output": []}])
    shelf.defer = shelf.deferral = shelf.cancel_deferral = says({**deferral, "result": None})
    shelf.deferred_answer = says(({**deferral, "result": None}, None))
    shelf.figures = says([])
    shelf.events = says([Event(1, "", "m", "1.0", "ready", 1.0, {})])


def near(value: Any) -> Any:
    """Mostly a model that is there: an invented name is only ever not found."""
    return "m" if len(value) % 3 else value


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the tests' own tool is another there")
@pytest.mark.parametrize("port", ["inference", "management", "both"])
def test_answers_are_as_they_are_described(inference: Any, management: Any, port: str) -> None:
    """Generated requests, the same ones each time, by schemathesis over the bare interface."""
    managed = management()
    for version in ("1.0", "2.0"):
        managed.shelf.put(ModelSpec("m", version, "m.mar", "", ""), Worker("w", 1.0, 1, ""))
    kept(managed.shelf)
    app = {
        "inference": lambda: inference(echo, keeper=managed.shelf).app,
        "both": lambda: inference(echo, keeper=managed.shelf, also_management=True).app,
        "management": lambda: managed.app,
    }[port]()
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)

    @schema.hook
    def map_path_parameters(context: Any, parameters: Any) -> Any:
        if parameters and "model_name" in parameters:
            parameters["model_name"] = near(parameters["model_name"])
        return parameters

    checks = [CHECKS.get_one(name) for name in CHECKED]
    for found in schema.get_all_operations():
        operation = found.ok()
        if port == "both" and operation.tags[0] not in ("OpenAI", "TorchServe: management"):
            continue  # asked on the other ports

        @seed(7)
        @given(case=operation.as_strategy())
        @settings(
            max_examples=8,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: Any) -> None:
            if case.query:
                case.query.pop("follow", None)  # a stream without an end is no answer to look at
            response = case.call()
            case.validate_response(response, checks=checks)
            reason = response.headers.get("x-torchrelay-reason", [""])[0]
            assert reason != "internal", f"{case.method} {case.path}: a fault of the server"

        holds()
