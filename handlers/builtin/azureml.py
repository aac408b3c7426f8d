"""A handler of Azure ML's scoring scripts: ``init()`` loads the model, ``run(data)`` answers a request.

AZUREML_ENTRY_SCRIPT names the script, below AML_APP_ROOT or in the model's folder; it is ``score.py`` by
default. ``run`` gets the body as text, or the query's parameters as JSON. With ``@input_schema`` of
``inference-schema`` it gets the members of the body's object, and with ``@rawhttp`` the request itself. A
parameter ``request_headers`` gets the headers. The value is written as JSON, unless it is an ``AMLResponse``.
The headers with a client's ids are sent back. The schemas of the decorators, or a ``swagger.json`` beside the
script, are those of ``/swagger.json``.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import handlers.azureml
from handlers import json_text
from handlers.azureml import APP_ROOT, DEFAULT_ROOT, DEFAULT_SCRIPT, ENTRY_SCRIPT
from handlers.azureml.aml_request import AMLRequest
from handlers.azureml.schemas import is_decorated, read_schemas
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

_HEADERS = "request_headers"
_FAILED = "x-ms-run-function-failed"
_CLIENT_ID, _REQUEST_ID, _MAX_ID_LENGTH = "x-ms-client-request-id", "x-ms-request-id", 100


class AzureMLHandler(ScriptHandler):
    """A handler that calls ``run`` of a script, row by row."""

    def initialize(self, context: Context) -> None:
        """Import the script and call its ``init``. Raises HandlerLoadError for a script without functions."""
        handlers.azureml.install()
        entry = os.environ.get(ENTRY_SCRIPT) or DEFAULT_SCRIPT
        root = Path(os.environ.get(APP_ROOT) or DEFAULT_ROOT)
        file = find_script([context.model_dir], Path(entry).name) or find_script([root], entry)
        if file is None:
            raise HandlerLoadError(
                f"{context.model_dir}: there is no {Path(entry).name} in it, and no {entry} in {root}. "
                f"{ENTRY_SCRIPT} names the script."
            )
        if str(root) not in sys.path:
            sys.path.append(str(root))  # whose modules scripts import, too
        script = import_script(file)
        functions = {name: getattr(script, name, None) for name in ("init", "run")}
        if missing := [name for name, function in functions.items() if not callable(function)]:
            raise HandlerLoadError(f"{file}: there is no function {' and no '.join(missing)} in it.")
        self._run: Callable[..., Any] = script.run
        self._read = self._select_input(file)
        self.schemas = read_schemas(self._run, dict.fromkeys((file.parent, root)))
        script.init()

    def _select_input(self, file: Path) -> Callable[[Any, Context], dict[str, Any]]:
        """Return the function that reads the arguments of ``run``. Raises HandlerLoadError."""
        parameters = dict(inspect.signature(self._run).parameters)
        self._takes_headers = parameters.pop(_HEADERS, None) is not None
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        if not parameters or any(parameter.kind not in kinds for parameter in parameters.values()):
            raise HandlerLoadError(f"{file}: run needs a parameter for the data, and no *args or **kwargs.")
        if is_decorated(self._run):
            return lambda row, context: _read_members(row, parameters)
        name = next(iter(parameters))
        read = _read_request if getattr(self._run, "is_raw_http", False) or _is_raw_http() else _read_text
        return lambda row, context: {name: read(row, context)}

    def respond(self, row: Any, context: Context) -> Any:
        arguments = self._read(row, context)
        if self._takes_headers:
            arguments[_HEADERS] = _read_headers(context)
        _return_ids(context)
        context.set_response_header(0, _FAILED, "True")
        result = self._run(**arguments)
        if hasattr(result, "status_code") and hasattr(result, "get_data"):
            context.set_response_status(result.status_code)
            for key, value in result.headers.items():
                if key.lower() != "content-length":
                    context.set_response_header(0, key.lower(), value)
            failed = str(result.status_code >= 500)
            body = result.get_data()
        else:
            failed = "False"
            body = json.dumps({} if result is None else result).encode()
            context.set_response_content_type(0, "application/json")
        context.set_response_header(0, _FAILED, failed)
        return body


def _return_ids(context: Context) -> None:
    """Send the ids of the client back; the older of both headers has the newer one's where it is absent."""
    sent = {name: context.get_request_header(0, name) for name in (_CLIENT_ID, _REQUEST_ID)}
    client = sent[_CLIENT_ID] or sent[_REQUEST_ID]
    for name, value in ((_CLIENT_ID, client), (_REQUEST_ID, sent[_REQUEST_ID] or client)):
        if isinstance(value, str) and len(value) <= _MAX_ID_LENGTH:
            context.set_response_header(0, name, value)


def _is_raw_http() -> bool:
    """Return whether the script used the decorator of one of Azure ML's own packages."""
    names = (f"{package}.aml_request" for package in handlers.azureml.PACKAGES)
    return any(getattr(sys.modules.get(name), "_rawHttpRequested", False) for name in names)


def _read_text(row: Any, context: Context) -> str:
    """Return a body as text; of a request without one, its query as JSON."""
    body = read_body(row)
    if body is None:
        if (read_content_type(context) or "").startswith("multipart/"):
            raise PredictionException("A form needs the decorator @rawhttp of run.", 415)
        return json.dumps({name: _parse(value) for name, value in read_fields(row).items()})
    if isinstance(body, (bytes, bytearray)):
        try:
            return bytes(body).decode()
        except UnicodeDecodeError as error:
            raise PredictionException(f"The body is no UTF-8 text: {error}", 400) from None
    return body if isinstance(body, str) else json.dumps(body)  # the server has decoded it


def _read_members(row: Any, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the members of a body's object that ``run`` takes."""
    body = read_body(row)
    if body is None:
        body = {name: _parse(value) for name, value in read_fields(row).items()}
    elif isinstance(body, (bytes, bytearray, str)):
        try:
            body = json_text.loads(body)
        except ValueError as error:
            raise PredictionException(f"The body is not JSON: {error}", 400) from None
    if not isinstance(body, Mapping):
        raise PredictionException(f"The body is to be an object with {', '.join(parameters)}.", 400)
    values = {name: body.get(name, parameter.default) for name, parameter in parameters.items()}
    if missing := [name for name, value in values.items() if value is inspect.Parameter.empty]:
        raise PredictionException(f"The body lacks {', '.join(missing)}.", 400)
    return values


def _read_request(row: Any, context: Context) -> AMLRequest:
    headers, kind = _read_headers(context), read_content_type(context) or ""
    if kind.startswith(("multipart/", "application/x-www-form-urlencoded")):
        return AMLRequest(None, {}, {name: _to_bytes(value) for name, value in row.items()}, headers)
    body = read_body(row)
    if body is not None and not isinstance(body, (bytes, bytearray)):
        body = (body if isinstance(body, str) else json.dumps(body)).encode()
    texts = {name: _to_bytes(value).decode(errors="replace") for name, value in read_fields(row).items()}
    return AMLRequest(None if body is None else bytes(body), texts, {}, headers)


def _read_headers(context: Context) -> dict[str, str]:
    return {
        name: value for name, value in context.get_all_request_header(0).items() if isinstance(value, str)
    }


def _to_bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, (bytes, bytearray)) else str(value).encode()


def _parse(value: Any) -> Any:
    """Return a parameter of a query as JSON has it; other texts stay as they are."""
    text = _to_bytes(value).decode(errors="replace")
    try:
        return json_text.loads(text)
    except ValueError:
        return text
