"""Fixtures that write archives as directories and restore the process after each test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handlers.context import Context
from handlers.metrics import metric


@pytest.fixture(autouse=True)
def process(tmp_path: Path) -> Iterator[None]:
    """Restore ``sys.path`` and ``sys.modules`` after each test, because loading a handler changes them."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def metric_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffer the updates of metrics, which a model that an earlier test served sends elsewhere."""
    monkeypatch.setattr(metric, "_sink", metric.buffer_update)


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    """Return ``write(**sources)``: write sources to a directory (``handler=...`` is handler.py)."""

    def write(**sources: str) -> Path:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return tmp_path

    return write


@pytest.fixture
def begin() -> Callable[..., Context]:
    """Return ``open_batch(context, rows, emit, **headers)``: begin a batch in which every row has these
    headers.
    """

    def open_batch(context: Context, rows: int = 1, emit: Any = None, **headers: str) -> Context:
        ids = [f"id-{index}" for index in range(rows)]
        context.begin(ids, [headers] * rows, [{"body": {"content-type": "application/json"}}] * rows, emit)
        return context

    return open_batch


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the models are so small that more threads only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def deterministic(one_thread: None) -> None:
    """Make results reproducible: one torch thread, and no progress bar."""
    import transformers

    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny untrained Llama whose tokens are bytes, with a context of 256 tokens."""
    from tests.support.hf_folders import save_byte_llama

    return save_byte_llama(tmp_path_factory.mktemp("language_model"))
