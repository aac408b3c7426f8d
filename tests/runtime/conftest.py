import gc
import logging
import os
import sys

import pytest

from serve_app.domain.model import ModelSpec
from serve_app.runtime.runner import Runner
from serve_app.settings import RuntimeSettings


@pytest.fixture
def own_process():
    """Undo the changes that loading a model makes to the process, for the tests that follow."""
    folder, path, finders, modules = os.getcwd(), list(sys.path), list(sys.meta_path), set(sys.modules)
    execution = sys.getswitchinterval()
    yield
    sys.setswitchinterval(execution)
    os.chdir(folder)
    sys.path[:] = path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest-" in file or name == "ts" or name.startswith("ts."):
            del sys.modules[name]
    gc.unfreeze()


@pytest.fixture
def make_runner(tmp_path, own_process):
    """Return a function that makes a Runner over a real archive directory.

    ``files`` maps names to texts, ``code`` is that of handler.py, and ``model`` the manifest's further keys.
    """

    def make(code, files=None, settings=None, gpu_id=None, model=None, **spec):
        directory = tmp_path / "archive"
        for name, content in {"handler.py": code, **(files or {})}.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        manifest = {
            "model": {"modelName": "m", "modelVersion": "1.0", "handler": "handler.py", **(model or {})}
        }
        known = ModelSpec("m", "1.0", url="m.mar", digest="", archive="")
        return Runner(known.with_(**spec), directory, manifest, settings or RuntimeSettings(), gpu_id)

    return make


@pytest.fixture
def load_runner(make_runner):
    """Return a function that makes a runner and loads its handler."""

    def make(*args, **kwargs):
        runner = make_runner(*args, **kwargs)
        runner.load()
        return runner

    return make


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level(logging.INFO, logger="serve_app")
