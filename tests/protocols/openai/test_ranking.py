"""``/v1/score`` and ``/v1/rerank`` over a data plane: the rows that they build, and their responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.errors import HandlerRejected


async def score(request: InferenceRequest) -> InferenceResponse:
    """Return the share of the pair's length as the score, in the form of one label."""
    row = json.loads(request.inputs[0].value)
    assert row.keys() == {"text", "text_pair", "parameters"}
    answer = [{"label": "LABEL_0", "score": len(row["text_pair"]) / 10, "tokens": len(row["text"])}]
    return InferenceResponse(json.dumps(answer).encode(), version=request.version or "1.0")


def post(app: Any, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    response = app("POST", f"/v1/{path}", json.dumps({"model": "m", **body}).encode())
    return response.status, json.loads(response.body)


def test_pairs_are_scored(inference: Any) -> None:
    app = inference(score)
    app.compares = False  # ids are random
    status, document = post(app, "score", text_1="abc", text_2=["a", "abcd"])
    assert status == 200 and document.pop("id").startswith("score-")
    assert isinstance(document.pop("created"), int)
    assert document == {
        "object": "list",
        "model": "m",
        "data": [
            {"object": "score", "index": 0, "score": 0.1},
            {"object": "score", "index": 1, "score": 0.4},
        ],
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }
    _, document = post(app, "score", model="m:2.0", text_1=["a", "b"], text_2=["ab", "abcde"], user="me")
    assert [item["score"] for item in document["data"]] == [0.2, 0.5]
    assert app.backend.ref.version == "2.0"


def test_documents_are_ranked(inference: Any) -> None:
    app = inference(score)
    app.compares = False  # ids are random
    documents: list[Any] = ["ab", {"text": "abcd"}, "ba", "a"]
    status, document = post(app, "rerank", query="q", documents=documents)
    assert status == 200 and document.pop("id").startswith("rerank-")
    assert document == {
        "model": "m",
        "results": [
            {"index": 1, "relevance_score": 0.4, "document": {"text": "abcd"}},
            {"index": 0, "relevance_score": 0.2, "document": {"text": "ab"}},
            {"index": 2, "relevance_score": 0.2, "document": {"text": "ba"}},
            {"index": 3, "relevance_score": 0.1, "document": {"text": "a"}},
        ],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    _, document = post(app, "rerank", query="q", documents=documents, top_n=1, return_documents=False)
    assert document["results"] == [{"index": 1, "relevance_score": 0.4}]


def test_unknown_fields_are_ignored_and_named(inference: Any) -> None:
    app = inference(score)
    app.compares = False  # ids are random
    for path, body in (
        ("score", {"text_1": "a", "text_2": "b"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
    ):
        response = app("POST", f"/v1/{path}", json.dumps({"model": "m", **body, "zz": 1, "a": None}).encode())
        assert (response.status, response["x-torchrelay-ignored"]) == (200, "zz"), response.body


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("score", {}, "text_1"),
        ("score", {"text_1": "a"}, "text_2"),
        ("score", {"text_1": "", "text_2": "b"}, "text_1"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ("score", {"text_1": "a", "text_2": "b", "query": "c"}, "query"),
        ("rerank", {"documents": ["a"]}, "query"),
        ("rerank", {"query": "a"}, "documents"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("rerank", {"query": "a", "documents": ["b"], "return_documents": 1}, "return_documents"),
        ("rerank", {"query": "a", "documents": ["b"], "input": "c"}, "input"),
        ("rerank", {"model": 5, "query": "a", "documents": ["b"]}, "model"),
    ],
)
def test_invalid_bodies_name_the_field(inference: Any, path: str, body: dict[str, Any], param: str) -> None:
    app = inference(score)
    status, document = post(app, path, **body)
    assert (status, document["error"]["param"]) == (400, param)
    assert not app.backend.requests


@pytest.mark.parametrize(
    "answer", [b'[{"label": "a", "score": 0.5}, {"label": "b", "score": 0.4}]', b'"text"', b"[]", b"{}", b"x"]
)
def test_a_model_without_one_score_is_rejected(inference: Any, answer: bytes) -> None:
    async def respond(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(answer, version="1.0")

    status, document = post(inference(respond), "score", text_1="a", text_2="b")
    assert (status, document["error"]["param"]) == (400, "model")
    assert "Model m answers no scores: a cross-encoder answers" in document["error"]["message"]


def test_a_bare_number_is_a_score(inference: Any) -> None:
    async def respond(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"-3", version="1.0")

    app = inference(respond)
    app.compares = False  # ids are random
    _, document = post(app, "score", text_1="a", text_2="b")
    assert document["data"][0]["score"] == -3.0
    assert document["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_errors_and_streams_of_a_row_fail_the_request(inference: Any) -> None:
    async def reject(request: InferenceRequest) -> InferenceResponse:
        raise HandlerRejected("This is no pair", 422)

    assert post(inference(reject), "score", text_1="a", text_2=["b", "c"])[0] == 422

    async def stream(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> Any:
            yield b"1"

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    status, document = post(inference(stream), "rerank", query="a", documents=["b"])
    assert (status, document["error"]["param"]) == (400, "model")
