"""Archives as plain directories, and the process as it was before each test."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from handlers.context import Context


@pytest.fixture(autouse=True)
def process(tmp_path: Path) -> Iterator[None]:
    """Loading a handler is for its own process: what it leaves in this one is taken back."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    """``archive(**files)``: a directory with these Python sources (``handler=...`` becomes handler.py)."""

    def write(**sources: str) -> Path:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return tmp_path

    return write


@pytest.fixture
def begin() -> Callable[..., Context]:
    """``begin(context, rows, emit=None, **headers)``: open a batch in which every row has these headers."""

    def open_batch(context: Context, rows: int = 1, emit: Any = None, **headers: str) -> Context:
        ids = [f"id-{index}" for index in range(rows)]
        context.begin(ids, [headers] * rows, [{"body": {"content-type": "application/json"}}] * rows, emit)
        return context

    return open_batch
