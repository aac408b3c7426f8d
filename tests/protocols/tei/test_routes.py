"""text-embeddings-inference's routes over a data plane: their rows, their answers and their errors."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest

from serve_app import errors
from serve_app.domain.access import AccessTable, KeyGrant, KeyLimits
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.tei.errors import TABLE, BatchTooLarge, EmptyInputs, find_status
from tests.support.error_classes import list_subclasses


def post(app: Any, path: str, **body: Any) -> tuple[int, Any]:
    response = app("POST", f"/tei/m{path}", json.dumps(body).encode())
    return response.status, json.loads(response.body)


async def embed(request: InferenceRequest) -> InferenceResponse:
    """Return a vector of the text's length, and the parameters of the request."""
    parts = {part.name: part.value for part in request.inputs}
    text = parts["body"].decode()
    answer = {"embedding": [3.0, 4.0, float(len(text))], "tokens": len(text)}
    return InferenceResponse(json.dumps(answer).encode(), version="1.0")


def test_rows_have_the_options_of_the_request(inference: Any) -> None:
    app = inference(embed)
    status, vectors = post(
        app, "/embed", inputs=["a", "bc"], truncate=False, truncation_direction="Left", prompt_name="q"
    )
    assert (status, vectors) == (200, [[3, 4, 1], [3, 4, 2]])
    parameters = {part.name: part.value for part in app.backend.requests[0].inputs}["parameters"]
    assert json.loads(parameters) == {
        "output_value": "sentence_embedding",
        "tokens": True,
        "truncate": False,
        "truncation_direction": "left",
        "prompt_name": "q",
    }
    assert post(app, "/embed", inputs="a", dimensions=2) == (200, [[0.6, 0.8]])
    assert post(app, "/embed", inputs="a", dimensions=2, normalize=False) == (200, [[3, 4]])
    assert post(app, "", inputs=["a"], parameters={"dimensions": 2, "normalize": False}) == (200, [[3, 4]])
    response = app("POST", "/tei/m/embed", b'{"inputs": "a", "zz": 1, "user": null}')
    assert (response.status, response["x-torchrelay-ignored"]) == (200, "zz")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", {}, 422, "Validation"),
        ("/embed", {"inputs": ""}, 400, "Empty"),
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty"),
        ("/embed", {"inputs": ["a", 3]}, 422, "Validation"),
        ("/embed", {"inputs": ["a"] * 2049}, 413, "Validation"),
        ("/embed", {"inputs": "a", "truncate": "no"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "normalize": 1}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 4}, 422, "Validation"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "prompt_name": 3}, 422, "Validation"),
        ("/embed", {"inputs": "a", "query": "b"}, 422, "Validation"),
        ("/embed_all", {"inputs": {}}, 422, "Validation"),
        ("/embed_sparse", {"inputs": [[]]}, 422, "Validation"),
        ("/rerank", {"texts": ["a"]}, 422, "Validation"),
        ("/rerank", {"query": "a", "texts": "b"}, 422, "Validation"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 422, "Validation"),  # the model answers vectors
        ("/predict", {"inputs": ["a", "b", "c"]}, 422, "Validation"),
        ("/predict", {"inputs": [["a"], "b"]}, 422, "Validation"),
        ("/predict", {"inputs": []}, 400, "Empty"),
        ("/predict", {"inputs": "a"}, 422, "Validation"),
        ("/similarity", {"inputs": "a"}, 422, "Validation"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": 3},
            422,
            "Validation",
        ),
        ("/tokenize", {"inputs": [1]}, 422, "Validation"),
        ("/decode", {"ids": "a"}, 422, "Validation"),
        ("/decode", {"ids": []}, 400, "Empty"),
        ("/decode", {"ids": [[]]}, 422, "Validation"),
        ("/decode", {"ids": [2**64]}, 422, "Validation"),
        ("/embed", {"inputs": [-1]}, 422, "Validation"),
        ("", {"inputs": "a", "top_k": 2**64}, 422, "Validation"),
        ("", {"inputs": "a", "function_to_apply": 2**64}, 422, "Validation"),
        ("", {"inputs": "a", "parameters": "b"}, 422, "Validation"),
        ("", {}, 422, "Validation"),
        ("/info", {}, 405, "Validation"),
        ("/nothing", {}, 404, "Validation"),
        ("/embed/more", {}, 404, "Validation"),
    ],
)
def test_invalid_requests_are_rejected(inference: Any, path: str, body: Any, status: int, kind: str) -> None:
    answered, document = post(inference(embed), path, **body)
    assert (answered, document["error_type"]) == (status, kind), document
    assert document.keys() == {"error", "error_type"} and document["error"]


def test_bodies_that_are_no_objects_are_rejected(inference: Any) -> None:
    for body, status in ((b"{", 422), (b"[]", 422), (b"x" * 200, 413)):
        response = inference(embed, max_request_size=100)("POST", "/tei/m/embed", body)
        assert response.status == status
    assert inference(embed)("POST", "/tei/none/embed", b"{}").status == 404
    assert inference(embed)("POST", "/tei/m:9/embed", b"{}").status == 404
    assert inference(embed)("POST", "/tei", b"{}").status == 404
    assert inference(embed)("OPTIONS", "/tei/m/embed").status == 204


@pytest.mark.parametrize("answer", [b'"text"', b"{}", b"x", b'{"embedding": 3}', b'[{"label": "a"}]'])
def test_models_of_other_answers_are_rejected(inference: Any, answer: bytes) -> None:
    async def respond(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(answer, version="1.0")

    for path in ("/embed", "/predict"):
        status, document = post(inference(respond), path, inputs="a")
        assert (status, document["error_type"]) == (422, "Validation")
        assert "Model m " in document["error"]
    response = inference(respond)("GET", "/tei/m/info")
    assert (response.status, json.loads(response.body)["error_type"]) == (422, "Validation")


def test_descriptions_of_other_labels(inference: Any) -> None:
    for labels, status in (({"cat": "c", "1": "d"}, 200), (["cat"], 422), (None, 422)):
        description = json.dumps({"outputs": ["labels"], "labels": labels}).encode()

        async def describe(request: InferenceRequest, body: bytes = description) -> InferenceResponse:
            return InferenceResponse(body, version="1.0")

        response = inference(describe)("GET", "/tei/m/info")
        assert response.status == status
        if status == 200:
            assert json.loads(response.body)["model_type"]["classifier"]["label2id"] == {"d": 1}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.HandlerRejected("too long", 413), 413, "Validation"),
        (errors.HandlerRejected("no output", 400), 422, "Validation"),
        (errors.HandlerRejected("unloaded", 503), 503, "Unhealthy"),
        (errors.HandlerFailed("Traceback"), 424, "Backend"),
        (errors.ReplicaDied("killed"), 424, "Backend"),
        (errors.QueueFull("m", None), 429, "Overloaded"),
        (errors.QuotaExceeded("m", "1.0", 2), 429, "Overloaded"),
        (errors.ModelLoading("m", None), 503, "Unhealthy"),
        (errors.DeadlineExceeded("m", 1.0), 504, "Backend"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_a_row_fail_the_request(inference: Any, error: Exception, status: int, kind: str) -> None:
    async def fail(request: InferenceRequest) -> InferenceResponse:
        raise error

    answered, document = post(inference(fail), "/embed", inputs=["a", "b"])
    assert (answered, document["error_type"]) == (status, kind)


@pytest.mark.parametrize("cls", list_subclasses(), ids=lambda c: c.__name__)
def test_every_class_has_an_entry(cls: type) -> None:
    assert 400 <= TABLE[next(c for c in cls.__mro__ if c in TABLE)][0] < 600
    assert find_status(EmptyInputs("a", "inputs")) == (400, "Empty")
    assert find_status(BatchTooLarge("a", "inputs")) == (413, "Validation")


def test_a_stream_is_no_answer(inference: Any) -> None:
    async def stream(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> Any:
            yield b"1"

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    assert post(inference(stream), "/embed", inputs="a")[0] == 422


def test_answers_that_are_too_large_together_are_refused(inference: Any) -> None:
    answer = b"[" + b"1.0," * (2 << 20) + b"1.0]"  # 8 MiB

    async def embed_tokens(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(answer, version="1.0")

    app = inference(embed_tokens)
    status, document = post(app, "/embed_all", inputs=["a"] * 2048)
    assert (status, document["error_type"]) == (422, "Validation")
    assert "64 of 2048 inputs have more than 512 MiB together" in document["error"]
    assert len(app.backend.requests) < 100


def test_large_answers_become_one_document(inference: Any) -> None:
    numbers = [index / 7 for index in range(4096)]

    async def answer(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(json.dumps(numbers).encode(), version="1.0")

    app = inference(answer)
    assert post(app, "/embed", inputs=["a"] * 32) == (200, [numbers] * 32)
    sentences = {"source_sentence": "a", "sentences": ["b"] * 31}
    assert post(app, "/similarity", inputs=sentences) == (200, [pytest.approx(1)] * 31)


def test_tokens_count_towards_the_limit_of_a_key(inference: Any) -> None:
    limits = KeyLimits(tokens_per_minute=8)  # of which a replica and a gateway have half
    grant = KeyGrant(frozenset(("infer",)), name="k", limits=limits)
    route = ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})
    app = inference(
        embed, table=RoutingTable(1, {"m": route}, access=AccessTable({sha256(b"k").digest(): grant}))
    )
    body = json.dumps({"inputs": ["abcd", "efgh"]}).encode()
    responses = [app("POST", "/tei/m/embed", body, {"authorization": "Bearer k"}) for _ in range(2)]
    assert [response.status for response in responses] == [200, 429]
    assert json.loads(responses[1].body)["error_type"] == "Overloaded"


def test_a_model_that_cannot_answer_is_not_healthy(inference: Any) -> None:
    failed = VersionRoute("1.0", "failed", 0)
    app = inference(embed, table=RoutingTable(1, {"m": ModelRoute("1.0", {"1.0": failed})}))
    response = app("GET", "/tei/m/health")
    assert (response.status, json.loads(response.body)["error_type"]) == (503, "Unhealthy")


def test_a_model_named_tei_keeps_torchserves_route(inference: Any) -> None:
    routes = {name: ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)}) for name in ("m", "tei")}
    app = inference(table=RoutingTable(1, routes, startup_complete=True))
    assert app("POST", "/tei/1.0/predict", b"hello").body == b"hello"
    assert app("POST", "/tei/m/embed", b'{"inputs": ""}').status == 400


def test_keys_are_checked_before_the_body(inference: Any) -> None:
    grants = {sha256(b"others").digest(): KeyGrant(frozenset(("infer",)), ("others",))}
    route = ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})
    app = inference(embed, table=RoutingTable(1, {"m": route}, access=AccessTable(grants)))
    for method, path in (("POST", "embed"), ("GET", "info"), ("GET", "health"), ("POST", "")):
        assert app(method, f"/tei/m/{path}", b"{").status == 401
        response = app(method, f"/tei/m/{path}", b"{", {"authorization": "Bearer others"})
        assert response.status == 403, path
