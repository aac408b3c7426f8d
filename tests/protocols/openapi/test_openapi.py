"""The documents at ``/openapi.json`` against the protocols: they describe every route and every response."""

from __future__ import annotations

import ast
import asyncio
import gzip
import itertools
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import CHECKS

from serve_app.control.rollouts import state_machine
from serve_app.domain import tensors
from serve_app.domain.async_prediction import AsyncPrediction
from serve_app.domain.model import ModelEvent, ModelSpec, ReplicaInfo
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.domain.rollout import Rollout, RolloutPlan
from serve_app.protocols import openapi
from serve_app.protocols.http_app import metrics_app
from serve_app.settings import ManagementSettings, Settings

pytestmark = pytest.mark.integration


DOCUMENTS = {
    "inference": openapi.inference().content,
    "both": openapi.inference(True).content,
    "management": openapi.management().content,
    "metrics": openapi.metrics().content,
}
METHODS_TO_CHECK = ("GET", "POST", "PUT", "DELETE")
# Tags of paths that serve every method alike.
ANY_METHOD = {"TorchServe: inference", "Metrics", "Description"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_valid(name: str) -> None:
    assert list(OpenAPIV31SpecValidator(DOCUMENTS[name]).iter_errors()) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_component_is_used(name: str) -> None:
    document_text = json.dumps(DOCUMENTS[name])
    for kind in ("schemas", "responses"):
        assert [
            part for part in DOCUMENTS[name]["components"][kind] if f'/{kind}/{part}"' not in document_text
        ] == []


# Routes


def candidate_paths() -> set[tuple[str, ...]]:
    """Return all possible paths: segments compared in the protocols' sources, after every possible prefix."""
    paths_found: set[tuple[str, ...]] = {()}

    def expand(pattern: ast.pattern) -> list[list[str]]:
        match pattern:
            case ast.MatchValue(value=ast.Constant(value=str(constant))):
                return [[constant]]
            case ast.MatchStar():
                return [[], ["m"]]
            case ast.MatchAs(pattern=ast.pattern() as subpattern):
                return expand(subpattern)
            case ast.MatchOr(patterns=alternatives):
                return [path for alternative in alternatives for path in expand(alternative)]
            case ast.MatchSequence(patterns=parts):
                combinations = itertools.product(*map(expand, parts))
                return [list(itertools.chain.from_iterable(combination)) for combination in combinations]
        return [["m"]]

    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.match_case):
                for segments in expand(node.pattern):
                    paths_found.add(tuple(segments))
                    paths_found.add(tuple(segments[1:]))  # if the first segment is the method
            if isinstance(node, ast.Dict):  # the inference port's routes, by their first segment
                for key in map(
                    ast.literal_eval, filter(lambda key: isinstance(key, ast.Constant), node.keys)
                ):
                    if isinstance(key, str) and re.fullmatch("[a-z-]+", key):
                        paths_found |= {(key, *rest) for rest in ((), ("m",), ("m", "1.0"))}
    for endpoint in openapi.management().table.endpoints:
        paths_found.add(tuple(re.sub(r"{\w+}", "m", endpoint.path).strip("/").split("/")))
    prefixes = [
        (),
        ("v1",),
        ("v2",),
        ("v2", "models"),
        ("v2", "models", "m"),
        ("v2", "models", "m", "versions", "1.0"),
    ]
    prefixes += [
        ("models",),
        ("models", "m"),
        ("models", "m", "rollout"),
        ("experiments",),
        ("workflows",),
        ("async",),
    ]
    return {(*first, *rest) for first in prefixes for rest in paths_found if "" not in rest}


_PROTOCOLS = Path(__file__).parents[3] / "serve_app/protocols"
SOURCES = [
    path for path in sorted(_PROTOCOLS.rglob("*.py")) if path.parent.name not in ("openapi", "grpc", "proto")
]


def compile_paths(document: dict[str, Any]) -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    def pattern(path: str) -> re.Pattern[str]:
        parts = re.split(r"(\{\w+\})", path)
        segment_patterns = {"{url_path}": ".+"}
        rest = "(/.*)?" if path.startswith(("/ping", "/wfpredict")) else ""  # which TorchServe ignores
        return re.compile(
            "".join(segment_patterns.get(p, "[^/]+") if p.startswith("{") else re.escape(p) for p in parts)
            + rest
        )

    # More specific paths come first, as in the routers.
    paths = sorted(document["paths"].items(), key=lambda item: item[0].count("{"))
    return [(pattern(path), operations) for path, operations in paths]


def find_routed(app: Any, requests: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the methods and paths that the app has a route for."""

    async def reason(method: str, path: str) -> str | None:
        started: dict[bytes, bytes] = {}
        messages = [{"type": "http.request", "body": b""}]

        async def receive() -> dict[str, Any]:
            if not messages:  # the client stays connected
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            started.update(message.get("headers", ()))

        scope = {"type": "http", "method": method, "path": path, "headers": [], "http_version": "1.1"}
        await app(scope, receive, send)
        return started.get(b"x-torchrelay-reason", b"").decode()

    async def collect() -> list[tuple[str, str]]:
        return [item for item in requests if await reason(*item) not in ("no_route", "method_not_allowed")]

    return asyncio.run(collect())


@pytest.fixture
def ports(asgi_inference: Any, management: Any) -> dict[str, Any]:
    """Return the app of each document, with a model ``m``."""
    management_app = management()
    for control_api in (management_app.control_api,):
        control_api.put(ModelSpec("m", "1.0", "m.mar", "", ""), ReplicaInfo("w", 1.0, 1, ""))
    return {
        "inference": asgi_inference(),
        "management": management_app,
        "both": asgi_inference(serve_management=True),
    }


@pytest.mark.parametrize("port", ["inference", "management", "both"])
def test_every_route_is_described(ports: dict[str, Any], port: str) -> None:
    described_paths = compile_paths(DOCUMENTS[port])
    missing = []
    paths = sorted("/" + "/".join(segments) for segments in candidate_paths())
    for method, path in find_routed(ports[port].app, itertools.product(METHODS_TO_CHECK, paths)):
        matching = [operations for pattern, operations in described_paths if pattern.fullmatch(path)]
        tags = {operation["tags"][0] for operations in matching for operation in operations.values()}
        if not tags & ANY_METHOD and not any(method.lower() in operations for operations in matching):
            missing.append(f"{method} {path}")
    assert missing == []


@pytest.mark.parametrize("port", ["inference", "management", "both"])
def test_every_described_operation_is_routed(ports: dict[str, Any], port: str) -> None:
    values = {"model_version": "1.0", "experiment_id": "e1", "id": "0" * 32, "url_path": "v1/completions"}
    requests = []
    for path, operations in DOCUMENTS[port]["paths"].items():
        if path not in ("/token", "/metrics"):  # served only with keys, and on the metrics port
            path_with_values = re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], "m"), path)
            requests += [(method.upper(), path_with_values) for method in operations]
    assert sorted(set(requests) - set(find_routed(ports[port].app, requests))) == []


def test_each_port_serves_its_document(inference: Any) -> None:
    assert json.loads(inference()("GET", "/openapi.json").body) == DOCUMENTS["inference"]
    assert inference()("POST", "/openapi.json").status == 405
    assert {"/metrics", "/openapi.json"} < set(DOCUMENTS["metrics"]["paths"])


def test_each_port_serves_a_page_for_its_document(inference: Any, management: Any) -> None:
    for port in (inference(), management()):
        page = port("GET", "/docs")
        assert (page.status, page["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page["content-security-policy"]
        files = re.findall(rb'(?:href|src)="(docs/[^"]+)"', page.body)
        assert len(files) == 4
        for file in files:
            answer = port("GET", f"/{file.decode()}")
            assert answer.status == 200 and len(answer.body) > 100
            if file != b"docs/start.js":
                compressed = port("GET", f"/{file.decode()}", headers={"accept-encoding": "gzip, br"})
                assert compressed["content-encoding"] == "gzip"
                assert gzip.decompress(compressed.body) == answer.body
        # Addresses are relative to /docs, and all of this server.
        assert b"//" not in page.body.replace(b"<!DOCTYPE", b"")
        assert port("GET", "/docs/").status == 308
        assert port("POST", "/docs").status == 405
        for unknown in ("/docs/x", "/docs/../openapi.json/x", "/docs/swagger-ui.css/x", "/docs/..%2fcore.py"):
            assert port("GET", unknown).status in (404, 405)


@pytest.mark.parametrize("port", ["inference", "management", "both"])
def test_rejected_methods_list_the_allowed_ones(ports: dict[str, Any], port: str) -> None:
    parameters = {"id": "0" * 32, "url_path": "v1/completions"}
    for path, operations in DOCUMENTS[port]["paths"].items():
        response = ports[port](
            "TRACE",
            re.sub(r"\{(\w+)\}", lambda match: parameters.get(match[1], "m"), path),
        )
        assert response.status == 405, path
        allowed = set(response["allow"].split(", "))
        assert {method.upper() for method in operations} <= allowed <= {*METHODS, "HEAD", "OPTIONS"}, path
    rejected = ports[port]("DELETE", "/openapi.json")
    assert (rejected.status, rejected["allow"]) == (405, "GET, HEAD, OPTIONS")


# Answers

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH")
CHECKED = ("status_code_conformance", "content_type_conformance", "response_headers_conformance")
CHECKED += ("response_schema_conformance",)


async def echo(call: InferenceRequest) -> InferenceResponse:
    """Return tensors unchanged, and valid bodies for OpenAI's API."""
    if "embeddings" in call.headers.get("url_path", ""):
        return InferenceResponse(b"[0.5]", "application/json", version="1.0")
    if call.headers.get("url_path", "").endswith(("rerank", "score")):
        return InferenceResponse(b'{"score": 0.5, "tokens": 3}', "application/json", version="1.0")
    tensors_ = [part for part in call.inputs if (part.content_type or "").startswith("application/x-tensor;")]
    if tensors_:
        arrays = [
            tensors.from_content_type(part.name, part.value, part.content_type or "") for part in tensors_
        ]
        return InferenceResponse(tensors.pack(arrays), tensors.PACKED_MEDIA_TYPE, version="1.0")
    return InferenceResponse(b'{"choices": [{"text": "x"}]}', version="1.0")


def stub_features(control_api: Any) -> None:
    """Set responses for features that the fake control API does not implement."""
    policy = {"policy": "default", "active": {"by": "policy", "default": "1.0", "versions": {"1.0": 10000}}}
    arms = {name: {"version": version, "weight": 5000} for name, version in (("a", "1.0"), ("b", "2.0"))}
    experiment = {"id": "e1", "name": "e", "model": "m", "state": "running", "arms": arms, "baseline": "a"}
    experiment |= {"started_at": 1.0, "ended": None, "key": None}
    decided = Rollout(RolloutPlan("2.0"), "r", "m", "1.0", "running", 1.0)
    rollout = state_machine.to_document(decided, [], 2.0)
    workflow = {"workflowName": "w", "workflowUrl": "", "workflowVersion": "1.0", "defaultVersion": True}
    prediction = AsyncPrediction("0" * 32, "m", None, "", 1.0).to_dict()
    shadow = {"model": "m", "shadow": None, "against": []}
    drift = {"model": "m", "versions": []}
    adapter = {"name": "fr", "model": "m", "version": "1.0", "url": "french", "digest": "d" * 64}
    key = {"name": "k", "source": "api", "rights": ["infer"], "models": ["*"], "limits": {}}
    key |= dict.fromkeys(("created", "expires", "rotated", "previous_expires"), 1.0)

    def return_value(response: Any) -> Any:
        async def method(*_: Any) -> Any:
            return response

        return method

    control_api.get_traffic = control_api.set_traffic = return_value(policy)
    control_api.start_experiment = control_api.get_experiment = control_api.stop_experiment = return_value(
        experiment
    )
    control_api.list_experiments = return_value([experiment])
    control_api.record_rewards = return_value({"counted": 1, "repeated": 0})
    control_api.start_rollout = control_api.get_rollout = control_api.update_rollout = return_value(rollout)
    control_api.list_workflows = return_value([("w", "")])
    control_api.get_workflow = return_value([{**workflow, "steps": {}, "output": [], "ongoing": 0}])
    control_api.submit_prediction = control_api.get_prediction = control_api.cancel_prediction = return_value(
        prediction
    )
    control_api.get_prediction_result = return_value((prediction, None))
    control_api.get_shadow = return_value(shadow)
    control_api.get_shadow_history = return_value({"model": "m", "against": []})
    control_api.get_experiment_history = return_value({"id": "e1", "points": []})
    control_api.list_predictions = return_value([])
    control_api.get_drift = control_api.reset_drift = return_value(drift)
    control_api.add_adapter, control_api.list_adapters = return_value(adapter), return_value([adapter])
    control_api.set_replicas = return_value({"replicas": 2, "running": 1, "min": 1, "max": 4})
    control_api.list_keys, control_api.revoke_key = return_value([key]), return_value(None)
    control_api.create_key = control_api.rotate_key = return_value({**key, "key": "trk_1"})
    control_api.get_version_stats = return_value([])
    control_api.poll_events = return_value([ModelEvent(1, "", "m", "1.0", "ready", 1.0, {})])


def use_known_model(value: Any) -> Any:
    """Replace most names by a registered model, because generated names are never found."""
    return "m" if len(value) % 3 else value


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11, for its version of schemathesis")
@pytest.mark.parametrize("port", ["inference", "management", "metrics", "both"])
def test_responses_match_their_descriptions(asgi_inference: Any, management: Any, port: str) -> None:
    """Send requests that schemathesis generates deterministically over ASGI."""
    management_app = management(allowed_hosts=("testserver",))
    for version in ("1.0", "2.0"):
        management_app.control_api.put(ModelSpec("m", version, "m.mar", "", ""), ReplicaInfo("w", 1.0, 1, ""))
    control_api = management_app.control_api
    stub_features(control_api)

    metrics_settings = replace(Settings(), management=ManagementSettings(allowed_hosts=("testserver",)))

    async def render(names: frozenset[str] | None) -> bytes:
        return b"# HELP requests Requests.\n"

    app = {
        "inference": lambda: asgi_inference(echo, control_api=control_api).app,
        "both": lambda: asgi_inference(echo, control_api=control_api, serve_management=True).app,
        "management": lambda: management_app.app,
        "metrics": lambda: metrics_app(render, metrics_settings, lambda: None),
    }[port]()
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)

    @schema.hook
    def map_path_parameters(context: Any, parameters: Any) -> Any:
        for name in {"model_name", "model_id"} & set(parameters or ()):
            parameters[name] = use_known_model(parameters[name])
        return parameters

    checks = [CHECKS.get_one(name) for name in CHECKED]
    for result in schema.get_all_operations():
        operation = result.ok()
        if port == "both" and operation.tags[0] not in ("OpenAI", "TorchServe: management"):
            continue  # checked on the other ports

        @seed(7)
        @given(case=operation.as_strategy())
        @settings(
            max_examples=5,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check_operation(case: Any) -> None:
            if case.query:
                case.query.pop("follow", None)  # an endless stream cannot be checked
            response = case.call()
            case.validate_response(response, checks=checks)
            reason = response.headers.get("x-torchrelay-reason", [""])[0]
            assert reason != "internal", f"{case.method} {case.path}: a fault of the server"

        check_operation()
