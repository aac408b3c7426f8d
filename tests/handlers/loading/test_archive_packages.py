"""Archives with packages called ``handlers`` and ``serve_app``, loaded as a replica loads them."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import handlers
import handlers.errors
from handlers.loading import archive_packages


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Path]:
    path = list(sys.path)
    yield tmp_path
    archive_packages.install(tmp_path / "none")
    sys.path[:] = path


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def load(directory: Path, service: str) -> ModuleType:
    write(directory, {"service.py": service + "\ndef handle(data, context):\n    return data\n"})
    handlers.load("service.py", directory, {})
    return sys.modules["service"]


def test_the_archives_modules_win_and_a_name_that_it_lacks_is_ours(archive: Path) -> None:
    write(
        archive,
        {
            "handlers/__init__.py": "VERSION = 7",
            "handlers/preprocess.py": "from handlers.base import scale\ndef f(x): return scale(x) + 1",
            "handlers/base.py": "def scale(x): return 10 * x",
            "serve_app/errors.py": "class Mine(Exception): pass",
        },
    )
    module = load(
        archive,
        "import handlers.engines.streamer\n"
        "import serve_app.settings\n"
        "from handlers import VERSION, errors, load, preprocess\n"
        "from handlers.base import BaseHandler\n"
        "from handlers.context import Context\n"
        "from handlers.preprocess import f\n"
        "from serve_app.errors import Mine\n"
        "base, streamer = handlers.base, handlers.engines.streamer\n"
        "settings = serve_app.settings\n",
    )
    assert module.VERSION == 7 and module.f(4) == 41 and module.preprocess.f is module.f
    assert Path(module.base.__file__) == archive / "handlers/base.py"
    assert issubclass(module.Mine, Exception)
    assert module.errors is handlers.errors and module.load is handlers.load
    assert module.BaseHandler is importlib.import_module("handlers.base").BaseHandler
    assert module.Context is importlib.import_module("handlers.context").Context
    assert module.streamer is sys.modules["handlers.engines.streamer"]
    assert module.settings is sys.modules["serve_app.settings"]
    assert not hasattr(importlib.import_module("handlers.base"), "scale")


def test_a_folder_without_init_and_a_file_have_the_same_effect(archive: Path) -> None:
    write(archive, {"handlers/preprocess.py": "def f(): return 1", "serve_app.py": "def g(): return 2"})
    module = load(archive, "from handlers.preprocess import f\nfrom serve_app import g, settings\n")
    assert (module.f(), module.g()) == (1, 2)
    assert module.settings is importlib.import_module("serve_app.settings")


def test_relative_imports_and_function_level_imports(archive: Path) -> None:
    write(
        archive,
        {
            "handlers/__init__.py": "from . import preprocess",
            "handlers/preprocess.py": "from .tables import TABLE",
            "handlers/tables.py": "TABLE = [1]",
        },
    )
    module = load(archive, "def late():\n    from handlers.tables import TABLE\n    return TABLE\n")
    assert module.late() == [1]


def test_pickles_and_import_module_find_what_only_the_archive_has(archive: Path) -> None:
    write(archive, {"handlers/net.py": "class Net:\n    pass", "handlers/errors.py": "class Net: pass"})
    module = load(archive, "from handlers.net import Net\n")
    assert pickle.loads(b"chandlers.net\nNet\n.") is module.Net
    assert importlib.import_module("handlers.net").Net is module.Net
    assert importlib.import_module("handlers.errors") is handlers.errors


def test_a_handler_of_such_a_package(archive: Path) -> None:
    write(archive, {"handlers/base.py": "def mine(data, context): return 'mine'"})
    assert handlers.load("handlers.base:mine", archive, {}).handle([], None) == "mine"


def test_what_the_archive_lacks_and_we_lack_is_named_in_the_error(archive: Path) -> None:
    write(archive, {"handlers/__init__.py": ""})
    with pytest.raises(handlers.HandlerLoadError, match=r"No module named 'handlers\.preproces'"):
        load(archive, "from handlers.preproces import f\n")


def test_a_package_that_the_archives_module_needs_is_named_in_the_error(archive: Path) -> None:
    write(archive, {"handlers/preprocess.py": "import no_such_package"})
    with pytest.raises(handlers.HandlerLoadError, match="Pack no_such_package into the archive"):
        load(archive, "from handlers.preprocess import f\n")


def test_a_later_archive_does_not_see_an_earlier_ones_packages(archive: Path) -> None:
    write(archive / "first", {"handlers/preprocess.py": "def f(): return 1"})
    assert load(archive / "first", "from handlers.preprocess import f\n").f() == 1
    with pytest.raises(handlers.HandlerLoadError, match=r"No module named 'handlers\.preprocess'"):
        load(archive / "second", "from handlers.preprocess import f\n")
    write(archive / "third", {"handlers/preprocess.py": "def f(): return 3"})
    assert load(archive / "third", "from handlers.preprocess import f\n").f() == 3
