"""Handler files of every kind, through ``handlers.load``."""

from __future__ import annotations

import asyncio
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
    "handler", ["handler.py", "handler", "handler:Echo", "handler.py:Echo", "handler:handle", "some/where/handler.py"]
)
def test_a_class(archive: Archive, handler: str) -> None:
    assert run(handler, archive(handler=CLASS)) == ["m: hi"]


@pytest.mark.parametrize("handler", ["service.py", "service", "service:handle", "service.py:handle"])
def test_a_function_is_called_once_without_data_and_then_with_each_batch(archive: Archive, handler: str) -> None:
    assert run(handler, archive(service=FUNCTION)) == [2]


@pytest.mark.parametrize("handler", ["service.py:shout", "service:shout"])
def test_a_function_by_name(archive: Archive, handler: str) -> None:
    assert run(handler, archive(service=FUNCTION)) == ["HI"]


def test_a_function_goes_before_a_class(archive: Archive) -> None:
    assert run("handler", archive(handler=FUNCTION + CLASS)) == [2]


def test_a_class_needs_no_initialize(archive: Archive) -> None:
    source = "class Bare:\n    def handle(self, data, context):\n        return data"
    assert run("handler", archive(handler=source)) == [{"body": "hi"}]


def test_the_class_that_extends_the_others_is_the_handler(archive: Archive) -> None:
    source = f"""{CLASS}
class Notes:
    pass

class Loud(Echo):
    def handle(self, data, context):
        return ["LOUD"]
"""
    assert run("handler", archive(handler=source)) == ["LOUD"]


def test_two_classes_that_could_be_it(archive: Archive) -> None:
    directory = archive(handler=CLASS + CLASS.replace("Echo", "Other"))
    with pytest.raises(HandlerLoadError, match=r"handler\.py: 2 classes .*\(Echo, Other\).*handler=handler\.py:Echo"):
        handlers.load("handler.py", directory, {})
    assert run("handler.py:Other", directory) == ["m: hi"]


def test_a_file_without_a_handler(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match=r"handler\.py: there is no handler in it\. .*\(Notes\).* Define a"):
        handlers.load("handler", archive(handler="class Notes:\n    pass"), {})


def test_a_class_that_is_only_imported_is_not_the_handler(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match="there is no handler in it"):
        handlers.load("handler", archive(handler="from echo import Echo", echo=CLASS), {})


def test_a_name_that_is_not_in_the_file(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match=r"no function or class 'shuot'.* Did you mean 'shout'"):
        handlers.load("service:shuot", archive(service=FUNCTION), {})


def test_a_named_class_without_handle(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match=r"the class Notes has no method handle"):
        handlers.load("handler:Notes", archive(handler="class Notes:\n    pass"), {})


def test_a_handler_that_is_nowhere(archive: Archive) -> None:
    directory = archive(my_handler=CLASS)
    with pytest.raises(HandlerLoadError, match=r"no handler 'my_handlr\.py'. Did you mean 'my_handler'\?") as raised:
        handlers.load("my_handlr.py", directory, {})
    assert ", ".join(sorted(handlers.HANDLERS)) in str(raised.value) and "my_handler.py" in str(raised.value)
    with pytest.raises(HandlerLoadError, match=r"no handler 'vllm_handler'\. Write an async handler that makes vllm's"):
        handlers.load("vllm_handler", directory, {})
    with pytest.raises(HandlerLoadError, match="Did you mean 'image_classifier'"):
        handlers.load("image_clasifier", directory, {})
    with pytest.raises(HandlerLoadError, match="no handler 'nowhere_at_all:handle'"):
        handlers.load("nowhere_at_all:handle", directory, {})


def test_a_path_does_not_leave_the_archive(archive: Archive, tmp_path: Path) -> None:
    directory = archive(outside=CLASS) / "inside"
    directory.mkdir()
    for handler in ("../outside.py", str(tmp_path / "outside.py")):
        with pytest.raises(HandlerLoadError, match="there is no handler"):
            handlers.load(handler, directory, {})


def test_the_manifests_handler_where_no_other_is_named(archive: Archive) -> None:
    entry = handlers.load("", archive(service=FUNCTION), {"model": {"handler": "service.py:shout"}})
    assert entry([{"body": "a"}], None) == ["A"]
    with pytest.raises(HandlerLoadError, match="neither the manifest nor the registration names a handler"):
        handlers.load("", archive(), {})


def test_siblings_and_packages_of_the_archive_import(archive: Archive) -> None:
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
    assert run("pieces.more:handle", directory) == ["pieces"], "a package's module is imported as what it is"


def test_a_file_is_one_module_by_whichever_name(archive: Archive) -> None:
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


def test_two_archives_may_name_their_files_alike(tmp_path: Path) -> None:
    entries = []
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "handler.py").write_text(f"def handle(data, context):\n    return ['{name}']")
        entries.append(handlers.load("handler.py", directory, {}))
    assert [entry([{}], None) for entry in entries] == [["one"], ["two"]]
    assert len({entry.handle.__module__ for entry in entries}) == 2


def test_an_archive_gets_its_own_modules_whatever_was_imported_before(tmp_path: Path) -> None:
    answers = []
    for name in ("one", "two", "one"):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        word = f"{name}{len(answers)}" + "!" * len(answers)  # bytecode stands for all files of its size and second
        (directory / "words.py").write_text(f"WORD = {word!r}")
        (directory / "handler.py").write_text("import words\ndef handle(data, context):\n    return [words.WORD]")
        answers += run("handler.py", directory)
    assert answers == ["one0", "two1!", "one2!!"]


def test_a_file_that_fails_to_import_shows_its_own_traceback(archive: Archive) -> None:
    directory = archive(handler="def boom():\n    return 1 / 0\n\nboom()")
    with pytest.raises(HandlerLoadError, match=r"handler\.py: importing it failed with ZeroDivisionError") as raised:
        handlers.load("handler", directory, {})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    text = "".join(traceback.format_exception(raised.type, raised.value, raised.tb))
    assert f'File "{directory / "handler.py"}", line 2, in boom' in text
    (directory / "handler.py").write_text(FUNCTION)
    assert run("handler", directory) == [2], "a failed import leaves nothing behind"


def test_a_missing_package_is_named_with_the_cure(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match=r"Pack no_such_package into the archive .* requirements file"):
        handlers.load("handler", archive(handler="import no_such_package.part"), {})


def test_a_handler_that_exits_at_import(archive: Archive) -> None:
    with pytest.raises(HandlerLoadError, match="SystemExit: 3"):
        handlers.load("handler", archive(handler="raise SystemExit(3)"), {})


def test_out_of_memory_stays_what_it_is(archive: Archive) -> None:
    with pytest.raises(MemoryError):
        handlers.load("handler", archive(handler="raise MemoryError"), {})


def test_a_constructor_with_arguments(archive: Archive) -> None:
    source = CLASS.replace("class Echo:", "class Needy:\n    def __init__(self, path):\n        pass\n")
    with pytest.raises(HandlerLoadError, match=r"Needy\(\) failed with TypeError.*made without arguments"):
        handlers.load("handler", archive(handler=source), {})


def test_an_async_handler_says_so_and_is_awaited(archive: Archive) -> None:
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

    async def ask(entry: handlers.Entry) -> Any:
        assert entry.asynchronous
        begun = entry.initialize(None)
        if begun is not None:
            await begun
        return await entry([{"body": 1}], None)

    assert asyncio.run(ask(handlers.load("handler:greet", directory, {}))) == [1]
    assert asyncio.run(ask(handlers.load("handler:Handler", directory, {}))) == [True]
    plain = handlers.load("plain", archive(plain="def handle(data, context):\n    return data"), {})
    assert not plain.asynchronous and plain.initialize(None) is None


def test_a_handler_may_put_another_handle_in_its_place(archive: Archive) -> None:
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


def test_envelopes_by_name() -> None:
    assert {name: handlers.load_envelope(name).__name__ for name in ("body", "json", "kserve", "kservev2")} == {
        "body": "BodyEnvelope",
        "json": "JSONEnvelope",
        "kserve": "KServeEnvelope",
        "kservev2": "KServev2Envelope",
    }
    with pytest.raises(HandlerLoadError, match=r"no service envelope 'kserv'. Did you mean 'kserve'\? There are body,"):
        handlers.load_envelope("kserv")


def test_a_file_of_the_archive_goes_before_a_built_in_name(archive: Archive) -> None:
    assert run("base_handler", archive(base_handler=CLASS)) == ["m: hi"]


def test_every_built_in_handler_exists(tmp_path: Path) -> None:
    for name in handlers.HANDLERS:
        assert callable(handlers.load(name, tmp_path, {}).handle), name


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, handlers, handlers.context, handlers.torchserve_names, handlers.intermediate\n"
        "print('torch' in sys.modules, 'PIL' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
