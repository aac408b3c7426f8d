"""How large an answer may be, and whose requests a handler's words are about."""

import asyncio
import json

import pytest

from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.errors import OutputTooLarge, StartFailed, UnsupportedOutput
from serve_app.settings import RuntimeSettings
from serve_app.telemetry.logs import REQUESTS

SIZES = """
def handle(data, context):
    if data is None:
        return None
    sizes = [int(row["body"]) for row in data]
    return ["x" * size for size in sizes]
"""
STREAMS = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    send_intermediate_predict_response(["x" * 50], context.request_ids, "", 200, context)
    send_intermediate_predict_response(["x" * 5000], context.request_ids, "", 200, context)
    return ["end"]
"""
WHO = """
from serve_app.telemetry.logs import REQUESTS

SEEN = [REQUESTS.get()]

def handle(data, context):
    if data is None:
        return None
    SEEN.append(REQUESTS.get())
    if data[0]["body"] == b"raise":
        raise ValueError("no")
    return [SEEN] * len(data)
"""
WHO_ASYNC = """
import asyncio
from serve_app.telemetry.logs import REQUESTS

class Handler:
    def initialize(self, context):
        self.met = asyncio.Event()
        self.count = 0

    async def handle(self, data, context):
        self.count += 1
        if self.count == 2:
            self.met.set()
        await self.met.wait()
        return [list(REQUESTS.get())]
"""


def make_request(body, request_id="id"):
    return InferenceRequest("m", inputs=(InputPart("body", str(body).encode()),), request_id=request_id)


def nowhere(index, chunk):
    raise AssertionError("nothing streams here")


def test_an_answer_over_the_limit_is_that_rows_error_and_names_the_setting(make_runner, caplog):
    runner = make_runner(SIZES, settings=RuntimeSettings(max_response_size=1000))
    runner.load()
    small, exact, large = runner.run(
        [make_request(3), make_request(1000), make_request(1001, "guilty")], nowhere
    )
    assert (len(small.body), len(exact.body)) == (3, 1000)
    assert isinstance(large, OutputTooLarge)
    assert "1001 bytes is larger than max_response_size (1000 bytes). Raise runtime.max_response_size" in str(
        large
    )
    assert "guilty" in caplog.text and "max_response_size" in caplog.text


def test_a_piece_of_a_stream_over_the_limit_ends_that_stream(make_runner):
    runner = make_runner(STREAMS, settings=RuntimeSettings(max_response_size=1000))
    runner.load()
    pieces = []
    [end] = runner.run([make_request(0)], lambda index, chunk: pieces.append(chunk))
    assert [len(chunk.body) for chunk in pieces] == [50]
    assert isinstance(end, OutputTooLarge)


def test_a_sample_whose_answer_is_too_large_fails_the_start(make_runner):
    settings = RuntimeSettings(max_response_size=10)
    runner = make_runner(SIZES, {"samples/one": "11"}, settings=settings)
    runner.load()
    with pytest.raises(StartFailed) as failed:
        runner.warm_up()
    assert "max_response_size" in failed.value.detail


def test_without_a_limit_nothing_is_too_large(make_runner):
    runner = make_runner(SIZES)
    runner.load()
    [reply] = runner.run([make_request(10_000_000)], nowhere)
    assert len(reply.body) == 10_000_000


def test_a_handlers_words_are_about_the_requests_of_its_batch_and_no_others(make_runner):
    runner = make_runner(WHO)
    runner.load()
    runner.run([make_request("raise", "bad")], nowhere)
    first, second = runner.run([make_request("x", "one"), make_request("y", "two")], nowhere)
    assert first.body == second.body
    assert first.body == b'[\n  [],\n  [\n    "bad"\n  ],\n  [\n    "one",\n    "two"\n  ]\n]'
    assert REQUESTS.get() == ()


def test_so_are_those_of_an_asynchronous_one(make_runner):
    runner = make_runner(WHO_ASYNC)
    runner.load()

    async def both():
        return await asyncio.gather(
            *(runner.run_async([make_request("x", id_)], nowhere) for id_ in ("one", "two"))
        )

    answers = runner.loop.run_until_complete(both())
    runner.loop.close()
    assert [[reply.body for reply in answer] for answer in answers] == [
        [b'[\n  "one"\n]'],
        [b'[\n  "two"\n]'],
    ]


NUMBERS = """
def handle(data, context):
    if data is None:
        return None
    return [{"score": float(bytes(row["body"]))} for row in data]
"""


def test_numbers_that_json_does_not_have_are_null_and_counted(make_runner):
    runner = make_runner(NUMBERS)
    runner.load()
    finite, *others = runner.run([make_request(text) for text in ("1.5", "nan", "-inf")], nowhere)
    assert (json.loads(finite.body), finite.non_finite) == ({"score": 1.5}, False)
    for reply in others:
        assert (json.loads(reply.body), reply.non_finite) == ({"score": None}, True)
        assert type(reply.body) is bytes


def test_they_are_their_rows_error_where_the_setting_demands_it(make_runner, caplog):
    runner = make_runner(NUMBERS, settings=RuntimeSettings(non_finite_numbers="error"))
    runner.load()
    finite, refused = runner.run([make_request("1.5"), make_request("nan")], nowhere)
    assert json.loads(finite.body) == {"score": 1.5}
    assert isinstance(refused, UnsupportedOutput)
    assert "runtime.non_finite_numbers is error" in refused.detail and "NaN" in caplog.text
