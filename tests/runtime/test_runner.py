import gc
import json
import os
import sys
import threading

import pytest

from serve_app.errors import (
    CountMismatch,
    HandlerFailed,
    HandlerSaid,
    InvalidOutput,
    OutOfResources,
    StartFailed,
    StartOutOfMemory,
    UnsupportedOutput,
)
from serve_app.settings import RuntimeSettings
from serve_app.types import Call, Input, Reply


def call(value=b"{}", content_type="application/json", **fields):
    fields.setdefault("request_id", "id")
    return Call("m", inputs=(Input("body", value, content_type),), **fields)


def said(value):
    return call(json.dumps(value).encode())


def nowhere(index, piece):
    raise AssertionError("nothing streams here")


@pytest.fixture
def loaded(make_runner):
    def make(*args, **kwargs):
        runner = make_runner(*args, **kwargs)
        runner.load()
        return runner

    return make


ECHO = """
def handle(data, context):
    return None if data is None else [row["body"] for row in data]
"""

# What `do` says happens: to the row itself, or (a list) to the whole batch.
OBEDIENT = """
from ts.utils.util import PredictionException

class Obedient:
    def initialize(self, context):
        self.context = context

    def handle(self, data, context):
        orders = [row["body"] for row in data]
        for order in orders:
            if order == "raise":
                raise ValueError("this row is wrong")
            if order == "say":
                raise PredictionException("not today", 418)
            if order == "exit":
                raise SystemExit(7)
            if order == "memory":
                raise MemoryError()
            if order == "cuda":
                raise RuntimeError("CUDA error: out of memory")
            if order == "device":
                raise type("OutOfMemoryError", (RuntimeError,), {})("HIP out of memory")
            if order == "dict":
                return {"not": "a list"}
            if order == "short":
                return []
        return [self.one(order, i) for i, order in enumerate(orders)]

    def one(self, order, i):
        if order == "row raise":
            try:
                raise ValueError("only this row")
            except ValueError as error:
                return error
        if order == "row say":
            return PredictionException("only you", 404)
        if order == "object":
            return object()
        if order == "dressed":
            self.context.set_response_content_type(i, "image/x")
            self.context.set_response_header(i, "X-Row", str(i))
            self.context.set_response_status(203, "Half", i)
        return order
"""


# Answers


def test_a_reply_is_bytes_and_says_which_version_gave_it(loaded):
    runner = loaded(ECHO)
    [reply] = runner.run([said({"a": [1, "é"]})], nowhere)
    assert reply == Reply(json.dumps({"a": [1, "é"]}, indent=2).encode(), version="1.0")


def test_a_row_may_dress_its_own_answer(loaded):
    runner = loaded(OBEDIENT)
    plain, dressed, after = runner.run([said("a"), said("dressed"), said("b")], nowhere)
    assert (plain.status, plain.headers, plain.content_type) == (200, (), None)
    assert (dressed.status, dressed.phrase, dressed.content_type) == (203, "Half", "image/x")
    assert dressed.headers == (("X-Row", "1"),)
    [next_batch] = runner.run([said("a")], nowhere)
    assert (next_batch.status, next_batch.headers) == (200, ())
    assert after.body == b"b"


def test_a_handler_sees_headers_parameters_ids_and_kind(loaded):
    runner = loaded("""
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
        [reply] = runner.run([call(headers={"X-Mine": "yes"}, request_id="r1", **fields)], nowhere)
        return json.loads(reply.body)

    common = {"id": "r1", "mine": "yes", "type": "application/json"}
    assert answer() == {**common, "explain": "False", "describe": None}
    assert answer(kind="explain") == {**common, "explain": "True", "describe": None}
    assert answer(kind="describe") == {**common, "explain": None, "describe": "True"}


def test_requests_stay_bytes_where_decoding_is_off(loaded):
    runner = loaded(
        "def handle(data, context):\n    return data and [type(row['body']).__name__ for row in data]",
        settings=RuntimeSettings(decode_input_request=False),
    )
    assert [r.body for r in runner.run([call(b"{}"), call(b"x", "text/plain")], nowhere)] == [
        b"bytearray",
        b"bytearray",
    ]


# Errors


@pytest.mark.parametrize(
    ("order", "error", "detail"),
    [
        ("raise", HandlerFailed, "ValueError: this row is wrong"),
        ("exit", HandlerFailed, "SystemExit: 7"),
        ("memory", OutOfResources, "MemoryError"),
        ("cuda", OutOfResources, "CUDA error: out of memory"),
        ("device", OutOfResources, "HIP out of memory"),
        ("dict", InvalidOutput, "returned dict"),
        ("short", CountMismatch, "got 2 rows and returned 0"),
    ],
)
def test_what_fails_the_whole_batch_is_one_error_in_every_place(loaded, caplog, order, error, detail):
    runner = loaded(OBEDIENT)
    first, second = runner.run([said("fine"), said(order)], nowhere)
    assert first is second
    assert type(first) is error
    assert detail in first.detail
    assert detail in caplog.text


def test_the_traceback_is_the_authors_from_its_first_frame_on(loaded, caplog):
    runner = loaded(OBEDIENT)
    [error] = runner.run([call(b'"raise"', request_id="r-17")], nowhere)
    lines = error.detail.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "handler.py" in lines[1]
    assert lines[1].endswith("in handle")
    assert lines[2].strip() == 'raise ValueError("this row is wrong")'
    assert caplog.text.count("Traceback") == 1
    assert "m--1.0: the handler failed (requests r-17)" in caplog.text


def test_the_same_traceback_is_logged_in_full_once(loaded, caplog):
    runner = loaded(OBEDIENT)
    for _ in range(3):
        runner.run([said("raise")], nowhere)
    assert caplog.text.count("Traceback") == 1
    assert caplog.text.count("the same failure again") == 2


def test_a_prediction_exception_keeps_its_words_and_status(loaded, caplog):
    runner = loaded(OBEDIENT)
    first, second = runner.run([said("fine"), said("say")], nowhere)
    assert first is second
    assert (type(first), str(first), first.code) == (HandlerSaid, "not today", 418)
    assert "Traceback" not in caplog.text


def test_an_exception_in_a_rows_place_is_that_rows_alone(loaded):
    runner = loaded(OBEDIENT)
    a, failed, told, odd, b = runner.run([said(o) for o in ("a", "row raise", "row say", "object", "b")], nowhere)
    assert (a.body, b.body) == (b"a", b"b")
    assert type(failed) is HandlerFailed
    assert "ValueError: only this row" in failed.detail
    assert (type(told), str(told), told.code) == (HandlerSaid, "only you", 404)
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
        send([word[n] for word in words], context.request_ids, "Intermediate Prediction success", 200, context)
        context.set_response_header(0, "Too", "late")
    return [word[0] for word in words]
"""


def test_the_first_piece_brings_status_and_headers_and_the_others_are_bytes(loaded):
    runner = loaded(STREAM)
    pieces = []
    first, second = runner.run(
        [said(["c", "a", "b"]), said(["z", {"x": 1}, b"y".decode()])], lambda *p: pieces.append(p)
    )
    assert [index for index, _ in pieces] == [0, 1, 0, 1]
    head = pieces[0][1]
    assert (head.body, head.content_type, head.status) == (b"a", "text/event-stream", 200)
    assert head.headers == ()
    assert pieces[1][1].body == b'{\n  "x": 1\n}'
    assert [piece for _, piece in pieces[2:]] == [b"b", b"y"]
    assert (first.body, second.body) == (b"c", b"z")


def test_a_piece_that_cannot_be_sent_ends_its_row_and_no_other(loaded):
    runner = loaded("""
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
    pieces = []
    first, second = runner.run([call(), call()], lambda i, p: pieces.append((i, p if isinstance(p, bytes) else p.body)))
    assert type(first) is UnsupportedOutput
    assert second.body == b"last"
    assert pieces == [(0, b"1"), (1, b"1"), (1, b"2")]


def test_an_intermediate_error_ends_its_row_in_the_handlers_words(loaded):
    runner = loaded("""
from ts.handler_utils.utils import send_intermediate_predict_response as send

def handle(data, context):
    if data is None:
        return
    send(["x"], {0: context.request_ids[0]}, "no more", 429, context)
    return [b"a", b"b"]
""")
    first, second = runner.run([call(request_id="1"), call(request_id="2")], nowhere)
    assert (type(first), str(first), first.code) == (HandlerSaid, "no more", 429)
    assert second.body == b"b"


def test_pieces_may_come_from_a_thread_of_the_authors(loaded):
    runner = loaded("""
import threading

def handle(data, context):
    if data is None:
        return
    thread = threading.Thread(target=context.emit, args=(0, b"piece"))
    thread.start()
    thread.join()
    return [b"last"]
""")
    pieces = []
    runner.run([call()], lambda index, piece: pieces.append((piece.body, threading.get_ident())))
    assert [body for body, _ in pieces] == [b"piece"]
    assert pieces[0][1] != threading.get_ident()


# Loading


def test_a_handler_works_in_its_archives_directory_and_knows_its_model(loaded, tmp_path):
    runner = loaded(
        """
import os
import pathlib

def handle(data, context):
    if data is None:
        context.found = pathlib.Path("words.txt").read_text()
        return
    names = context.system_properties
    return [{
        "found": context.found, "directory": names["model_dir"], "batch": names["batch_size"], "gpu": names["gpu_id"],
        "name": context.model_name, "config": context.model_yaml_config, "cwd": os.getcwd(),
    }]
""",
        files={"words.txt": "here"},
        batch_size=4,
        config={"handler": {"top": 3}},
    )
    [reply] = runner.run([call()], nowhere)
    directory = str(tmp_path / "archive")
    assert json.loads(reply.body) == {
        "found": "here",
        "directory": directory,
        "batch": 4,
        "gpu": None,
        "name": "m",
        "config": {"handler": {"top": 3}},
        "cwd": os.path.realpath(directory),
    }


def test_the_specs_handler_goes_before_the_manifests(loaded):
    runner = loaded(
        ECHO,
        files={"other.py": "def greet(data, context):\n    return data and [b'other'] * len(data)"},
        handler="other:greet",
    )
    assert runner.run([call()], nowhere)[0].body == b"other"


@pytest.mark.parametrize(
    ("handler", "error", "where", "what"),
    [
        ("import no_such_package_at_all", StartFailed, "handler.py", "ModuleNotFoundError"),
        ("def handle(data, context:", StartFailed, "handler.py", "SyntaxError"),
        ("def handle(data, context):\n    raise KeyError('weights')", StartFailed, "handler.py", "KeyError: 'weights'"),
        ("def handle(data, context):\n    raise SystemExit(3)", StartFailed, "handler.py", "SystemExit: 3"),
        ("def handle(data, context):\n    raise MemoryError('too big')", StartOutOfMemory, "handler.py", "MemoryError"),
        (
            "def handle(data, context):\n    raise RuntimeError('CUDA out of memory. Tried')",
            StartOutOfMemory,
            "handler.py",
            "CUDA out of memory",
        ),
        ("raise MemoryError('while importing')", StartOutOfMemory, "handler.py", "while importing"),
    ],
)
def test_a_start_that_fails_holds_the_authors_traceback(make_runner, handler, error, where, what):
    runner = make_runner(handler)
    with pytest.raises(StartFailed) as caught:
        runner.load()
    assert type(caught.value) is error
    assert caught.value.args[:2] == ("m", "1.0")
    assert where in caught.value.detail
    assert what in caught.value.detail
    assert "runner.py" not in caught.value.detail


def test_a_handler_that_is_not_there_is_named(make_runner):
    with pytest.raises(StartFailed) as caught:
        make_runner(ECHO, handler="absent.py").load()
    assert "'absent.py'" in caught.value.detail


def test_a_directory_that_is_gone_is_named(make_runner, tmp_path):
    runner = make_runner(ECHO)
    (tmp_path / "archive").rename(tmp_path / "moved")
    with pytest.raises(StartFailed) as caught:
        runner.load()
    assert str(tmp_path / "archive") in caught.value.detail


# Samples

RECORDER = """
seen = []

def handle(data, context):
    if data is None:
        return
    bodies = [row["body"] for row in data]
    seen.append(bodies)
    if any(body == "bad" for body in bodies):
        raise ValueError("cannot read this sample")
    if len(bodies) > 1 and context.model_yaml_config.get("no_batches"):
        raise MemoryError()
    return [[str(s) for s in seen]] * len(bodies)
"""


def batches(runner):
    [module] = {id(m): m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("handler_")}.values()
    return module.seen


def test_samples_run_alone_and_then_as_a_full_batch_before_anything_counts(loaded):
    files = {
        "samples/a.json": '{"x": 1}',
        "samples/b.txt": "text",
        "samples/c.png": b"\x89PNG",
        "samples/.hidden": "no",
    }
    runner = loaded(RECORDER, files=files, batch_size=4)
    runner.warm_up()
    a, b, c = {"x": 1}, "text", bytearray(b"\x89PNG")
    assert batches(runner) == [[a], [b], [c], [a, b, c, a]]


def test_a_compiled_model_is_warmed_up_for_smaller_batches_too(loaded):
    runner = loaded(RECORDER, files={"samples/a.txt": "a"}, config={"optimize": {"compile": True}}, batch_size=6)
    runner.warm_up()
    assert [len(batch) for batch in batches(runner)] == [1, 2, 4, 6]


def test_named_samples_go_before_the_folder(loaded):
    files = {"samples/a.txt": "a", "first.txt": "first", "deep/second.json": "2"}
    runner = loaded(RECORDER, files=files, config={"samples": ["first.txt", "deep/second.json"]})
    runner.warm_up()
    assert batches(runner) == [["first"], [2]]


def test_without_samples_warming_up_sets_loading_aside_from_garbage_collection(loaded):
    runner = loaded(ECHO)
    gc.unfreeze()
    runner.warm_up()
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize(
    ("files", "config", "error", "words"),
    [
        (
            {"samples/x.txt": "bad"},
            {},
            StartFailed,
            ["sample samples/x.txt: Prediction failed", "ValueError: cannot read this"],
        ),
        ({}, {"samples": ["gone.json"]}, StartFailed, ["sample gone.json: No such file", "--extra-files"]),
        (
            {},
            {"samples": ["../outside.txt"]},
            StartFailed,
            ["sample ../outside.txt: the file lies outside the archive"],
        ),
        ({}, {"samples": "one.json"}, StartFailed, ["samples is a list of file names, not 'one.json'"]),
        ({"samples/x.txt": "ok"}, {"no_batches": True}, StartOutOfMemory, ["a batch of 2 samples", "MemoryError"]),
    ],
)
def test_a_sample_that_fails_fails_the_start_by_name(loaded, files, config, error, words):
    runner = loaded(RECORDER, files=files, config=config, batch_size=2)
    with pytest.raises(StartFailed) as caught:
        runner.warm_up()
    assert type(caught.value) is error
    for word in words:
        assert word in caught.value.detail


SQUARES = """
def handle(data, context):
    return None if data is None else [value * value for value in data]
"""


@pytest.mark.parametrize("how", ["settings", "archive"])
def test_an_envelope_stands_around_the_handler(loaded, how):
    settings = RuntimeSettings(service_envelope="json" if how == "settings" else "body")
    runner = loaded(SQUARES, settings=settings, config={"envelope": "json"} if how == "archive" else {})
    [first, second, wrong] = runner.run(
        [said({"instances": [2, 3]}), said({"instances": [4]}), said({"rows": []})], nowhere
    )
    assert json.loads(first.body) == {"predictions": [4, 9]} and json.loads(second.body) == {"predictions": [16]}
    assert isinstance(wrong, HandlerSaid) and wrong.code == 400


def test_an_envelope_that_there_is_not_fails_the_start(make_runner):
    with pytest.raises(StartFailed, match="version: 1.0") as caught:
        make_runner(SQUARES, settings=RuntimeSettings(service_envelope="kserv")).load()
    assert "Did you mean 'kserve'?" in caught.value.detail


def test_hidden_variables_are_gone_before_the_handler_is_imported(make_runner, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    monkeypatch.setenv("NOT_SECRET_KEY_EITHER", "y")
    code = "import os\nSEEN = sorted(name for name in os.environ if 'SECRET' in name)\n" + ECHO.replace(
        'row["body"] for row in data', "SEEN"
    )
    runner = make_runner(code, settings=RuntimeSettings(blacklist_env_vars="SECRET.*|OTHER"))
    runner.load()
    [answer] = runner.run([said(1)], nowhere)
    assert json.loads(answer.body) == ["NOT_SECRET_KEY_EITHER"]


def test_sequence_headers_have_the_names_of_the_settings(loaded):
    settings = RuntimeSettings(header_key_sequence_id="x-session")
    code = "def handle(data, context):\n    return data and [context.get_sequence_id(i) for i in range(len(data))]"
    [answer] = loaded(code, settings=settings).run([call(headers={"X-Session": "s7"})], nowhere)
    assert answer.body == b"s7"
