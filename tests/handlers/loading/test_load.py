"""Tests of ``handlers.load`` with handler files of every kind."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError

pytestmark = pytest.mark.integration


Archive = Callable[..., Path]

CLASS = """
class Echo:
    def initialize(self, context):
        self.name = context.model_name

    def handle(self, data, context):
        return [f"{self.name}: {row['body']}" for row in data]
"""
FUNCTION = """
calls = []

def handle(data, context):
    calls.append(data)
    return None if data is None else [len(calls) for _ in data]

def shout(data, context):
    return data and [row["body"].upper() for row in data]
"""


def run(handler: str, directory: Path, body: str = "hi") -> list[object]:
    entry = handlers.load(handler, directory, {"model": {}})
    context = Context("m", str(directory), {"model": {}})
    entry.initialize(context)
    context.begin(["a"], [{}], [{}])
    return entry([{"body": body}], context)


@pytest.mark.parametrize(
    "handler",
    ["handler.py", "handler", "handler:Echo", "handler.py:Echo", "handler:handle", "some/where/handler.py"],
)
def test_a_class_is_loaded(archive: Archive, handler: str) -> None:
    assert run(handler, archive(handler=CLASS)) == ["m: hi"]


@pytest.mark.parametrize("handler", ["service.py", "service", "service:handle", "service.py:handle"])
def test_a_function_is_called_once_without_data_and_then_with_each_batch(
    archive: Archive, handler: str
) -> None:
    assert run(handler, archive(service=FUNCTION)) == [2]


@pytest.mark.parametrize("handler", ["service.py:shout", "service:shout"])
def test_a_function_is_loaded_by_name(archive: Archive, handler: str) -> None:
    assert run(handler, archive(service=FUNCTION)) == ["HI"]


def test_a_function_takes_precedence_over_a_class(archive: Archive) -> None:
    assert run("handler", archive(handler=FUNCTION + CLASS)) == [2]


def test_a_class_needs_no_initialize(archive: Archive) -> None:
    source = "class Bare:\n    def handle(self, data, context):\n        return data"
    assert run("handler", archive(handler=source)) == [{"body": "hi"}]


def test_the_most_derived_class_is_the_handler(archive: Archive) -> None:
    source = f"""{CLASS}
class Notes:
    pass

class Loud(Echo):
    def handle(self, data, context):
        return ["LOUD"]
"""
    assert run("handler", archive(handler=source)) == ["LOUD"]


def test_two_candidate_classes_are_an_error(archive: Archive) -> None:
    directory = archive(handler=CLASS + CLASS.replace("Echo", "Other"))
    with pytest.raises(
        HandlerLoadError, match=r"handler\.py: 2 classes .*\(Echo, Other\).*handler=handler\.py:Echo"
    ):
        handlers.load("handler.py", directory, {})
    assert run("handler.py:Other", directory) == ["m: hi"]


def test_a_file_without_a_handler_is_an_error(archive: Archive) -> None:
    with pytest.raises(
        HandlerLoadError, match=r"handler\.py: there is no handler in it\. .*\(Notes\).* Define a"
    ):
        handlers.load("handler", archive(handler="class Notes:\n    pass"), {})


def test_a_class_that_is_only_imported_is_not_the_handler(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match="there is no handler in it"):
        handlers.load("handler", archive(handler="from echo import Echo", echo=CLASS), {})


def test_an_unknown_name_in_the_file_gets_a_suggestion(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match=r"no function or class 'shuot'.* Did you mean 'shout'"):
        handlers.load("service:shuot", archive(service=FUNCTION), {})


def test_a_named_class_without_handle_is_an_error(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match=r"the class Notes has no method predict"):
        handlers.load("handler:Notes", archive(handler="class Notes:\n    pass"), {})


def test_an_unknown_handler_gets_a_suggestion(archive: Archive) -> None:
    directory = archive(my_handler=CLASS)
    with pytest.raises(
        HandlerLoadError, match=r"no handler 'my_handlr\.py'. Did you mean 'my_handler\.py'\?"
    ) as raised:
        handlers.load("my_handlr.py", directory, {})
    assert ", ".join(sorted(handlers.HANDLERS)) in str(raised.value) and "my_handler.py" in str(raised.value)
    with pytest.raises(HandlerLoadError, match="Did you mean 'image_classifier'"):
        handlers.load("image_clasifier", directory, {})
    with pytest.raises(HandlerLoadError, match="no handler 'nowhere_at_all:handle'"):
        handlers.load("nowhere_at_all:handle", directory, {})


def test_paths_outside_the_archive_are_rejected(archive: Archive, tmp_path: Path) -> None:
    directory = archive(outside=CLASS) / "inside"
    directory.mkdir()
    for handler in ("../outside.py", str(tmp_path / "outside.py")):
        with pytest.raises(HandlerLoadError, match="there is no handler"):
            handlers.load(handler, directory, {})


def test_the_manifests_handler_is_the_default(archive: Archive) -> None:
    entry = handlers.load("", archive(service=FUNCTION), {"model": {"handler": "service.py:shout"}})
    assert entry([{"body": "a"}], None) == ["A"]
    with pytest.raises(HandlerLoadError, match="neither the manifest nor the registration names a handler"):
        handlers.load("", archive(), {})


def test_modules_and_packages_of_the_archive_can_be_imported(archive: Archive) -> None:
    source = """
    from words import GREETING
    from pieces.more import END

    def handle(data, context):
        return [GREETING + END]
    """
    directory = archive(handler=source, words="GREETING = 'ho'")
    (directory / "pieces").mkdir()
    (directory / "pieces" / "__init__.py").touch()
    more = "from . import __name__ as NAME\nEND = '!'\n\ndef handle(data, context):\n    return [NAME]"
    (directory / "pieces" / "more.py").write_text(more)
    assert run("handler", directory) == ["ho!"]
    assert sys.path[0] == str(directory)
    assert run("pieces.more:handle", directory) == ["pieces"], "a package's module keeps its name"


def test_a_file_imported_under_two_names_is_one_module(archive: Archive) -> None:
    directory = archive(
        handler="""
        import sibling

        class State:
            pass

        def handle(data, context):
            return [sibling.state() is State]
        """,
        sibling="""
        def state():
            from handler import State
            return State
        """,
    )
    assert run("handler", directory) == [True]


def test_two_archives_may_have_files_of_the_same_name(tmp_path: Path) -> None:
    entries = []
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "handler.py").write_text(f"def handle(data, context):\n    return ['{name}']")
        entries.append(handlers.load("handler.py", directory, {}))
    assert [entry([{}], None) for entry in entries] == [["one"], ["two"]]
    assert {entry.handle.__module__ for entry in entries} == {"handler"}  # as for TorchServe


def test_modules_of_an_earlier_archive_are_not_reused(tmp_path: Path) -> None:
    answers = []
    for name in ("one", "two", "one"):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        # Python reuses cached bytecode for a file of the same size and second: texts differ in length.
        word = f"{name}{len(answers)}" + "!" * len(answers)
        (directory / "words.py").write_text(f"WORD = {word!r}")
        (directory / "handler.py").write_text(
            "import words\ndef handle(data, context):\n    return [words.WORD]"
        )
        answers += run("handler.py", directory)
    assert answers == ["one0", "two1!", "one2!!"]


def test_an_import_failure_keeps_the_files_own_traceback(archive: Archive) -> None:
    directory = archive(handler="def boom():\n    return 1 / 0\n\nboom()")
    with pytest.raises(
        HandlerLoadError, match=r"handler\.py, line 2: importing it failed with ZeroDivisionError"
    ) as raised:
        handlers.load("handler", directory, {})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    text = "".join(traceback.format_exception(raised.type, raised.value, raised.tb))
    assert f'File "{directory / "handler.py"}", line 2, in boom' in text
    (directory / "handler.py").write_text(FUNCTION)
    assert run("handler", directory) == [2], "a failed import leaves nothing behind"


def test_the_error_for_a_missing_package_names_the_remedy(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match=r"Pack no_such_package into the archive .* requirements file"):
        handlers.load("handler", archive(handler="import no_such_package.part"), {})


def test_exit_at_import_is_a_load_error(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match="SystemExit: 3"):
        handlers.load("handler", archive(handler="raise SystemExit(3)"), {})


def test_memory_errors_are_not_wrapped(archive: Archive) -> None:
    with pytest.raises(MemoryError):
        handlers.load("handler", archive(handler="raise MemoryError"), {})


def test_a_constructor_with_arguments_is_an_error(archive: Archive) -> None:
    source = CLASS.replace("class Echo:", "class Needy:\n    def __init__(self, path):\n        pass\n")
    with pytest.raises(HandlerLoadError, match=r"Needy\(\) failed with TypeError.*created without arguments"):
        handlers.load("handler", archive(handler=source), {})


def test_async_handlers_are_awaited(archive: Archive) -> None:
    source = """
    async def greet(data, context):
        return data and [row["body"] for row in data]

    class Handler:
        async def initialize(self, context):
            self.ready = True

        async def handle(self, data, context):
            return [self.ready for _ in data]
    """
    directory = archive(handler=source)

    async def run_async(entry: handlers.LoadedHandler) -> Any:
        assert entry.is_async
        awaitable = entry.initialize(None)
        if awaitable is not None:
            await awaitable
        return await entry([{"body": 1}], None)

    assert asyncio.run(run_async(handlers.load("handler:greet", directory, {}))) == [1]
    assert asyncio.run(run_async(handlers.load("handler:Handler", directory, {}))) == [True]
    plain = handlers.load("plain", archive(plain="def handle(data, context):\n    return data"), {})
    assert not plain.is_async and plain.initialize(None) is None


def test_a_handler_may_replace_its_handle(archive: Archive) -> None:
    source = """
    class Handler:
        def initialize(self, context):
            self.handle = lambda data, context: ["the other"] * len(data)

        def handle(self, data, context):
            return ["the first"] * len(data)
    """
    entry = handlers.load("handler", archive(handler=source), {})
    entry.initialize(None)
    assert entry([{}], None) == ["the other"]


def test_envelopes_are_loaded_by_name() -> None:
    assert {
        name: handlers.load_envelope(name).__name__ for name in ("body", "json", "kserve", "kservev2")
    } == {
        "body": "BodyEnvelope",
        "json": "JSONEnvelope",
        "kserve": "KServeEnvelope",
        "kservev2": "KServev2Envelope",
    }
    with pytest.raises(
        HandlerLoadError, match=r"no service envelope 'kserv'. Did you mean 'kserve'\? There are body,"
    ):
        handlers.load_envelope("kserv")


def test_an_archive_file_takes_precedence_over_a_built_in_name(archive: Archive) -> None:
    assert run("base_handler", archive(base_handler=CLASS)) == ["m: hi"]


def test_every_built_in_handler_exists(tmp_path: Path) -> None:
    for name in handlers.HANDLERS:
        assert callable(handlers.load(name, tmp_path, {}).handle), name


def test_torch_and_pillow_are_not_imported_eagerly() -> None:
    code = (
        "import sys, handlers, handlers.context, handlers.torchserve_compat.names, "
        "handlers.torchserve_compat.intermediate\n"
        "print('torch' in sys.modules, 'PIL' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_a_model_without_code_imports_nothing_of_its_folder(tmp_path, monkeypatch):
    """Neither as the handler nor in place of a package that a built-in handler imports."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("base_handler.py", "own.py", "shadowing_package.py"):
        (tmp_path / name).write_text("raise SystemExit(9)")
    entry = handlers.load("base_handler", tmp_path, {}, runs_code=False)
    assert type(entry.instance).__module__ == "handlers.base"
    assert str(tmp_path) not in sys.path
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("shadowing_package")
    for handler in ("own", "own.py:handle", "own:handle"):
        with pytest.raises(HandlerLoadError, match="there is no handler"):
            handlers.load(handler, tmp_path, {}, runs_code=False)


@pytest.mark.parametrize("name", ["{file}.py:shout", "{file}:shout"])
def test_only_the_variable_of_the_owner_names_a_file_outside_of_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    (tmp_path / "outside_it.py").write_text("def shout(data, context): return data")
    handler = name.format(file=tmp_path / "outside_it")
    with pytest.raises(HandlerLoadError, match="there is no handler"):
        handlers.load(handler, archive, {})
    monkeypatch.setenv("SAGEMAKER_HANDLER", handler)
    assert handlers.load(handler, archive, {})(["a"], None) == ["a"]
    with pytest.raises(HandlerLoadError, match="there is no handler"):
        handlers.load(handler, archive, {}, runs_code=False)
