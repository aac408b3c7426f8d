"""Private modules: archives of one process with modules of the same names."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.errors import HandlerLoadError
from handlers.loading.private_modules import PrivateModules

HANDLER = """
import helper
from package.inner import NAME as inner_name
STATE = []

def handle(data, context):
    import late
    STATE.append(helper.NAME)
    return [[helper.NAME, inner_name, late.NAME, len(STATE)]] * len(data or [])
"""


class Archives:
    """Archives in folders of their own; ``run`` executes code in a thread of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: list[PrivateModules] = []

    def __call__(self, name: str, **files: str) -> PrivateModules:
        folder = self.folder / name
        for file, text in files.items():
            path = folder / f"{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.open.append(PrivateModules(folder))
        return self.open[-1]

    def run(self, modules: PrivateModules, function: Callable[[], Any]) -> Any:
        results: list[Any] = []

        def work() -> None:
            modules.enter()
            try:
                with modules.loading():
                    results.append(function())
            except BaseException as error:
                results.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]


@pytest.fixture
def archives(tmp_path: Path) -> Iterator[Archives]:
    before = dict(sys.modules)
    made = Archives(tmp_path)
    yield made
    for modules in made.open:
        modules.close()
    assert not {name for name in sys.modules.keys() - before.keys() if name.startswith("archive")}


def files(name: str) -> dict[str, str]:
    return {
        "h": HANDLER,
        "helper": f"NAME = {name!r}",
        "package/__init__": "",
        "package/inner": "from . import deep\nfrom helper import NAME as helper_name\n"
        "NAME = deep.NAME + helper_name",
        "package/deep": f"NAME = 'deep-{name}-'",
        "late": f"NAME = 'late-{name}'",
    }


def test_handlers_of_the_same_file_name_have_modules_and_globals_of_their_own(archives: Archives) -> None:
    entries = {}
    for name in ("one", "two"):
        modules = archives(name, **files(name))
        directory = archives.folder / name
        entries[name] = archives.run(modules, lambda: handlers.load("h.py", directory, {}))  # noqa: B023
    for count in (1, 2):
        for name, entry in entries.items():
            assert entry([{}], None) == [[name, f"deep-{name}-{name}", f"late-{name}", count]]
    assert not {"h", "helper", "late", "package"} & sys.modules.keys()
    assert not {str(archives.folder / name) for name in entries} & set(sys.path)


def test_names_are_resolved_by_importlib_and_pickle_while_an_archive_loads(archives: Archives) -> None:
    source = """
import dataclasses, importlib, pickle

class Net:
    pass

@dataclasses.dataclass
class Point:
    x: "int"

def load(data):
    return pickle.loads(data)
"""
    modules = archives("one", stored_net=source, beside_it="NAME = 1")
    stored = b"\x80\x04cstored_net\nNet\n)\x81."  # an object of the class Net of a module named stored_net

    def load() -> Any:
        import importlib

        module = modules.import_module("stored_net")
        net = module.load(stored)
        assert type(net) is module.Net
        assert importlib.import_module("beside_it").NAME == 1
        return module

    module = archives.run(modules, load)
    assert not {"stored_net", "beside_it"} & sys.modules.keys()
    again = pickle.loads(pickle.dumps(module.Point(1)))
    assert again == module.Point(1)
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(stored)


def test_the_standard_library_and_installed_packages_come_from_the_process(archives: Archives) -> None:
    modules = archives("one", json="raise AssertionError", h="import json, numpy\nJSON, NUMPY = json, numpy")
    module = archives.run(modules, lambda: modules.import_module("h"))
    assert module.JSON is sys.modules["json"]
    assert module.NUMPY is sys.modules["numpy"]


def test_an_archive_may_have_a_package_of_our_name(archives: Archives) -> None:
    package = {"handlers/__init__": "", "handlers/own": "NAME = 'own'"}
    source = "from handlers.own import NAME\nfrom handlers.base import BaseHandler"
    modules = archives("one", h=source, **package)
    module = archives.run(modules, lambda: modules.import_module("h"))
    assert module.NAME == "own"
    from handlers.base import BaseHandler

    assert module.BaseHandler is BaseHandler


def test_a_missing_module_and_a_broken_one_are_named(archives: Archives) -> None:
    package = {"package/__init__": "import package.none"}
    modules = archives("one", h="import nothing_here", broken="1 / 0", **package)
    directory = archives.folder / "one"
    for handler, expected in (
        ("h.py", "No module named 'nothing_here'"),
        ("broken.py", "ZeroDivisionError"),
        ("package.x:handle", "No module named 'package.none'"),
        ("package:handle", "No module named 'package.none'"),
    ):
        with pytest.raises(HandlerLoadError, match=expected):
            archives.run(modules, lambda: handlers.load(handler, directory, {}))  # noqa: B023
    (directory / f"native{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    with pytest.raises(ImportError, match="extension module"):
        archives.run(modules, lambda: modules.import_module("native"))


def test_a_file_with_dots_in_its_name_is_loaded_once(archives: Archives) -> None:
    modules = archives("one", **{"my.handler": "VALUE = []"})
    file = archives.folder / "one" / "my.handler.py"
    first = archives.run(modules, lambda: modules.load_file(file))
    assert archives.run(modules, lambda: modules.load_file(file)) is first


def test_closed_modules_are_freed_without_a_collection(archives: Archives) -> None:
    source = "class Big:\n    pass\nBIG = Big()\ndef use():\n    return BIG"
    modules = archives("one", h=source)
    module = archives.run(modules, lambda: modules.import_module("h"))
    big = weakref.ref(module.BIG)
    del module
    gc.disable()
    try:
        archives.open.remove(modules)
        modules.close()
        assert big() is None
    finally:
        gc.enable()
