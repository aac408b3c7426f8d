"""Reloads of a model class: edits, errors, kept weights, helper modules, and a batch that runs meanwhile."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watchfiles.main

import handlers
from handlers.context import Context

pytestmark = pytest.mark.integration  # waits for events of the file system

MODEL = """
import words

class Model:
    torchrelay_keep = ("weights",)

    def setup(self, context):
        self.weights = object()

    def predict(self, request: str) -> str:
        return f"{words.WORD} one {id(self.weights)}"
"""


class Reloaded:
    """A served class whose source is watched; the archive is a copy of the source."""

    def __init__(self, folder: Path, source: str = MODEL) -> None:
        self.source, archive = folder / "source", folder / "archive"
        for directory in (self.source, archive):
            directory.mkdir()
            (directory / "served.py").write_text(source)
            (directory / "words.py").write_text("WORD = 'old'\n")
        self.report = folder / "report"
        self.context = Context("m", str(archive), {})
        options = {"source": str(self.source / "served.py"), "report": str(self.report)}
        self.context.model_yaml_config["reload"] = options
        self.entry = handlers.load("served.py", archive, {})
        self.entry.initialize(self.context)
        assert self.wait(1)["message"] == "watching"

    def wait(self, count: int) -> dict[str, Any]:
        """Return the report's entry number ``count``."""
        deadline = time.monotonic() + 60
        while not self.report.exists() or len(self.report.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, "no report of the reload"
            time.sleep(0.01)
        document: dict[str, Any] = json.loads(self.report.read_text().splitlines()[count - 1])
        return document

    def predict(self) -> str:
        self.context.begin(["1"], [{}], [{}])
        (value,) = self.entry([{"body": "x"}], self.context)
        return str(value)

    def edit(self, old: str, new: str, file: str = "served.py") -> None:
        """Replace text by one change of the folder; a truncated file could be loaded before its new text."""
        path, edited = self.source / file, self.report.with_name("edited")
        edited.write_text(path.read_text().replace(old, new))
        edited.replace(path)


@pytest.fixture
def modules() -> Iterator[None]:
    """Restore what reloads change in this process."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name in ("words", "served") or name.startswith("served_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("modules")
def test_an_edit_is_served_with_the_kept_weights(tmp_path: Path) -> None:
    served = Reloaded(tmp_path)
    first = served.predict()
    assert first.startswith("old one ")
    served.edit(" one ", " two ")
    report = served.wait(2)
    assert report["ok"]
    assert report["kept"] == ["weights"]
    assert served.predict() == first.replace("one", "two")
    served.edit("object()", "[0]")
    report = served.wait(3)
    assert report["kept"] == []
    assert served.predict() != first.replace("one", "two")


@pytest.mark.usefixtures("modules")
def test_the_start_is_reported_once_edits_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notify = watchfiles.main.RustNotify

    def start_late(*args: Any) -> Any:
        time.sleep(0.5)
        return notify(*args)

    monkeypatch.setattr(watchfiles.main, "RustNotify", start_late)
    served = Reloaded(tmp_path)
    served.edit(" one ", " two ")
    assert served.wait(2)["ok"]


@pytest.mark.usefixtures("modules")
def test_an_edit_of_an_imported_file_is_served(tmp_path: Path) -> None:
    served = Reloaded(tmp_path)
    served.edit("old", "new", file="words.py")
    assert served.wait(2)["ok"]
    assert served.predict().startswith("new one ")


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def predict(self,", "def predict(self,(", r"served.py, line 10: SyntaxError"),
        ("import words", "import words\n1 / 0", r"served.py, line 3: ZeroDivisionError: division by zero"),
        ("self.weights = object()", "self.weights = absent", r"served.py, line 8: NameError"),
        ("def predict(", "def guess(", r"there is no handler in it"),
        ("def predict(", "async def predict(", r"predict has become async. Start the server again"),
    ],
)
def test_an_error_is_reported_with_its_line_and_the_old_code_stays(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    served = Reloaded(tmp_path)
    first = served.predict()
    served.edit(old, new)
    report = served.wait(2)
    assert not report["ok"]
    assert message in report["message"]
    assert served.predict() == first
    served.edit(new, old)
    assert served.wait(3)["ok"]


@pytest.mark.usefixtures("modules")
def test_a_batch_that_runs_finishes_with_the_old_code(tmp_path: Path) -> None:
    source = """
import threading
class Model:
    torchrelay_keep = ("started", "released")
    def setup(self, context):
        self.started, self.released = threading.Event(), threading.Event()
        context.model = self
    def predict(self, request: str) -> str:
        self.started.set()
        self.released.wait(60)
        return self.word()
    def word(self):
        return "one"
"""
    served = Reloaded(tmp_path, source)
    model, values = served.context.model, []  # type: ignore[attr-defined]
    batch = threading.Thread(target=lambda: values.append(served.predict()))
    batch.start()
    assert model.started.wait(60)
    served.edit('"one"', '"two"')
    assert served.wait(2)["ok"]
    model.released.set()
    batch.join()
    assert values == ["one"]
    assert served.predict() == "two"


@pytest.mark.usefixtures("modules")
def test_changed_types_and_options_are_reported(tmp_path: Path) -> None:
    served = Reloaded(tmp_path)
    served.edit("-> str", "-> bytes")
    assert "its types have changed" in served.wait(2)["message"]


def test_an_invalid_option_is_refused() -> None:
    from handlers.loading.code_reload import create_reloader

    with pytest.raises(handlers.HandlerLoadError, match="reload is True, and is a mapping with source"):
        create_reloader(True, Path(), lambda cls: None)  # type: ignore[arg-type,return-value]
