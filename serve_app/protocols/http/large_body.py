"""Parsing and writing of large bodies outside the event loop.

A form of 60 MB takes up to 20 s of Python, in which a thread lets the event loop run. Other parsers hold
Python's global lock for one call each, so that the loop runs between their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

LARGE_BODY_BYTES = 1 << 20  # a JSON document of this size takes 10 ms, a form 200 ms

_T = TypeVar("_T")
# Threads of its own: slow bodies must not delay what else runs in threads. They start when they are needed.
_threads = ThreadPoolExecutor(2, "body-parser")


async def parse_body(body: bytes, parse: Callable[..., _T], *args: Any) -> _T:
    """Return ``parse(*args)``, from a thread where ``body`` is large."""
    return await run(len(body), parse, *args)


async def run(size: int, function: Callable[..., _T], *args: Any) -> _T:
    """Return ``function(*args)``, from a thread where the ``size`` of what it reads is large."""
    if size <= LARGE_BODY_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *args)
