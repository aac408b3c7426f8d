"""The door over the bare interface: what no client of others' sends, in and out, and every wrong turn."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import struct
import tracemalloc
import zlib
from hashlib import sha256
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handlers import openai
from handlers.engines.engine import Sampling
from handlers.errors import PredictionException
from serve_app import errors as tree
from serve_app import tensors
from serve_app.doors.oip import compression, errors, framing, generate
from serve_app.errors import BadRequest, HandlerSaid
from serve_app.types import Access, Grant, ModelRef, VersionRow

X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]}


@pytest.fixture
def ask(models: Any) -> Any:
    """One request to the app of ``models``."""

    def asks(method: str, path: str, body: Any = b"", limit: int = 1 << 20, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(models.app(limit))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, content=content, headers=named)

        return asyncio.run(send())

    models.add("identity", lambda data, context: [dict(row) for row in data], form="arrays")
    models.add("signed", lambda data, context: [{"y": r["x"].sum(axis=1)} for r in data], form="arrays", ports=X)
    models.add("plain", lambda data, context: [row["data"] for row in data])
    return asks


def one(data: Any, datatype: str = "FP32", shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    shape = list(np.shape(data)) if shape is None else shape
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}], **more}


def test_json_both_ways(ask: Any) -> None:
    answer = ask("POST", "/v2/models/identity/infer", one([[1.5, 2]], id="me"))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in answer.headers
    assert answer.json() == {
        "model_name": "identity",
        "model_version": "1.0",
        "id": "me",
        "outputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}],
    }


def test_nan_is_written_as_it_is_read(ask: Any) -> None:
    answer = ask(
        "POST",
        "/v2/models/identity/infer",
        b'{"inputs": [{"name": "x", "datatype": "FP64", "shape": [2], "data": [NaN, -Infinity]}]}',
    )
    assert b"[NaN, -Infinity]" in answer.content


def test_some_outputs_binary_and_some_not(ask: Any) -> None:
    body = {
        "inputs": [
            {"name": "a", "datatype": "INT8", "shape": [2], "parameters": {"binary_data_size": 2}},
            {"name": "b", "datatype": "BYTES", "shape": [1], "data": ["text"]},
            {"name": "c", "datatype": "BF16", "shape": [1], "parameters": {"binary_data_size": 2}},
        ],
        "outputs": [{"name": "c"}, {"name": "b", "parameters": {"binary_data": False}}, {"name": "a"}],
        "parameters": {"binary_data_output": True},
    }
    head = orjson.dumps(body)
    answer = ask(
        "POST",
        "/v2/models/identity/infer",
        head + b"\1\2" + b"\x80\x3f",
        inference_header_content_length=str(len(head)),
    )
    size = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    said = orjson.loads(answer.content[:size])
    assert [o["name"] for o in said["outputs"]] == ["c", "b", "a"]
    assert [o.get("parameters") for o in said["outputs"]] == [{"binary_data_size": 4}, None, {"binary_data_size": 2}]
    assert answer.content[size:] == struct.pack("<f", 1.0) + b"\1\2"


@pytest.mark.parametrize("size", [1, 5_000])
@pytest.mark.parametrize("name", ["x", "n" * 600])
@pytest.mark.parametrize("id", ["", "me"])
def test_all_outputs_raw_are_the_same_as_each_by_its_name(ask: Any, size: int, name: str, id: str) -> None:
    inputs = [
        {"name": f"{name}{i}", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
        for i in range(2)
    ]
    body = {"inputs": inputs, "parameters": {"binary_data_output": True}, **({"id": id} if id else {})}
    answers = []
    for more in ({}, {"outputs": [{"name": sent["name"]} for sent in inputs]}, {}):
        head = orjson.dumps({**body, **more})
        raw = bytes(i % 251 for i in range(2 * size))
        length = str(len(head))
        answers.append(ask("POST", "/v2/models/identity/infer", head + raw, inference_header_content_length=length))
    lengths = {int(answer.headers["inference-header-content-length"]) for answer in answers}
    assert len(lengths) == len({answer.content for answer in answers}) == 1
    assert answers[0].content[lengths.pop() :] == raw


def test_one_raw_tensor_without_json(ask: Any) -> None:
    raw = np.arange(4, dtype=np.float32).tobytes()
    answer = ask("POST", "/v2/models/signed/infer", raw, inference_header_content_length="0")
    size = int(answer.headers["inference-header-content-length"])
    assert np.frombuffer(answer.content[size:], np.float32).tolist() == [1.0, 5.0]
    assert (
        "exactly one input"
        in ask("POST", "/v2/models/identity/infer", raw, inference_header_content_length="0").json()["error"]
    )


GOOD = orjson.dumps(one([1.0]))
HEAD = orjson.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]}
)


@pytest.mark.parametrize(
    ("body", "length", "words"),
    [
        (b"", None, "not JSON"),
        (b"{", None, "not JSON"),
        (b"[]", None, "is a JSON object"),
        (b"[" * 100_000, None, "not JSON"),
        (b"{}", None, "inputs is None"),
        (b'{"inputs": [1]}', None, "a list of objects"),
        (b'{"inputs": [{}]}', None, "name is None"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}', None, "no data"),
        (b'{"inputs": [], "id": 5}', None, "id is 5"),
        (b'{"inputs": [], "parameters": [1]}', None, "parameters is"),
        (b'{"inputs": [], "parameters": {"timeout": "x"}}', None, "timeout"),
        (b'{"inputs": [], "outputs": [{"name": "x", "parameters": {"classification": -1}}]}', None, "classification"),
        (b'{"inputs": [{"name": "x", "parameters": {"shared_memory_region": "r"}}]}', None, "shared memory"),
        (orjson.dumps(one([1.0], shape=[2**40])), None, "elements, and 1 came"),
        (orjson.dumps(one([1.0], shape=[2**61, 2**61])), None, "no memory holds"),
        (orjson.dumps(one(["a"])), None, "'a' in its data is none"),
        (orjson.dumps(one([1.0], "FP16")), None, "no form in JSON"),
        (orjson.dumps({"inputs": one([1.0])["inputs"] * 2}), None, "twice"),
        (orjson.dumps({"inputs": one([1.0])["inputs"] * 1001}), None, "at most 1000"),
        (GOOD, "x", "Inference-Header-Content-Length is 'x'"),
        (GOOD, "-1", "Inference-Header-Content-Length"),
        (GOOD, "999999", "the body has"),
        (GOOD, "5", "not JSON"),
        (GOOD + b"1234", str(len(GOOD)), "4 bytes behind the JSON"),
        (HEAD + b"1234567", str(len(HEAD)), "7 bytes are left"),
        (HEAD + b"123456789", str(len(HEAD)), "1 bytes behind the JSON"),
        (HEAD.replace(b"8", b"4") + b"1234", str(len(HEAD)), "has 8 bytes as it says, and 4 came"),
        (HEAD.replace(b":8", b":-8"), str(len(HEAD) + 1), "binary_data_size is -8"),
    ],
)
def test_bad_input(ask: Any, body: bytes, length: str | None, words: str) -> None:
    headers = {} if length is None else {"inference_header_content_length": length}
    answer = ask("POST", "/v2/models/identity/infer", body, **headers)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]
    assert len(answer.content) < 500


def test_sizes_are_bounded(ask: Any) -> None:
    answer = ask("POST", "/v2/models/identity/infer", b"x" * 5000, limit=4000)
    assert answer.status_code == 413
    assert "max_request_size (4000 bytes)" in answer.json()["error"]
    tracemalloc.start()
    ask("POST", "/v2/models/identity/infer", one([1.0], shape=[2**31]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("count", [3, 40_000])
def test_compressed_bodies(ask: Any, coding: str, compress: Any, count: int) -> None:
    body = compress(orjson.dumps(one([0.5] * count)))
    answer = ask("POST", "/v2/models/identity/infer", body, content_encoding=coding, accept_encoding=coding)
    assert answer.json()["outputs"][0]["data"] == [0.5] * count  # httpx reads what it is told
    assert answer.headers.get("content-encoding") == (coding if count > 3 else None)


@pytest.mark.parametrize(
    ("coding", "body", "status", "words"),
    [
        ("br", b"x", 400, "'br' is not served; there are gzip and deflate"),
        ("gzip", b"", 400, "it ends too early"),
        ("gzip", b"x", 400, "not what its Content-Encoding says"),
        ("gzip", zlib.compress(b"{}"), 400, "incorrect header"),
        ("gzip", gzip.compress(b"{}" * 100_000, mtime=0)[:-9], 400, "it ends too early"),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, 400, "something follows its end"),
        ("deflate", zlib.compress(b"{}"), 400, "inputs is None"),
        ("gzip", gzip.compress(bytes(1 << 26), mtime=0), 413, "max_request_size (2000000 bytes)"),
        ("deflate", zlib.compress(bytes(2_000_001)), 413, "max_request_size (2000000 bytes)"),
        ("deflate", zlib.compress(bytes(2_000_000)), 400, "not JSON"),
    ],
)
def test_compressed_bodies_that_are_refused(ask: Any, coding: str, body: bytes, status: int, words: str) -> None:
    tracemalloc.start()
    answer = ask("POST", "/v2/models/identity/infer", body, limit=2_000_000, content_encoding=coding)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text
    assert peak < 1 << 25  # the largest of them would be 64 MiB


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("gzip", "gzip"),
        ("Deflate, identity;q=0.5", "deflate"),
        ("gzip;q=0.8, br;q=0", "gzip"),
        ("gzip, deflate", None),  # what a library can read
        ("br", None),
        ("gzip;q=0", None),
        ("*", None),
        ("", None),
    ],
)
def test_who_asks_for_a_coding_gets_it(accept: str, coding: str | None) -> None:
    assert compression.asked(accept, 512) == coding
    assert compression.asked(accept, 511) is None


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/identity/infer", 405),
        ("POST", "/v2", 405),
        ("GET", "/v2/repository/index", 405),
        ("GET", "/v2/models/identity/versions", 404),
        ("GET", "/v2/models/identity/other", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/nobody/config", 404),
        ("GET", "/v2/models/identity/versions/9/ready", 404),
        ("POST", "/v2/models/nobody/infer", 404),
        ("GET", "/v2/trace/setting", 404),
        ("OPTIONS", "/v2/models/identity/infer", 204),
    ],
)
def test_wrong_turns(ask: Any, method: str, path: str, status: int) -> None:
    answer = ask(method, path, {"inputs": []} if path.endswith("infer") else b"")
    assert answer.status_code == status
    if status >= 400:
        assert list(answer.json()) == ["error"]


def test_health_says_what_clients_read(ask: Any, models: Any) -> None:
    assert ask("GET", "/v2/health/live").json() == {"live": True}
    assert ask("GET", "/v2/health/ready").json() == {"ready": True}
    assert ask("GET", "/v2/models/plain/ready").json() == {"name": "plain", "ready": True}
    models.put(ModelRef("plain", "1.0"), VersionRow("1.0", "loading", 0, last_error="out of luck"))
    answer = ask("GET", "/v2/models/plain/ready")
    assert (answer.status_code, answer.json()) == (503, {"name": "plain", "ready": False})
    models.put(ModelRef("plain", "2.0"), VersionRow("2.0", "failed", 0, last_error="out of luck"))
    assert ask("POST", "/v2/repository/index").json()[1:3] == [
        {"name": "plain", "version": "1.0", "state": "LOADING", "reason": ""},
        {"name": "plain", "version": "2.0", "state": "UNAVAILABLE", "reason": "out of luck"},
    ]
    assert {row["name"] for row in ask("POST", "/v2/repository/index", {"ready": True}).json()} == {
        "identity",
        "signed",
    }
    assert ask("GET", "/v2/models/plain").json()["versions"] == ["1.0", "2.0"]


def test_a_model_without_a_signature_promises_none(ask: Any) -> None:
    told = ask("GET", "/v2/models/plain").json()
    assert (told["inputs"], told["outputs"]) == ([], [])


def test_the_table_of_errors_has_every_class() -> None:
    def below(cls: type) -> list[type]:
        return [cls, *(found for child in cls.__subclasses__() for found in below(child))]

    for cls in below(tree.RelayError):
        status = next(errors.TABLE[one] for one in [*cls.__mro__, Exception] if one in errors.TABLE)
        assert 400 <= status < 600
    assert errors.look_up(ZeroDivisionError()) == 500
    assert errors.look_up(HandlerSaid("no", 418)) == 418
    assert errors.look_up(HandlerSaid("no", 200)) == 500
    assert errors.look_up(tree.QueueFull("m", None, ""), generates=True) == 429
    assert errors.look_up(tree.QueueFull("m", None, "")) == 503
    assert errors.document(ZeroDivisionError("secret"), "id")["error"] == (
        "Unexpected ZeroDivisionError; the server's log has more under id."
    )


def test_a_handlers_own_words_and_a_fault_of_it(ask: Any, models: Any) -> None:
    models.add("refuses", lambda data, context: [PredictionException("too dark", 422)])
    models.add("fails", lambda data, context: [1 / 0])
    answer = ask("POST", "/v2/models/refuses/infer", one([1.0]))
    assert (answer.status_code, answer.json()) == (422, {"error": "too dark"})
    answer = ask("POST", "/v2/models/fails/infer", one([1.0]))
    assert (answer.status_code, answer.json()) == (500, {"error": "Prediction failed"})


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [("config", 501, "is not served"), ("file:1/model.pt", 501, "is not served"), ("wrokers", 400, "url and workers")],
)
def test_what_a_load_cannot_be_told(ask: Any, name: str, status: int, words: str) -> None:
    answer = ask("POST", "/v2/repository/models/plain/load", json.dumps({"parameters": {name: "x"}}).encode())
    assert answer.status_code == status
    assert name in answer.json()["error"] and words in answer.json()["error"]


def test_keys(ask: Any, models: Any) -> None:
    def key(name: str, *rights: str, models: tuple[str, ...] = ("*",)) -> tuple[bytes, Grant]:
        return sha256(name.encode()).digest(), Grant(frozenset(rights), models)

    models.grant(
        Access(dict([key("asks", "infer", models=("plain",)), key("looks", "observe"), key("rules", "manage")]))
    )
    infer, load = "/v2/models/plain/infer", "/v2/repository/models/plain/load"

    def status(method: str, path: str, bearer: str | None) -> int:
        named = {} if bearer is None else {"authorization": f"Bearer {bearer}"}
        answer = ask(method, path, one([1.0]) if path == infer else b"", **named)
        assert answer.status_code == 200 or list(answer.json()) == ["error"]
        return answer.status_code

    assert [status("GET", path, None) for path in ("/v2", "/v2/health/live", "/v2/health/ready")] == [200] * 3
    assert status("POST", infer, None) == 401
    assert status("POST", infer, "wrong") == 401
    assert status("POST", infer, "asks") == 200
    assert status("POST", infer, "looks") == 403
    assert status("GET", "/v2/models/identity", "asks") == 403
    assert status("GET", "/v2/models/identity", "looks") == 200
    assert status("GET", "/v2/models/stats", "looks") == 200
    assert status("POST", load, "asks") == 403
    assert status("POST", load, "looks") == 403
    assert status("POST", load, "rules") == 200
    index = ask("POST", "/v2/repository/index", authorization="Bearer asks").json()
    assert {row["name"] for row in index} == {"plain"}


# Generated text


def completes(data: list, context: Any) -> list:
    """As the handler llm answers completions."""
    assert context.get_request_header(0, "url_path") == "v1/completions"
    asked = data[0]["body"]
    words = [f"{asked['prompt']} ", "and ", "so on"][: asked["max_tokens"]]
    if not asked["stream"]:
        return [{"choices": [{"text": "".join(words), "finish_reason": "length"}]}]
    context.set_response_content_type(0, "text/event-stream")
    for word in words:
        context.emit(0, b"data: " + orjson.dumps({"choices": [{"text": word, "finish_reason": None}]}) + b"\n\n")
    if asked.get("seed") == 13:
        return [PredictionException("the engine is gone", 503)]
    return [b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n']


def events(answer: httpx.Response) -> list[dict]:
    assert answer.headers["content-type"] == "text/event-stream"
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n") if event]


def test_generate(ask: Any, models: Any) -> None:
    models.add("llm", completes)
    body = {"id": "7", "text_input": "once", "parameters": {"max_tokens": 2, "details": True}}
    answer = ask("POST", "/v2/models/llm/generate", body)
    assert answer.json() == {
        "text_output": "once and ",
        "model_name": "llm",
        "model_version": "1.0",
        "id": "7",
        "details": {"finish_reason": "length"},
    }
    assert (
        ask("POST", "/v2/models/llm/versions/1.0/generate", {"text_input": "a"}).json()["text_output"] == "a and so on"
    )


def test_generate_stream(ask: Any, models: Any) -> None:
    models.add("llm", completes)
    told = events(ask("POST", "/v2/models/llm/generate_stream", {"text_input": "a", "parameters": {"details": True}}))
    assert "".join(event["text_output"] for event in told) == "a and so on"
    assert told[-1]["details"] == {"finish_reason": "eos_token"}
    assert all(event["model_name"] == "llm" for event in told)


def test_an_error_in_mid_stream_is_an_event(ask: Any, models: Any) -> None:
    models.add("llm", completes)
    told = events(ask("POST", "/v2/models/llm/generate_stream", {"text_input": "a", "parameters": {"seed": 13}}))
    assert told[-1] == {"error": "the engine is gone"}


@pytest.mark.parametrize(
    ("model", "body", "status", "words"),
    [
        ("llm", {}, 422, "text_input"),
        ("llm", {"text_input": "x", "parameters": 1}, 422, "parameters"),
        ("llm", b"{", 422, "not JSON"),
        ("plain", {"text_input": "x"}, 424, "Prediction failed"),
        ("says", {"text_input": "x"}, 501, "generates no text"),
        ("nobody", {"text_input": "x"}, 404, "Model not found"),
    ],
)
def test_what_is_not_generated(ask: Any, models: Any, model: str, body: Any, status: int, words: str) -> None:
    models.add("llm", completes)
    models.add("says", lambda data, context: [[1, 2]])
    answer = ask("POST", f"/v2/models/{model}/generate", body)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_a_stream_is_one_text_of_infer(ask: Any, models: Any) -> None:
    def tells(data: list, context: Any) -> list:
        for word in ("once ", "upon "):
            context.emit(0, word)
        return ["a time"]

    models.add("tells", tells)
    [output] = ask("POST", "/v2/models/tells/infer", one([1.0])).json()["outputs"]
    assert (output["name"], output["data"]) == ("output-0", ["once upon a time"])


# Whatever comes

_LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_ANY = st.recursive(_LEAF, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
_TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "y"]) | _ANY,
        "datatype": st.sampled_from(["FP32", "INT8", "BYTES", "BOOL", "BF16"]) | _ANY,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | _ANY,
        "data": _ANY,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 20) | _ANY}) | _ANY,
    },
)
_REQUEST = st.fixed_dictionaries(
    {"inputs": st.lists(_TENSOR, max_size=2) | _ANY},
    optional={"outputs": st.lists(_TENSOR, max_size=2) | _ANY, "id": _ANY, "parameters": _ANY},
)


@given(_REQUEST, st.binary(max_size=24), st.integers(-2, 2))
@settings(max_examples=300)
def test_whatever_comes_is_read_or_refused(said: Any, raw: bytes, off: int) -> None:
    head = json.dumps(said).encode()
    for length in (str(len(head) + off), None):
        try:
            asked = framing.read("m", None, head + raw, length)
        except BadRequest as error:
            assert len(str(error)) < 600
        else:
            given = [tensors.received(part.name, part.value, part.content_type or "") for part in asked.inputs]
            assert all(tensor.array().shape == tensor.shape for tensor in given)


def test_the_same_words_before_other_bytes() -> None:
    length = str(len(HEAD))
    for numbers in ([1.0, 2.0], [3.0, 4.0]):
        asked = framing.read("m", None, HEAD + np.array(numbers, np.float32).tobytes(), length)
        assert np.frombuffer(asked.inputs[0].value, np.float32).tolist() == numbers
        with pytest.raises(BadRequest, match="7 bytes are left behind"):
            framing.read("m", None, HEAD + b"1234567", length)


@given(st.binary(max_size=200), st.none() | st.text(max_size=6))
def test_bytes_of_any_kind_are_refused(body: bytes, length: str | None) -> None:
    with contextlib.suppress(BadRequest):
        framing.read("m", None, body, length)


def test_the_handler_llm_takes_what_generate_asks() -> None:
    parameters = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "stop": ["."], "details": True}
    asked = generate.read("llm", None, {"text_input": "once", "parameters": parameters}, stream=True)
    [body] = generate.call(asked, "id", {}).inputs
    question = openai.read(generate.PATH, {"body": json.loads(body.value)}, Sampling())
    assert (question.prompts, question.max_new_tokens, question.stops) == (("once",), 7, (".",))
    assert question.stream
    assert question.sampling.temperature == 0.5
