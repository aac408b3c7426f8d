"""The same checks for every protocol: splits, deadlines, priorities, keys, limits and errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

import grpc
import pytest

from serve_app.domain.access import AccessTable, KeyGrant, KeyLimits
from serve_app.domain.async_prediction import StoredRequest
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import TrafficPolicy, allocate
from serve_app.errors import DeadlineExceeded, HandlerRejected
from serve_app.proto import inference_pb2, open_inference_grpc_pb2
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from serve_app.protocols.http_app import build_replayer
from serve_app.settings import Settings

LIMIT = 100_000  # bytes of a request
WEIGHTS = {"1.0": 7500, "2.0": 2500}
READY = {version: VersionRoute(version, "ready", 1) for version in WEIGHTS}
MAY = AccessTable({sha256(b"good").digest(): KeyGrant(frozenset(("infer",)), ("*",), None)})


class Answered(NamedTuple):
    """An answer: its status, in the words of the dialect, what it says, and what stands beside it."""

    status: Any
    text: str
    version: str | None
    reason: str | None
    limit: str | None = None


def over_http(target: str, body: bytes, headers: dict[str, str]) -> Callable[..., Answered]:
    def ask(port: Any, more: dict[str, str]) -> Answered:
        answer = port("POST", target, body, {**headers, **more})
        reported = (answer.body.decode(), answer["x-model-version"], answer["x-torchrelay-reason"])
        return Answered(answer.status, *reported, answer["x-torchrelay-limit"])

    return ask


def put_aside(target: str, body: bytes, headers: dict[str, str]) -> Callable[..., Answered]:
    """As it is answered when its turn comes."""

    def ask(port: Any, more: dict[str, str]) -> Answered:
        lower = {name.lower(): value for name, value in {**headers, **more}.items()}
        path, _, query = target.partition("?")
        result = lower.pop("x-request-timeout-seconds", None)
        until = None if result is None else time.time() + float(result)
        request = StoredRequest("m", None, "POST", path, query, tuple(lower.items()), body, "id", None, until)
        answer = asyncio.run(port.replay(request))
        kept = dict(answer.headers)
        return Answered(
            answer.status, answer.body.decode(), kept.get("x-model-version"), kept.get("x-torchrelay-reason")
        )

    return ask


def by_socket(target: str, body: bytes, headers: dict[str, str]) -> Callable[..., Answered]:
    async def talk(app: Any, more: dict[str, str]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        ended = asyncio.Event()
        came = [
            {"type": "websocket.connect"},
            {"type": "websocket.receive", "text": body.decode(), "bytes": None},
        ]

        async def receive() -> dict[str, Any]:
            if came:
                return came.pop(0)
            await ended.wait()
            return {"type": "websocket.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if message["type"] == "websocket.close" or message.get("text", "").startswith('{"end"'):
                ended.set()

        names = [(name.lower().encode(), value.encode()) for name, value in {**headers, **more}.items()]
        scope = {
            "type": "websocket",
            "path": target,
            "query_string": b"",
            "headers": names,
            "http_version": "1.1",
        }
        await app({**scope, "root_path": "", "extensions": {"websocket.http.response": {}}}, receive, send)
        return sent

    def ask(port: Any, more: dict[str, str]) -> Answered:
        sent = asyncio.run(talk(port.app, more))
        if sent[0]["type"] == "websocket.http.response.start":
            kept = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
            return Answered(sent[0]["status"], sent[1]["body"].decode(), None, kept["x-torchrelay-reason"])
        if sent[-1]["type"] == "websocket.close":
            return Answered(sent[-1]["code"], sent[-1]["reason"], None, None)
        end = json.loads(sent[-1]["text"])["end"]
        pieces = "".join(message["text"] for message in sent[1:-1])
        return Answered(
            end["status"], pieces or json.dumps(end.get("error")), end["version"], end.get("reason")
        )

    return ask


def by_grpc(stub: Any, method: str, request: Any, text: Callable[[Any], str]) -> Callable[..., Answered]:
    def ask(port: Any, more: dict[str, str]) -> Answered:
        metadata = [(name.lower(), value) for name, value in more.items()]
        call = getattr(stub(port.channel), method)
        try:
            if method == "StreamPredictions":
                answers = call(request, metadata=metadata, timeout=60)
                result, status = "".join(text(answer) for answer in answers), answers.code()
                trailing = answers.trailing_metadata()
            else:
                answer, done = call.with_call(request, metadata=metadata, timeout=60)
                result, status, trailing = text(answer), done.code(), done.trailing_metadata()
        except grpc.RpcError as error:
            result, status, trailing = error.details(), error.code(), error.trailing_metadata()
        kept = dict(trailing or ())
        return Answered(status.name, result, kept.get("x-model-version"), kept.get("x-torchrelay-reason"))

    return ask


def predictions(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    return f"/predictions/{model}{version and '/' + version}", b"x" * size, {}


def events(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    return *predictions(model, version, size)[:2], {"accept": "text/event-stream"}


def kserve(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    body = b'{"instances": ["%s"]}' % (b"x" * size)
    return f"/v1/models/{model}:predict", body, {"content-type": "application/json"}


def invocations(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    return f"/invocations?model_name={model}", b"x" * size, {"content-type": "text/plain"}


def invoke(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    return f"/models/{model}/invoke", b"x" * size, {"content-type": "text/plain"}


def legacy(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    return f"/{model}{version and '/' + version}/predict", b"x" * size, {}


def infer(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1], "data": ["x" * size]}
    path = f"/v2/models/{model}{version and '/versions/' + version}/infer"
    return path, json.dumps({"inputs": [tensor]}).encode(), {}


def generate(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    path = f"/v2/models/{model}{version and '/versions/' + version}/generate"
    return path, json.dumps({"text_input": "x" * size}).encode(), {}


def completions(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    result = {"model": f"{model}{version and ':' + version}", "prompt": "x" * size}
    return "/v1/completions", json.dumps(result).encode(), {}


def chat(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    result = {
        "model": f"{model}{version and ':' + version}",
        "messages": [{"role": "user", "content": "x" * size}],
    }
    return "/v1/chat/completions", json.dumps(result).encode(), {}


def responses(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    result = {"model": f"{model}{version and ':' + version}", "input": "x" * size}
    return "/v1/responses", json.dumps(result).encode(), {}


def messages(model: str, version: str, size: int) -> tuple[str, bytes, dict[str, str]]:
    _, body, _ = chat(model, version, size)
    return "/v1/messages", json.dumps({**json.loads(body), "max_tokens": 9}).encode(), {}


def predicted(method: str) -> Callable[..., Callable[..., Answered]]:
    def ask(model: str, version: str, size: int) -> Callable[..., Answered]:
        request = inference_pb2.PredictionsRequest(
            model_name=model, model_version=version, input={"data": b"x" * size}
        )
        return by_grpc(InferenceAPIsServiceStub, method, request, lambda answer: answer.prediction.decode())

    return ask


def model_infer(model: str, version: str, size: int) -> Callable[..., Answered]:
    pb = open_inference_grpc_pb2
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    tensor = request.inputs.add(name="x", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"x" * size)

    def text(answer: Any) -> str:
        return str(answer.outputs) + str(answer.raw_output_contents)

    return by_grpc(GRPCInferenceServiceStub, "ModelInfer", request, text)


class Dialect(NamedTuple):
    """What its errors are, and how they look."""

    model: Any  # that is not there
    version: Any
    late: Any
    key: tuple[Any, Any]  # missing, wrong
    large: Any
    wrong: Any  # a header that cannot be read
    fault: Any
    shape: Callable[[str], bool]


TORCHSERVE = Dialect(
    404, 404, 504, (400, 400), 413, 400, 500, lambda s: {"code", "type", "message"} <= set(json.loads(s))
)
OIP = Dialect(404, 404, 504, (401, 401), 413, 400, 500, lambda s: set(json.loads(s)) == {"error"})
OPENAI = Dialect(404, 404, 504, (401, 401), 413, 400, 500, lambda s: "message" in json.loads(s)["error"])
ANTHROPIC = OPENAI._replace(shape=lambda s: json.loads(s)["type"] == "error")
TORCHSERVE_GRPC = Dialect(
    "INTERNAL",
    "INTERNAL",
    "DEADLINE_EXCEEDED",
    ("PERMISSION_DENIED", "PERMISSION_DENIED"),
    "RESOURCE_EXHAUSTED",
    "INVALID_ARGUMENT",
    "INTERNAL",
    bool,
)
OIP_GRPC = TORCHSERVE_GRPC._replace(
    model="NOT_FOUND", version="NOT_FOUND", key=("UNAUTHENTICATED", "UNAUTHENTICATED")
)
SOCKET = TORCHSERVE._replace(large=1009)

# A way in: what makes a request of it, how that is asked, its dialect, and whether a version can be named.
WAYS: dict[str, tuple[Any, Any, Dialect, bool]] = {
    "predictions": (predictions, over_http, TORCHSERVE, True),
    "events": (events, over_http, TORCHSERVE, True),
    "websocket": (predictions, by_socket, SOCKET, True),
    "asynchronous": (predictions, put_aside, TORCHSERVE, True),
    "asynchronous oip": (infer, put_aside, OIP, True),
    "kserve v1": (kserve, over_http, TORCHSERVE, False),
    "sagemaker": (invocations, over_http, TORCHSERVE, False),
    "sagemaker multi-model": (invoke, over_http, TORCHSERVE, False),
    "legacy": (legacy, over_http, TORCHSERVE, True),
    "oip": (infer, over_http, OIP, True),
    "generate": (generate, over_http, OIP, True),
    "openai completions": (completions, over_http, OPENAI, True),
    "openai chat": (chat, over_http, OPENAI, True),
    "openai responses": (responses, over_http, OPENAI, True),
    "anthropic": (messages, over_http, ANTHROPIC, True),
    "torchserve grpc": (predicted("Predictions"), None, TORCHSERVE_GRPC, True),
    "torchserve grpc stream": (predicted("StreamPredictions"), None, TORCHSERVE_GRPC, True),
    "oip grpc": (model_infer, None, OIP_GRPC, True),
}
VERSIONED = [name for name, way in WAYS.items() if way[3]]
LIVE = [
    name for name in WAYS if "asynchronous" not in name
]  # what looks at keys and sizes: not what was taken in


class Way:
    def __init__(self, name: str, port: Any) -> None:
        self._make, self._over, self.dialect, _ = WAYS[name]
        self._port = port

    @property
    def calls(self) -> list[InferenceRequest]:
        return self._port.backend.requests

    def __call__(self, model: str = "m", version: str = "", size: int = 1, **headers: str) -> Answered:
        made = self._make(model, version, size)
        ask = made if self._over is None else self._over(*made)
        return ask(self._port, {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.fixture
def open_way(inference: Any, over_grpc: Any) -> Callable[..., Way]:
    def build(name: str, answers: Any = None, access: AccessTable | None = None) -> Way:
        split = TrafficPolicy("weighted", WEIGHTS, allocation=allocate(WEIGHTS))
        table = RoutingTable(1, {"m": ModelRoute("1.0", READY, split)}, startup_complete=True, access=access)

        async def version(call: InferenceRequest) -> InferenceResponse:
            chosen = port.backend.ref.version
            body = {"choices": [{"text": chosen, "message": {"content": chosen}}]}
            return InferenceResponse(json.dumps(body).encode(), version=chosen)

        if WAYS[name][1] is None:
            port = over_grpc(answers or version, table, inference={"max_request_size": LIMIT})
        else:
            port = inference(answers or version, table, max_request_size=LIMIT)
            port.compares = False  # the first version is random
            port.replay = build_replayer(port.plane, Settings())
        return Way(name, port)

    return build


@pytest.mark.parametrize("name", WAYS)
def test_split_is_applied_and_the_version_returned(open_way: Any, name: str) -> None:
    way = open_way(name)
    reported = [way() for _ in range(200)]
    assert {answer.status for answer in reported} <= {200, "OK"}
    assert all(answer.version in answer.text for answer in reported), "what is told is what answered"
    shares = Counter(answer.version for answer in reported)
    assert set(shares) == set(WEIGHTS)
    assert abs(shares["2.0"] - 50) < 35  # more than five standard deviations


@pytest.mark.parametrize("name", VERSIONED)
def test_named_version_overrides_a_split(open_way: Any, name: str) -> None:
    way = open_way(name)
    assert {way(version="2.0").version for _ in range(8)} == {"2.0"}


@pytest.mark.parametrize("name", WAYS)
def test_expired_deadline_is_refused(open_way: Any, name: str) -> None:
    async def late(call: InferenceRequest) -> InferenceResponse:
        assert call.deadline is not None, "a call without end"
        await asyncio.sleep(call.deadline - time.time())
        raise DeadlineExceeded(call.model, 0.01)

    way = open_way(name, late)
    reported = way(x_request_timeout_seconds="0.01")
    assert (reported.status, reported.reason) == (way.dialect.late, "deadline")
    assert way.dialect.shape(reported.text)


@pytest.mark.parametrize("name", WAYS)
def test_priority_reaches_the_request(open_way: Any, name: str) -> None:
    way = open_way(name)
    for urgency in ("high", "low", "normal"):
        way(x_request_priority=urgency)
    assert [call.priority for call in way.calls] == ["high", "low", "normal"]
    reported = way(x_request_priority="urgent")
    assert (reported.status, reported.reason) == (way.dialect.wrong, "bad_request")
    assert len(way.calls) == 3


@pytest.mark.parametrize("name", WAYS)
def test_unknown_model_is_refused(open_way: Any, name: str) -> None:
    way = open_way(name)
    reported = way("none")
    assert (reported.status, reported.reason) == (way.dialect.model, "model_not_found")
    assert "none" in reported.text and way.dialect.shape(reported.text)


@pytest.mark.parametrize("name", VERSIONED)
def test_unknown_version_is_refused(open_way: Any, name: str) -> None:
    way = open_way(name)
    reported = way(version="9.0")
    assert (reported.status, reported.reason) == (way.dialect.version, "version_not_found")
    assert way.dialect.shape(reported.text)
    assert not way.calls


@pytest.mark.parametrize("name", LIVE)
def test_a_key(open_way: Any, name: str) -> None:
    way = open_way(name, access=MAY)
    without, wrong = way(), way(authorization="Bearer bad")
    assert (without.status, wrong.status) == way.dialect.key
    assert (without.reason, wrong.reason) == ("missing_token", "invalid_token")
    assert way.dialect.shape(without.text) and way.dialect.shape(wrong.text)
    assert not way.calls
    assert way(authorization="Bearer good").status in (200, "OK")


@pytest.mark.parametrize("name", LIVE)
def test_a_limit_of_a_key(open_way: Any, name: str) -> None:
    limits = KeyLimits(requests_per_day=1)
    limited = KeyGrant(frozenset(("infer",)), name="limited", limits=limits)
    way = open_way(name, access=AccessTable({sha256(b"good").digest(): limited}))
    assert way(authorization="Bearer good").status in (200, "OK")
    refused = way(authorization="Bearer good")
    assert (refused.status in (429, "RESOURCE_EXHAUSTED"), refused.reason) == (True, "rate_limited")
    assert way.dialect.shape(refused.text) and "requests_per_day" in refused.text
    assert len(way.calls) == 1


@pytest.mark.parametrize("name", LIVE)
def test_a_body_over_the_limit(open_way: Any, name: str) -> None:
    way = open_way(name)
    reported = way(size=LIMIT + 1)
    assert reported.status == way.dialect.large
    assert not way.calls
    if reported.status == "RESOURCE_EXHAUSTED":  # gRPC itself refuses a message, in words of its own
        assert str(LIMIT) in reported.text
    else:
        assert "max_request_size" in (reported.limit or reported.text)
    assert way().status in (200, "OK"), "others are not harmed"


@pytest.mark.parametrize("name", WAYS)
def test_internal_error_hides_its_message(open_way: Any, name: str) -> None:
    async def broken(call: InferenceRequest) -> InferenceResponse:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "secret")  # it has a `reason` of its own

    way = open_way(name, broken)
    reported = way()
    assert (reported.status, reported.reason) == (way.dialect.fault, "internal")
    assert "secret" not in reported.text and way.dialect.shape(reported.text)


@pytest.mark.parametrize("name", WAYS)
def test_rejected_response_has_its_version(open_way: Any, name: str) -> None:
    async def declines(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"no", "text/plain", 418, version="2.0")

    reported = open_way(name, declines)()
    assert "no" in reported.text
    assert reported.version == "2.0"


@pytest.mark.parametrize("name", WAYS)
def test_text_of_an_error_may_be_no_unicode(open_way: Any, name: str) -> None:
    async def rejects(call: InferenceRequest) -> InferenceResponse:
        raise HandlerRejected("half \ud800 \r\nx-forged: \0", 422)

    way = open_way(name, rejects)
    reported = way()
    assert reported.reason == "handler_rejected"
    assert "half" in reported.text and "x-forged" in reported.text


HARD_TO_WRITE = {
    "levels": b"[" * 900 + b"]" * 900,
    "an integer beyond 64 bits": b"1" * 30,
    "half a surrogate pair": b'"\\ud800"',
    "half a surrogate pair beside NaN": b'["\\ud800", NaN]',
    "half a surrogate pair beside an integer": b'["\\ud800", %d]' % 10**30,
}
MESSAGE = b'"model": "m", "messages": [{"role": "user", "content": "x"}]'
BODIES = {
    "/v1/chat/completions": b'{%b, "tools": %%b}' % MESSAGE,
    "/v1/responses": b'{"model": "m", "input": "x", "metadata": {"a": %b}, "text": %b}',
    "/v1/messages": b'{%b, "max_tokens": 1, "tools": [{"name": "f", "input_schema": %%b}]}' % MESSAGE,
    "/v1/messages/count_tokens": b'{%b, "tools": [{"name": "f", "input_schema": %%b}]}' % MESSAGE,
    "/v1/embeddings": b'{"model": "m", "input": %b}',
    "/v1/rerank": b'{"model": "m", "query": %b, "documents": ["a"]}',
    "/tei/m/embed": b'{"inputs": %b, "parameters": 1}',
    "/v2/models/m/generate": b'{"text_input": "a", "parameters": {"stop": %b}}',
    "/v2/models/m/infer": b'{"id": %b, "inputs": [{"name": "x", "shape": [], "datatype": "U", "data": []}]}',
    "/v1/models/m:predict": b'{"instances": %b}',
    "/v2/repository/index": b'{"ready": %b}',
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", HARD_TO_WRITE)
def test_values_that_are_hard_to_write_are_no_faults(asgi_inference: Any, path: str, kind: str) -> None:
    async def refuse(call: InferenceRequest) -> InferenceResponse:
        raise HandlerRejected(f"no \ud800 {call.inputs[0].value!r:.20}", 400)

    body = BODIES[path].replace(b"%b", HARD_TO_WRITE[kind])
    response = asgi_inference(refuse)("POST", path, body, {"content-type": "application/json"})
    assert response.status < 500, response.body
    json.loads(response.body)
