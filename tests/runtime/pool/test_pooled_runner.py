"""Runners of several versions in one process: each handler has files, modules and variables of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.model import ModelSpec
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.pool import memory
from serve_app.runtime.pool.pooled_runner import PooledRunner
from serve_app.settings import RuntimeSettings
from serve_app.telemetry.running_batches import RunningBatches, read_running
from tests.support.runner_fakes import fail_on_chunk, make_request

pytestmark = pytest.mark.integration

HANDLER = """
import os
from pathlib import Path
import names

COUNT = 0
os.environ["SET_BY_A_HANDLER"] = names.NAME

def handle(data, context):
    global COUNT
    if data is None:
        context.found = Path("words.txt").read_text()
        return
    COUNT += 1
    assert os.environ.get("SET_BY_A_HANDLER") is None
    return [[context.found, Path("words.txt").read_text(), names.NAME, COUNT, os.path.basename(os.getcwd())]]
"""

# Its batches end once the file ``go`` exists.
BLOCKED = """
import os, time

def handle(data, context):
    while not os.path.exists("go"):
        time.sleep(0.01)
    return ["x"] * len(data or [])
"""
LARGE = """
import numpy as np
WEIGHTS = np.ones(16 << 20)

def handle(data, context):
    return ["x"] * len(data or [])
"""

Load = Callable[..., "Loaded"]


class Loaded:
    """A loaded version and its handler thread."""

    def __init__(self, runner: PooledRunner, thread: HandlerThread) -> None:
        self.runner, self.thread = runner, thread

    def run(self) -> Any:
        [response] = self.thread.submit(self.runner.run, [make_request()], fail_on_chunk).result(30)
        return json.loads(response.body)


@pytest.fixture
def running(tmp_path: Path) -> RunningBatches:
    return RunningBatches(tmp_path / "host.running")


@pytest.fixture
def load(tmp_path: Path, running: RunningBatches) -> Iterator[Load]:
    loaded: list[Loaded] = []

    def load(name: str, **files: str) -> Loaded:
        directory = tmp_path / name
        directory.mkdir()
        for file, text in {
            "h.py": HANDLER,
            "names.py": f"NAME = {name!r}",
            "words.txt": name,
            **files,
        }.items():
            (directory / file).write_text(text)
        spec = ModelSpec(name, "1.0", "", "", "", handler="h.py", pool="p")
        manifest = {"model": {"modelName": name, "handler": "h.py"}}
        slot = running.open_slot(spec.ref.app)
        runner = PooledRunner(slot, spec, directory, manifest, RuntimeSettings())
        thread = HandlerThread()
        loaded.append(Loaded(runner, thread))
        thread.submit(runner.load).result(30)
        thread.submit(runner.warm_up).result(30)
        return loaded[-1]

    before, switch_interval = os.getcwd(), sys.getswitchinterval()
    yield load
    for one in loaded:
        one.thread.shutdown()
        one.runner.close()
    sys.setswitchinterval(switch_interval)
    assert os.getcwd() == before
    assert "SET_BY_A_HANDLER" not in os.environ


def test_versions_have_files_modules_globals_and_variables_of_their_own(load: Load) -> None:
    one, two = load("one"), load("two")
    assert one.run() == ["one", "one", "one", 1, "one"]
    assert two.run() == ["two", "two", "two", 1, "two"]
    assert one.run() == ["one", "one", "one", 2, "one"]


def test_a_running_batch_is_in_the_file(load: Load, running: RunningBatches) -> None:
    blocked = load("blocked", **{"h.py": BLOCKED, "go": ""})
    folder = Path(blocked.runner._directory)
    assert read_running(running.path) == []
    (folder / "go").unlink()
    waiting = blocked.thread.submit(blocked.runner.run, [make_request()], fail_on_chunk)
    while not (batches := read_running(running.path)):
        assert not wait([waiting], 0.01).done, "its batch ended without a record"
    assert [(batch.app, batch.thread) for batch in batches] == [("blocked--1.0", blocked.thread.ident)]
    (folder / "go").write_text("")
    waiting.result(30)
    assert read_running(running.path) == []
    assert blocked.runner.busy_seconds > 0


def test_a_failed_load_leaves_nothing_behind(load: Load) -> None:
    with pytest.raises(Exception, match="Failed to start workers"):
        load("broken", **{"names.py": "1 / 0"})
    assert load("one").run() == ["one", "one", "one", 1, "one"]
    assert "names" not in sys.modules


def test_closing_a_version_returns_its_memory(load: Load) -> None:
    load("one")
    before = memory.measure()
    large = load("large", **{"h.py": LARGE})
    loaded = memory.measure()
    assert loaded.host - before.host > 100 << 20
    large.thread.shutdown()
    large.runner.close()
    assert memory.measure().host - before.host < 32 << 20
    large.runner.close = lambda: None  # type: ignore[method-assign]  # the fixture closes it again
