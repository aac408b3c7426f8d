"""A handler of custom handlers of Hugging Face's Inference Endpoints: ``EndpointHandler`` in ``handler.py``.

``EndpointHandler(path)`` loads the model in the folder, and ``__call__(data)`` answers a request.
``data`` has ``inputs``, and ``parameters`` where the body or the query has them. A body of JSON is ``data``;
any other is the input: an image, a text, or bytes. The value is written as JSON, and an image in the type
that the request accepts. HF_DEFAULT_PIPELINE_NAME names another file, HF_MODULE_NAME another class.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson

from handlers import endpoint_script
from handlers.builtin.script import (
    ScriptHandler,
    find_script,
    import_script,
    read_body,
    read_content_type,
    read_fields,
)
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException

_JSON = "application/json"
_FLAGS = {"true": True, "false": False}


class HuggingFaceEndpoint(ScriptHandler):
    """A handler that calls an ``EndpointHandler``, row by row."""

    takes_parameters = True  # of a request, beside its inputs
    error_status = HTTPStatus.BAD_REQUEST  # the toolkit's, for every exception

    def initialize(self, context: Context) -> None:
        """Import the file and create its class. Raises HandlerLoadError where one is missing."""
        script, name = endpoint_script.file_name(), endpoint_script.class_name()
        file = find_script([context.model_dir], script)
        if file is None:
            raise HandlerLoadError(f"{context.model_dir}: there is no {script} in it, with {name}.")
        handler_class: Any = getattr(import_script(file), name, None)
        bases = handler_class.__mro__ if isinstance(handler_class, type) else ()
        if not any("__call__" in vars(base) for base in bases):
            raise HandlerLoadError(
                f"{file}: there is no class {name} in it. Define __init__(self, path) and "
                "__call__(self, data)."
            )
        self._handler = handler_class(str(context.model_dir))

    def respond(self, row: Any, context: Context) -> Any:
        data = _read_data(row, (read_content_type(context) or _JSON).partition(";")[0].strip().lower())
        return _write(self._handler(data), context)


def _read_data(row: Any, kind: str) -> dict[str, Any]:
    """Return the handler's ``data``. Raises PredictionException (400)."""
    body = read_body(row)
    if kind == _JSON:
        if isinstance(body, (bytes, bytearray, str)):
            try:
                body = orjson.loads(body)
            except ValueError as error:
                raise PredictionException(f"The body is not JSON: {error}", 400) from None
        if not isinstance(body, Mapping) or "inputs" not in body:
            raise PredictionException('The body is to be an object with inputs: {"inputs": ...}.', 400)
        data = dict(body)
    elif isinstance(body, (bytes, bytearray)) and kind.startswith("image/"):
        from handlers.images import open_image

        data = {"inputs": open_image(body)}
    elif isinstance(body, (bytes, bytearray)) and kind.startswith("text/"):
        data = {"inputs": bytes(body).decode(errors="replace")}
    elif body is not None:
        data = {"inputs": bytes(body) if isinstance(body, bytearray) else body}
    else:
        raise PredictionException(f"The body is empty, or a form ({kind}): send JSON with inputs.", 400)
    query = read_fields(row)
    if query and "parameters" not in data:
        data["parameters"] = {name: _parse(value) for name, value in query.items()}
    return data


def _parse(value: Any) -> Any:
    """Return a parameter of the query: a number, a flag, or a text."""
    text = bytes(value).decode(errors="replace") if isinstance(value, (bytes, bytearray)) else str(value)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return _FLAGS.get(text.lower(), text)


def _write(value: Any, context: Context) -> Any:
    if isinstance(value, (bytes, bytearray)):
        accept = context.get_request_header(0, "accept")
        known = accept if isinstance(accept, str) and "*" not in accept else "application/octet-stream"
        context.set_response_content_type(0, known.partition(",")[0].strip())
        return value
    if hasattr(value, "save") and hasattr(value, "getbands"):  # an image of Pillow
        accept = context.get_request_header(0, "accept")
        is_jpeg = isinstance(accept, str) and accept.lower().startswith(("image/jpeg", "image/jpg"))
        file = io.BytesIO()
        (value.convert("RGB") if is_jpeg else value).save(file, "JPEG" if is_jpeg else "PNG")
        context.set_response_content_type(0, "image/jpeg" if is_jpeg else "image/png")
        return file.getvalue()
    context.set_response_content_type(0, _JSON)
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, default=_to_list, option=options)
    except TypeError as error:
        raise TypeError(f"the handler returned a value without JSON: {error}") from None


def _to_list(value: Any) -> Any:
    if hasattr(value, "tolist"):  # a tensor, or an array that orjson does not write
        return value.tolist()
    raise TypeError
