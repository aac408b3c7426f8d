"""Loading and warming up a handler."""

import gc
import json
import os
import sys

import pytest

from serve_app.domain.model import ModelSpec
from serve_app.errors import (
    HandlerRejected,
    StartFailed,
    StartOutOfMemory,
)
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings
from tests.support.runner_fakes import ECHO, fail_on_chunk, make_json_request, make_request

pytestmark = pytest.mark.integration


# Loading


def test_a_handler_works_in_its_archives_directory_and_knows_its_model(load_runner, tmp_path):
    runner = load_runner(
        """
import os
import pathlib

def handle(data, context):
    if data is None:
        context.found = pathlib.Path("words.txt").read_text()
        return
    names = context.system_properties
    return [{
        "found": context.found, "directory": names["model_dir"], "batch": names["batch_size"],
        "gpu": names["gpu_id"],
        "name": context.model_name, "config": context.model_yaml_config, "cwd": os.getcwd(),
    }]
""",
        files={"words.txt": "here"},
        batch_size=4,
        config={"handler": {"top": 3}},
    )
    [reply] = runner.run([make_request()], fail_on_chunk)
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


def test_the_handler_of_the_spec_overrides_the_manifest(load_runner):
    runner = load_runner(
        ECHO,
        files={"other.py": "def greet(data, context):\n    return data and [b'other'] * len(data)"},
        handler="other:greet",
    )
    assert runner.run([make_request()], fail_on_chunk)[0].body == b"other"


@pytest.mark.parametrize(
    ("handler", "error", "where", "what"),
    [
        ("import no_such_package_at_all", StartFailed, "handler.py", "ModuleNotFoundError"),
        ("def handle(data, context:", StartFailed, "handler.py", "SyntaxError"),
        (
            "def handle(data, context):\n    raise KeyError('weights')",
            StartFailed,
            "handler.py",
            "KeyError: 'weights'",
        ),
        ("def handle(data, context):\n    raise SystemExit(3)", StartFailed, "handler.py", "SystemExit: 3"),
        (
            "def handle(data, context):\n    raise MemoryError('too big')",
            StartOutOfMemory,
            "handler.py",
            "MemoryError",
        ),
        (
            "def handle(data, context):\n    raise RuntimeError('CUDA out of memory. Tried')",
            StartOutOfMemory,
            "handler.py",
            "CUDA out of memory",
        ),
        ("import torch\ntorch.empty(2**46)", StartOutOfMemory, "handler.py", "can't allocate memory"),
        ("raise MemoryError('while importing')", StartOutOfMemory, "handler.py", "while importing"),
    ],
)
def test_failed_starts_have_the_handlers_traceback(make_runner, handler, error, where, what):
    runner = make_runner(handler)
    with pytest.raises(StartFailed) as caught:
        runner.load()
    assert type(caught.value) is error
    assert caught.value.args[:2] == ("m", "1.0")
    assert where in caught.value.detail
    assert what in caught.value.detail
    assert "runner.py" not in caught.value.detail


def test_missing_handlers_are_named(make_runner):
    with pytest.raises(StartFailed) as caught:
        make_runner(ECHO, handler="absent.py").load()
    assert "'absent.py'" in caught.value.detail


def test_missing_directories_are_named(make_runner, tmp_path):
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
    return sys.modules["handler"].seen


def test_samples_run_alone_and_then_as_a_full_batch(load_runner):
    files = {
        "samples/a.json": '{"x": 1}',
        "samples/b.txt": "text",
        "samples/c.png": b"\x89PNG",
        "samples/.hidden": "no",
    }
    runner = load_runner(RECORDER, files=files, batch_size=4)
    runner.warm_up()
    a, b, c = {"x": 1}, "text", bytearray(b"\x89PNG")
    assert batches(runner) == [[a], [b], [c], [a, b, c, a]]


def test_a_compiled_model_is_warmed_up_for_smaller_batches_too(load_runner):
    runner = load_runner(
        RECORDER, files={"samples/a.txt": "a"}, config={"optimize": {"compile": True}}, batch_size=6
    )
    runner.warm_up()
    assert [len(batch) for batch in batches(runner)] == [1, 2, 4, 6]


def test_configured_samples_override_the_folder(load_runner):
    files = {"samples/a.txt": "a", "first.txt": "first", "deep/second.json": "2"}
    runner = load_runner(RECORDER, files=files, config={"samples": ["first.txt", "deep/second.json"]})
    runner.warm_up()
    assert batches(runner) == [["first"], [2]]


def test_warm_up_without_samples_freezes_garbage_collection(load_runner):
    runner = load_runner(ECHO)
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
        (
            {"samples/x.txt": "ok"},
            {"no_batches": True},
            StartOutOfMemory,
            ["a batch of 2 samples", "MemoryError"],
        ),
    ],
)
def test_failing_samples_fail_the_start_by_name(load_runner, files, config, error, words):
    runner = load_runner(RECORDER, files=files, config=config, batch_size=2)
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
def test_envelopes_wrap_the_handler(load_runner, how):
    settings = RuntimeSettings(service_envelope="json" if how == "settings" else "body")
    runner = load_runner(SQUARES, settings=settings, config={"envelope": "json"} if how == "archive" else {})
    [first, second, wrong] = runner.run(
        [
            make_json_request({"instances": [2, 3]}),
            make_json_request({"instances": [4]}),
            make_json_request({"rows": []}),
        ],
        fail_on_chunk,
    )
    assert json.loads(first.body) == {"predictions": [4, 9]} and json.loads(second.body) == {
        "predictions": [16]
    }
    assert isinstance(wrong, HandlerRejected) and wrong.code == 400


def test_unknown_envelopes_fail_the_start(make_runner):
    with pytest.raises(StartFailed, match=r"version: 1.0") as caught:
        make_runner(SQUARES, settings=RuntimeSettings(service_envelope="kserv")).load()
    assert "Did you mean 'kserve'?" in caught.value.detail


def test_sequence_headers_have_the_names_of_the_settings(load_runner):
    settings = RuntimeSettings(header_key_sequence_id="x-session")
    code = (
        "def handle(data, context):\n    return data and [context.get_sequence_id(i) for i in"
        " range(len(data))]"
    )
    [answer] = load_runner(code, settings=settings).run(
        [make_request(headers={"X-Session": "s7"})], fail_on_chunk
    )
    assert answer.body == b"s7"


def test_a_folder_without_a_manifest_is_neither_working_directory_nor_import_path(
    tmp_path, own_process, monkeypatch
):
    directory = tmp_path / "folder"
    directory.mkdir()
    before = os.getcwd()
    for name in ("base_handler.py", "own.py"):
        (directory / name).write_text("from pathlib import Path\n" + ECHO)
    spec = ModelSpec("m", "1.0", url="m", digest="", archive="", handler="own.py")
    with pytest.raises(StartFailed) as refused:
        Runner(spec, directory, {}, RuntimeSettings()).load()
    assert "there is no handler 'own.py'" in refused.value.detail
    assert os.getcwd() == before and str(directory) not in sys.path
    trusted = Runner(spec.with_(config={"trusted": True}), directory, {}, RuntimeSettings())
    trusted.load()
    assert os.getcwd() == str(directory)
