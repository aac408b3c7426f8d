"""Runs of a handler: responses, errors and streams."""

import json
import threading

import pytest

from serve_app.domain.request import InferenceResponse
from serve_app.errors import (
    BatchSizeMismatch,
    HandlerFailed,
    HandlerOutOfMemory,
    HandlerRejected,
    InvalidOutput,
    UnsupportedOutput,
)
from serve_app.settings import RuntimeSettings
from tests.support.runner_fakes import ECHO, OBEDIENT, fail_on_chunk, make_json_request, make_request

pytestmark = pytest.mark.integration


# Answers


def test_responses_are_bytes_with_the_version(load_runner):
    runner = load_runner(ECHO)
    [reply] = runner.run([make_json_request({"a": [1, "é"]})], fail_on_chunk)
    assert reply == InferenceResponse(json.dumps({"a": [1, "é"]}, indent=2).encode(), version="1.0")


def test_rows_set_status_and_headers_of_their_response(load_runner):
    runner = load_runner(OBEDIENT)
    plain, dressed, after = runner.run(
        [make_json_request("a"), make_json_request("dressed"), make_json_request("b")], fail_on_chunk
    )
    assert (plain.status, plain.headers, plain.content_type) == (200, (), None)
    assert (dressed.status, dressed.phrase, dressed.content_type) == (203, "Half", "image/x")
    assert dressed.headers == (("X-Row", "1"),)
    [next_batch] = runner.run([make_json_request("a")], fail_on_chunk)
    assert (next_batch.status, next_batch.headers) == (200, ())
    assert after.body == b"b"


def test_a_handler_sees_headers_parameters_ids_and_kind(load_runner):
    runner = load_runner("""
def handle(data, context):
    if data is None:
        return
    return [
        {
            "id": context.get_request_id(i),
            "mine": context.get_request_header(i, "X-Mine"),
            "explain": context.get_request_header(i, "explain"),
            "describe": context.get_request_header(i, "describe"),
            "type": context.get_request_header(i, "body")["content-type"],
        }
        for i in range(len(data))
    ]
""")

    def answer(**fields):
        [reply] = runner.run(
            [make_request(headers={"X-Mine": "yes"}, request_id="r1", **fields)], fail_on_chunk
        )
        return json.loads(reply.body)

    common = {"id": "r1", "mine": "yes", "type": "application/json"}
    assert answer() == {**common, "explain": "False", "describe": None}
    assert answer(kind="explain") == {**common, "explain": "True", "describe": None}
    assert answer(kind="describe") == {**common, "explain": None, "describe": "True"}


def test_requests_stay_bytes_where_decoding_is_off(load_runner):
    runner = load_runner(
        "def handle(data, context):\n    return data and [type(row['body']).__name__ for row in data]",
        settings=RuntimeSettings(decode_input_request=False),
    )
    assert [
        r.body for r in runner.run([make_request(b"{}"), make_request(b"x", "text/plain")], fail_on_chunk)
    ] == [
        b"bytearray",
        b"bytearray",
    ]


# Errors


@pytest.mark.parametrize(
    ("order", "error", "detail"),
    [
        ("raise", HandlerFailed, "ValueError: this row is wrong"),
        ("exit", HandlerFailed, "SystemExit: 7"),
        ("memory", HandlerOutOfMemory, "MemoryError"),
        ("cuda", HandlerOutOfMemory, "CUDA error: out of memory"),
        ("device", HandlerOutOfMemory, "HIP out of memory"),
        ("dict", InvalidOutput, "returned dict"),
        ("short", BatchSizeMismatch, "got 2 rows and returned 0"),
    ],
)
def test_batch_failures_are_one_error_for_all_rows(load_runner, caplog, order, error, detail):
    runner = load_runner(OBEDIENT)
    first, second = runner.run([make_json_request("fine"), make_json_request(order)], fail_on_chunk)
    assert first is second
    assert type(first) is error
    assert detail in first.detail
    assert detail in caplog.text


def test_tracebacks_start_at_the_handlers_first_frame(load_runner, caplog):
    runner = load_runner(OBEDIENT)
    [error] = runner.run([make_request(b'"raise"', request_id="r-17")], fail_on_chunk)
    lines = error.detail.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "handler.py" in lines[1]
    assert lines[1].endswith("in handle")
    assert lines[2].strip() == 'raise ValueError("this row is wrong")'
    assert caplog.text.count("Traceback") == 1
    assert "m--1.0: the handler failed (requests r-17)" in caplog.text


def test_the_same_traceback_is_logged_in_full_once(load_runner, caplog):
    runner = load_runner(OBEDIENT)
    for _ in range(3):
        runner.run([make_json_request("raise")], fail_on_chunk)
    assert caplog.text.count("Traceback") == 1
    assert caplog.text.count("the same failure again") == 2


def test_prediction_exceptions_keep_message_and_status(load_runner, caplog):
    runner = load_runner(OBEDIENT)
    first, second = runner.run([make_json_request("fine"), make_json_request("say")], fail_on_chunk)
    assert first is second
    assert (type(first), str(first), first.code) == (HandlerRejected, "not today", 418)
    assert "Traceback" not in caplog.text


def test_a_returned_exception_fails_only_its_row(load_runner):
    runner = load_runner(OBEDIENT)
    a, failed, reported, odd, b = runner.run(
        [make_json_request(o) for o in ("a", "row raise", "row say", "object", "b")], fail_on_chunk
    )
    assert (a.body, b.body) == (b"a", b"b")
    assert type(failed) is HandlerFailed
    assert "ValueError: only this row" in failed.detail
    assert (type(reported), str(reported), reported.code) == (HandlerRejected, "only you", 404)
    assert type(odd) is UnsupportedOutput


# Streams


STREAM = """
import threading
from ts.handler_utils.utils import send_intermediate_predict_response as send

def handle(data, context):
    if data is None:
        return
    context.set_response_content_type(0, "text/event-stream")
    words = [row["body"] for row in data]
    for n in (1, 2):
        send([word[n] for word in words], context.request_ids, "Intermediate Prediction success", 200,
        context)
        context.set_response_header(0, "Too", "late")
    return [word[0] for word in words]
"""


def test_the_first_chunk_has_status_and_headers_and_later_ones_are_bytes(load_runner):
    runner = load_runner(STREAM)
    chunks = []
    first, second = runner.run(
        [make_json_request(["c", "a", "b"]), make_json_request(["z", {"x": 1}, b"y".decode()])],
        lambda *p: chunks.append(p),
    )
    assert [index for index, _ in chunks] == [0, 1, 0, 1]
    head = chunks[0][1]
    assert (head.body, head.content_type, head.status) == (b"a", "text/event-stream", 200)
    assert head.headers == ()
    assert chunks[1][1].body == b'{\n  "x": 1\n}'
    assert [chunk for _, chunk in chunks[2:]] == [b"b", b"y"]
    assert (first.body, second.body) == (b"c", b"z")


def test_an_unencodable_chunk_fails_only_its_row(load_runner):
    runner = load_runner("""
def handle(data, context):
    if data is None:
        return
    for i in range(2):
        context.emit(i, b"1")
    context.emit(0, object())
    context.emit(0, b"never seen")
    context.emit(1, b"2")
    return [b"last", b"last"]
""")
    chunks = []
    first, second = runner.run(
        [make_request(), make_request()],
        lambda i, p: chunks.append((i, p if isinstance(p, bytes) else p.body)),
    )
    assert type(first) is UnsupportedOutput
    assert second.body == b"last"
    assert chunks == [(0, b"1"), (1, b"1"), (1, b"2")]


def test_an_emitted_error_ends_its_row_with_the_handlers_message(load_runner):
    runner = load_runner("""
from ts.handler_utils.utils import send_intermediate_predict_response as send

def handle(data, context):
    if data is None:
        return
    send(["x"], {0: context.request_ids[0]}, "no more", 429, context)
    return [b"a", b"b"]
""")
    first, second = runner.run([make_request(request_id="1"), make_request(request_id="2")], fail_on_chunk)
    assert (type(first), str(first), first.code) == (HandlerRejected, "no more", 429)
    assert second.body == b"b"


def test_chunks_may_be_emitted_in_threads_of_the_handler(load_runner):
    runner = load_runner("""
import threading

def handle(data, context):
    if data is None:
        return
    thread = threading.Thread(target=context.emit, args=(0, b"piece"))
    thread.start()
    thread.join()
    return [b"last"]
""")
    chunks = []
    runner.run([make_request()], lambda index, chunk: chunks.append((chunk.body, threading.get_ident())))
    assert [body for body, _ in chunks] == [b"piece"]
    assert chunks[0][1] != threading.get_ident()


@pytest.mark.parametrize("example", ["2**70", "'\\ud800'", "object()", "'a' * 40_000"])
def test_schemas_that_the_routing_table_cannot_hold_are_none(load_runner, example):
    runner = load_runner(f"""
import torchrelay

class Handler:
    schemas = {{"input": {{"schema": {{"example": {example}}}}}}}

    def handle(self, data, context):
        return data
""")
    assert runner.schemas is None
