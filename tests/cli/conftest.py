"""Management APIs of tests, served over HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.http_server import read_body, respond, serving

Respond = Callable[[str, str, Any], tuple[int, Any]]


@pytest.fixture
def serve_json() -> Iterator[Callable[[Respond], str]]:
    """Serve a function in a thread; calling the fixture returns the URL.

    The function gets a request's method, path and JSON body, and returns a status and a JSON value.
    """
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(serving(partial(_answer_json, answer)))


def _answer_json(answer: Respond, handler: Any) -> None:
    body = read_body(handler)
    status, document = answer(handler.command, handler.path, json.loads(body) if body else None)
    respond(handler, status, document)


@pytest.fixture
def fake_server(request: pytest.FixtureRequest, serve_json: Callable[[Respond], str]) -> Any:
    """Serve ``FakeServer`` of the test's module."""
    server = request.module.FakeServer()
    server.url = serve_json(server.respond)
    return server
