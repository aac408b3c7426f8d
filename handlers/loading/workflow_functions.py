"""A workflow's own functions: one file of its archive, and each row says which of them is called."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from handlers.errors import HandlerLoadError
from handlers.parts import PARTS, Part, join, split
from handlers.source import load_source

HEADER = "torchrelay-function"  # of a request: the function that it is for

_JSON = "application/json"
_TEXT = "text/plain"


class Functions:
    """What runs in the process of a workflow's functions.

    ``functions`` of its configuration has the ``file``, the ``names``, and ``plain``. In plain form, TorchServe's, a
    function takes ``(data, context)`` like any handler, and is called once with no data when it is loaded. Otherwise it
    takes its inputs by name, each as its content type says (an object, text, bytes, or a list of these), and returns
    one value: bytes, text, what JSON can hold, or a list of any of these.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._plain = False

    def initialize(self, context: Any) -> None:
        """Import the file and look its functions up. Raises HandlerLoadError."""
        asked = context.model_yaml_config["functions"]
        file = Path(context.system_properties["model_dir"], asked["file"])
        module = load_source(file)
        self._plain = asked["plain"]
        for name in asked["names"]:
            function = getattr(module, name, None)
            if not callable(function) or inspect.iscoroutinefunction(function):
                near = difflib.get_close_matches(name, [n for n, v in vars(module).items() if callable(v)], 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                what = "no function" if function is None else "no plain function (an async def is not called)"
                raise HandlerLoadError(f"{file.name}: {name!r} is {what}.{hint}")
            self._functions[name] = function
            if self._plain:
                function(None, context)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """One value or one exception for each row."""
        return [self._answer(row, index, context) for index, row in enumerate(data)]

    def _answer(self, row: dict[str, Any], index: int, context: Any) -> Any:
        function = self._functions.get(context.get_request_header(index, HEADER) or "")
        if function is None:
            return LookupError("a workflow's functions are asked by its steps only")
        try:
            if self._plain:
                values = function([row], context)
                if not isinstance(values, list) or len(values) != 1:
                    raise TypeError(f"{function.__name__} got one row, so it returns a list of one element")
                return values[0]
            inputs = {name: self._input(name, value, index, context) for name, value in row.items()}
            body, content_type = part(function(**inputs))
        except Exception as error:
            return error
        if content_type:
            context.set_response_content_type(index, content_type)
        return body

    def _input(self, name: str, value: Any, index: int, context: Any) -> Any:
        said = context.get_request_header(index, name)
        content_type = said.get("content-type") if isinstance(said, dict) else None
        if content_type == PARTS:
            return [_value(item) for item in split(bytes(value))]
        return bytes(value) if isinstance(value, bytearray) else value


def part(value: Any) -> Part:
    """A function's value as bytes and their content type. Raises TypeError where it can be neither sent nor JSON."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), None
    if isinstance(value, str):
        return value.encode(), _TEXT
    if isinstance(value, list | tuple) and _holds_bytes(value):
        return join(map(part, value)), PARTS
    return json.dumps(value).encode(), _JSON


def _holds_bytes(value: Any) -> bool:
    """Whether there are bytes in a list, or in a list of its items."""
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes | bytearray | memoryview)


def _value(item: Part) -> Any:
    value, content_type = item
    if content_type == PARTS:
        return [_value(inner) for inner in split(value)]
    if content_type == _JSON:
        return json.loads(value)
    return value.decode() if content_type and content_type.startswith("text/") else value
