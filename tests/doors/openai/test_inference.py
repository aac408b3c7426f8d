"""OpenAI's routes over a data plane: which call they make of a request, and what they answer."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from serve_app.doors import streaming
from serve_app.errors import HandlerSaid, QueueFull, QuotaExceeded
from serve_app.policy import Policy, allocate
from serve_app.types import Access, Call, Grant, ModelRow, Reply, ReplyStream, Table, VersionRow


def said(answer: Any) -> Any:
    return json.loads(answer.body)


def error(answer: Any) -> tuple[int, str, str | None]:
    """The status, the code and the field of an error of OpenAI's."""
    assert answer["content-type"] == "application/json"
    [(word, told)] = said(answer).items()
    assert word == "error"
    assert {"message", "type", "param", "code"} == set(told)
    return answer.status, told["code"], told["param"]


async def chosen(call: Call) -> Reply:
    """A handler that answers JSON, of which it says nothing."""
    return Reply(b'{"choices": []}', version=call.version or "1.0")


async def in_pieces(call: Call) -> ReplyStream:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'data: {"a": 1}\n\n'
        yield b"data: [DONE]\n\n"

    return ReplyStream(Reply(b"", version="1.0"), pieces())


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/completions"])
def test_a_call_with_the_path_as_a_header(inference: Any, path: str) -> None:
    app = inference(chosen)
    body = b'{"model": "m", "prompt": "a"}'
    answer = app("POST", f"/{path}", body, {"x-request-priority": "high", "x-request-timeout-seconds": "30"})
    assert (answer.status, said(answer)) == (200, {"choices": []})
    assert (answer["content-type"], answer["x-model-version"]) == ("application/json", "1.0")
    [call] = app.target.calls
    assert (call.model, call.version, call.kind, call.priority) == ("m", None, "predict", "high")
    assert call.deadline is not None
    assert [(part.name, part.value, part.content_type) for part in call.inputs] == [("body", body, "application/json")]
    assert call.headers["url_path"] == path
    assert call.request_id == answer["x-request-id"]
    assert app.access[0][-3:-1] == ("m", "1.0"), "the log knows what answered"


def test_a_version_by_its_name(inference: Any) -> None:
    app = inference(chosen)
    assert app("POST", "/v1/completions", b'{"model": "m:2.0"}').status == 200
    assert app.target.ref.version == "2.0"


def test_a_stream_passes_piece_by_piece(inference: Any) -> None:
    answer = inference(in_pieces)("POST", "/v1/chat/completions", b'{"model": "m", "stream": true}')
    assert answer.pieces == [b'data: {"a": 1}\n\n', b"data: [DONE]\n\n", b""]
    assert (answer["content-type"], answer["x-model-version"]) == ("text/event-stream", "1.0")
    assert answer.ended


def test_a_stream_of_one_piece(inference: Any) -> None:
    async def at_once(call: Call) -> Reply:
        return Reply(b"data: [DONE]\n\n", version="1.0")

    answer = inference(at_once)("POST", "/v1/completions", b'{"model": "m", "stream": true}')
    assert (answer["content-type"], answer.body) == ("text/event-stream", b"data: [DONE]\n\n")


def test_an_error_in_mid_stream_is_an_event(inference: Any) -> None:
    async def breaks(call: Call) -> ReplyStream:
        async def pieces() -> AsyncIterator[bytes]:
            yield b'data: {"a": 1}\n\n'
            raise HandlerSaid("the loop failed", 503)

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    app = inference(breaks)
    answer = app("POST", "/v1/chat/completions", b'{"model": "m", "stream": true}')
    assert answer.ended, "the answer is whole, and says that the text is not"
    first, second = answer.body.decode().removesuffix("\n\n").split("\n\n")
    assert first == 'data: {"a": 1}'
    told = json.loads(second.removeprefix("data: "))["error"]
    assert (told["message"], told["type"]) == ("the loop failed", "server_error")


def test_silence_is_broken_by_comments(inference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming.Alive.__init__, "__defaults__", (0.005,))
    comments, following = [], streaming.Alive.__anext__

    async def counted(alive: Any) -> bytes:
        if (said := await following(alive)) == streaming.COMMENT:
            comments.append(said)
        return said

    monkeypatch.setattr(streaming.Alive, "__anext__", counted)

    async def slow(call: Call) -> ReplyStream:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            while len(comments) < 2:
                await asyncio.sleep(0.001)
            yield b"data: 2\n\n"

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    answer = inference(slow)("POST", "/v1/completions", b'{"model": "m"}')
    assert answer.pieces[0] == b"data: 1\n\n" and answer.pieces[-2:] == [b"data: 2\n\n", b""]
    assert 2 <= answer.pieces.count(b": still here\n\n") == len(answer.pieces) - 3


def test_a_caller_that_leaves_closes_the_stream(inference: Any) -> None:
    closed = asyncio.Event()

    async def endless(call: Call) -> ReplyStream:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0.01)
            finally:
                closed.set()

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    with pytest.raises(asyncio.CancelledError):  # by the watch, which sees the client go
        inference(endless)("POST", "/v1/completions", b'{"model": "m"}', leaves=True)
    assert closed.is_set()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "/v1/completions", b'{"model": "none"}', 404, "model_not_found", "model"),
        ("POST", "/v1/completions", b'{"model": "m:9"}', 404, "model_not_found", "model"),
        ("POST", "/v1/completions", b'{"prompt": "a"}', 400, "bad_request", "model"),
        ("POST", "/v1/completions", b'{"model": 5}', 400, "bad_request", "model"),
        ("POST", "/v1/completions", b"{", 400, "invalid_body", None),
        ("POST", "/v1/completions", b"[]", 400, "invalid_body", None),
        ("POST", "/v1/completions", b'{"model": "m", "x": "%s"}' % (b"x" * 200), 413, "too_large", None),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed", None),
        ("POST", "/v1/models", b"", 405, "method_not_allowed", None),
        ("GET", "/v1/models/none", b"", 404, "model_not_found", "model"),
        ("GET", "/v1/models/m:9", b"", 404, "model_not_found", "model"),
        ("POST", "/v1/embeddings", b'{"model": "m"}', 400, "bad_request", "input"),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": ""}', 400, "bad_request", "input"),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": [1, 2]}', 400, "bad_request", "input"),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": "a", "dimensions": 3}', 400, "bad_request", "dimensions"),
        (
            "POST",
            "/v1/embeddings",
            b'{"model": "m", "input": "a", "encoding_format": "int8"}',
            400,
            "bad_request",
            "encoding_format",
        ),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": "a", "prompt": "b"}', 400, "bad_request", "prompt"),
        ("POST", "/v1/embeddings", b'{"model": "none", "input": "a"}', 404, "model_not_found", "model"),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": "a"}', 400, "bad_request", "model"),  # it only echoes
    ],
)
def test_what_is_refused(
    inference: Any, method: str, path: str, body: bytes, status: int, code: str, param: str | None
) -> None:
    assert error(inference(max_request_size=120)(method, path, body)) == (status, code, param)


@pytest.mark.parametrize(
    ("raised", "status", "code", "retry"),
    [
        (QuotaExceeded("m", "1.0", 2), 429, "rate_limit_exceeded", "1"),
        (QueueFull("m", None), 503, "queue_full", "1"),
        (HandlerSaid("There is no prompt", 400), 400, "handler_said", None),
    ],
)
def test_what_the_model_refuses(inference: Any, raised: Exception, status: int, code: str, retry: str | None) -> None:
    async def refuse(call: Call) -> Reply:
        raise raised

    answer = inference(refuse)("POST", "/v1/completions", b'{"model": "m"}')
    assert error(answer) == (status, code, None)
    assert (answer["retry-after"], answer["x-model-version"]) == (retry, "1.0")


def test_what_other_doors_have_is_theirs(inference: Any) -> None:
    app = inference()
    assert app("POST", "/v1/models/m:predict", b"hello").body == b"hello"
    assert said(app("GET", "/v1/nothing"))["type"] == "ResourceNotFoundException"
    assert app("OPTIONS", "/v1/chat/completions").status == 204


# Models


def row(version: str, phase: Any = "ready", **more: Any) -> VersionRow:
    return VersionRow(version, phase, 1 if phase == "ready" else 0, **more)


MODELS = Table(
    1,
    {
        "asleep": ModelRow("1.0", {"1.0": row("1.0", "idle")}),
        "broken": ModelRow("1.0", {"1.0": row("1.0", "failed")}),
        "one": ModelRow("1.0", {"1.0": row("1.0")}),
        "two": ModelRow("2.0", {"1.0": row("1.0"), "2.0": row("2.0"), "3.0": row("3.0", "loading")}),
    },
    settled=True,
)


def test_models(inference: Any) -> None:
    app = inference(table=MODELS)
    listed = said(app("GET", "/v1/models"))
    assert listed["object"] == "list"
    assert [one["id"] for one in listed["data"]] == ["asleep", "one", "two", "two:1.0", "two:2.0"]
    for one in listed["data"]:
        assert said(app("GET", f"/v1/models/{one['id']}")) == one
        assert one["object"] == "model" and isinstance(one["created"], int) and one["owned_by"]
    assert said(app("GET", "/v1/models/one:1.0"))["id"] == "one:1.0"
    for silent in ("broken", "two:3.0"):
        answer = app("GET", f"/v1/models/{silent}")
        assert error(answer) == (503, "no_replica", None)
        assert answer["retry-after"] is None


def test_kserves_first_protocol_has_the_same_addresses(inference: Any) -> None:
    app = inference(table=MODELS)
    assert said(app("GET", "/v1/models"))["models"] == ["asleep", "one", "two", "two:1.0", "two:2.0"]
    shown = said(app("GET", "/v1/models/one"))
    assert (shown["id"], shown["name"], shown["ready"]) == ("one", "one", True)
    assert said(app("GET", "/"))["status"] == "alive"


def test_a_key_is_wanted_and_shows_its_own_models(inference: Any) -> None:
    grants = {
        sha256(b"all").digest(): Grant(frozenset(("infer",))),
        sha256(b"ones").digest(): Grant(frozenset(("infer",)), ("one",)),
        sha256(b"looks").digest(): Grant(frozenset(("observe",))),
    }
    app = inference(chosen, table=replace(MODELS, access=Access(grants)))

    def ask(key: str | None, path: str, body: bytes | None = None) -> Any:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return app("GET" if body is None else "POST", path, body or b"", headers)

    assert [one["id"] for one in said(ask("ones", "/v1/models"))["data"]] == ["one"]
    assert ask("all", "/v1/completions", b'{"model": "two"}').status == 200
    assert "authorization" not in app.target.calls[0].headers
    assert error(ask(None, "/v1/models")) == (401, "invalid_api_key", None)
    assert error(ask("wrong", "/v1/completions", b'{"model": "two"}')) == (401, "invalid_api_key", None)
    assert error(ask("looks", "/v1/models")) == (403, "insufficient_permissions", None)
    for path, body in (
        ("/v1/models/two", None),
        ("/v1/completions", b'{"model": "two"}'),
        ("/v1/embeddings", b'{"model": "two", "input": "a"}'),
    ):
        assert error(ask("ones", path, body)) == (403, "insufficient_permissions", "model")


# Embeddings


async def embed(call: Call) -> Reply:
    """Two numbers for a text, as a model that counts its tokens answers."""
    assert call.headers["url_path"] == "v1/embeddings"
    text = next(part.value for part in call.inputs if part.name == "body")
    version = call.version or "1.0"
    said = {"embedding": [len(text) / 4, float(version)], "tokens": len(text)}
    return Reply(json.dumps(said).encode(), version=version)


def test_embeddings(inference: Any) -> None:
    app = inference(embed)
    answer = app("POST", "/v1/embeddings", json.dumps({"model": "m", "input": ["abc", "d"]}).encode())
    assert said(answer) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.75, 1.0]},
            {"object": "embedding", "index": 1, "embedding": [0.25, 1.0]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert answer["x-model-version"] == "1.0"
    ids = [call.request_id for call in app.target.calls]
    assert ids[0] == answer["x-request-id"] and len(set(ids)) == 2
    one = app("POST", "/v1/embeddings", b'{"model": "m", "input": "abc", "encoding_format": "base64", "user": "u"}')
    [vector] = said(one)["data"]
    assert struct.unpack("<2f", base64.b64decode(vector["embedding"])) == (0.75, 1.0)


def test_a_bare_vector_is_an_embedding_too(inference: Any) -> None:
    async def bare(call: Call) -> Reply:
        return Reply(b"[1, 2.5]", version="1.0")

    told = said(inference(bare)("POST", "/v1/embeddings", b'{"model": "m", "input": "abc"}'))
    assert told["data"][0]["embedding"] == [1, 2.5]
    assert told["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_rows_are_under_way_together_and_no_more_than_the_queue_holds(inference: Any) -> None:
    under_way = most = 0

    async def slowly(call: Call) -> Reply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return Reply(b"[1.0]", version="1.0")

    table = Table(1, {"m": ModelRow("1.0", {"1.0": row("1.0", max_batch_size=20)})})
    app = inference(slowly, table=table)
    texts = json.dumps({"model": "m", "input": ["a"] * 100}).encode()
    assert len(said(app("POST", "/v1/embeddings", texts))["data"]) == 100
    assert most == 40, "two batches"
    app.reader.put(Table(2, {"m": ModelRow("1.0", {"1.0": row("1.0", max_batch_size=20, job_queue_size=3)})}))
    most = 0
    assert app("POST", "/v1/embeddings", texts).status == 200
    assert most == 3


def test_one_row_that_fails_fails_the_request(inference: Any) -> None:
    async def picky(call: Call) -> Reply:
        if call.inputs[0].value == b"bad":
            raise HandlerSaid("This is no text", 400)
        return Reply(b"[1.0]", version="1.0")

    app = inference(picky)
    answer = app("POST", "/v1/embeddings", b'{"model": "m", "input": ["a", "bad", "c"]}')
    assert error(answer) == (400, "handler_said", None)


def test_too_many_inputs(inference: Any) -> None:
    body = json.dumps({"model": "m", "input": ["a"] * 2049}).encode()
    assert error(inference(embed)("POST", "/v1/embeddings", body)) == (400, "bad_request", "input")


def test_all_rows_of_a_request_are_one_versions(inference: Any) -> None:
    async def told(call: Call) -> Reply:
        version = app.target.ref.version
        return Reply(json.dumps([1.0, float(version)]).encode(), version=version)

    rows = {version: row(version) for version in ("1.0", "2.0")}
    weights = {"1.0": 5000, "2.0": 5000}
    policy = Policy("weighted", weights, allocation=allocate(weights))
    app = inference(told, table=Table(1, {"m": ModelRow("1.0", rows, policy)}))
    seen = set()
    for _ in range(8):
        answer = app("POST", "/v1/embeddings", b'{"model": "m", "input": ["a", "b", "c", "d"]}')
        versions = {one["embedding"][1] for one in said(answer)["data"]}
        assert versions == {float(answer["x-model-version"])}
        seen |= versions
    assert seen == {1.0, 2.0}
