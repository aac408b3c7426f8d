"""A handler that runs a workflow's own functions, which one file of its archive defines."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from handlers.errors import HandlerLoadError
from handlers.loading.module_loader import load_module
from handlers.multipart import PARTS_CONTENT_TYPE, Part, join_parts, split_parts

FUNCTION_HEADER = "torchrelay-function"  # request header: the function to call

_JSON_TYPE = "application/json"
_TEXT_TYPE = "text/plain"


class WorkflowFunctions:
    """A handler that calls, for each row, the function named in the row's header.

    The key ``functions`` of the configuration holds the ``file``, the ``names``, and ``plain``. In plain
    form, TorchServe's, a function takes ``(data, context)`` like any handler, and is called once with no data
    when it is loaded. Otherwise it takes its inputs by name, each of the type that its content type implies
    (an object, text, bytes, or a list of these). It returns one value: bytes, text, a value that JSON can
    hold, or a list of these.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._is_plain = False

    def initialize(self, context: Any) -> None:
        """Import the file and look up its functions. Raises HandlerLoadError."""
        options = context.model_yaml_config["functions"]
        file = Path(context.system_properties["model_dir"], options["file"])
        module = load_module(file)
        self._is_plain = options["plain"]
        for name in options["names"]:
            function = getattr(module, name, None)
            if not callable(function) or inspect.iscoroutinefunction(function):
                near = difflib.get_close_matches(name, [n for n, v in vars(module).items() if callable(v)], 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                problem = (
                    "no function" if function is None else "no plain function (an async def is not called)"
                )
                raise HandlerLoadError(f"{file.name}: {name!r} is {problem}.{hint}")
            self._functions[name] = function
            if self._is_plain:
                function(None, context)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Return one value or one exception for each row."""
        return [self._call_function(row, index, context) for index, row in enumerate(data)]

    def _call_function(self, row: dict[str, Any], index: int, context: Any) -> Any:
        function = self._functions.get(context.get_request_header(index, FUNCTION_HEADER) or "")
        if function is None:
            return LookupError("a workflow's functions can be called by its steps only")
        try:
            if self._is_plain:
                values = function([row], context)
                if not isinstance(values, list) or len(values) != 1:
                    raise TypeError(f"{function.__name__} got one row, so it returns a list of one element")
                return values[0]
            inputs = {name: self._decode_input(name, value, index, context) for name, value in row.items()}
            body, content_type = encode_value(function(**inputs))
        except Exception as error:
            return error
        if content_type:
            context.set_response_content_type(index, content_type)
        return body

    def _decode_input(self, name: str, value: Any, index: int, context: Any) -> Any:
        entry = context.get_request_header(index, name)
        content_type = entry.get("content-type") if isinstance(entry, dict) else None
        if content_type == PARTS_CONTENT_TYPE:
            return [_decode_part(item) for item in split_parts(bytes(value))]
        return bytes(value) if isinstance(value, bytearray) else value


def encode_value(value: Any) -> Part:
    """Encode a function's value as bytes and return them with their content type.

    Raises TypeError where the value is neither bytes nor valid JSON.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), None
    if isinstance(value, str):
        return value.encode(), _TEXT_TYPE
    if isinstance(value, list | tuple) and _holds_bytes(value):
        return join_parts(map(encode_value, value)), PARTS_CONTENT_TYPE
    text = json.dumps(value)
    if "NaN" in text or "Infinity" in text:  # JSON has neither; in a string they stay
        text = json.dumps(json.loads(text, parse_constant=lambda _: None))
    return text.encode(), _JSON_TYPE


def _holds_bytes(value: Any) -> bool:
    """Return whether the value is bytes or a list, at any depth, that contains bytes."""
    if isinstance(value, list | tuple):
        return any(map(_holds_bytes, value))
    return isinstance(value, bytes | bytearray | memoryview)


def _decode_part(item: Part) -> Any:
    value, content_type = item
    if content_type == PARTS_CONTENT_TYPE:
        return [_decode_part(inner) for inner in split_parts(value)]
    if content_type == _JSON_TYPE:
        return json.loads(value)
    return value.decode() if content_type and content_type.startswith("text/") else value
