"""Workflows over the control plane: TorchServe's routes, its archives, and documents of our own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

import orjson

from serve_app import documents
from serve_app.controlplane import ControlPlane
from serve_app.doors import auth
from serve_app.doors.exchange import Exchange
from serve_app.doors.torchserve import errors, forms
from serve_app.doors.torchserve.management import PAGE, integer, truth
from serve_app.errors import InvalidBody, MethodNotAllowed, ResourceNotFound
from serve_app.settings import Settings
from serve_app.types import Registration

_YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


class WorkflowDoor:
    """``/workflows`` and what is below it."""

    def __init__(self, control: ControlPlane, settings: Settings) -> None:
        self._control = control
        self._limit = settings.inference.max_request_size

    refuse = staticmethod(errors.refuse)

    def knows(self, exchange: Exchange) -> bool:
        return exchange.segments[:1] == ["workflows"]

    async def answer(self, exchange: Exchange) -> None:
        method, control = exchange.method, self._control
        auth.admit(control.access, exchange, "observe" if method in ("GET", "HEAD") else "manage")
        match exchange.segments[1:]:
            case []:
                if method == "GET":
                    await self._list(exchange)
                elif method == "POST":
                    await self._register(exchange)
                else:
                    raise MethodNotAllowed()
            case [name, *version] if len(version) <= 1:
                auth.cover(exchange, name)
                if method == "GET" and not version:
                    await errors.reply_json(exchange, await control.workflow(name))
                elif method == "DELETE":
                    await control.unregister_workflow(name, version[0] if version else None)
                    await errors.reply_json(exchange, {"status": f'Workflow "{name}" unregistered'})
                else:
                    raise MethodNotAllowed()
            case _:
                raise ResourceNotFound()

    async def _list(self, exchange: Exchange) -> None:
        query = _query(exchange)
        limit, start = integer(query.get("limit"), PAGE), integer(query.get("next_page_token"), 0)
        limit = limit if 0 <= limit <= PAGE else PAGE
        page, following = await self._control.workflows(max(start, 0), limit, auth.within(exchange))
        said: dict[str, Any] = {} if following is None else {"nextPageToken": str(following)}
        said["workflows"] = [{"workflowName": name, "workflowUrl": url} for name, url in page]
        await errors.reply_json(exchange, said)

    async def _register(self, exchange: Exchange) -> None:
        """A body that has ``steps`` is a workflow's document, in YAML or JSON; any other says where an archive is."""
        said = {**_query(exchange), **_body(exchange, await exchange.body(self._limit))}
        asked = replace(_registration(said), within=auth.within(exchange))
        ref = await self._control.register_workflow(asked, _document(said))
        sentence = f"Workflow {ref.name} has been registered and scaled successfully."
        await errors.reply_json(exchange, {"status": sentence})


def _document(said: dict[str, Any]) -> dict[str, Any] | None:
    """The workflow that the request itself holds; parameters that are also the query's are none of it."""
    if "steps" not in said:
        return None
    return {key: value for key, value in said.items() if key not in _PARAMETERS}


_PARAMETERS = ("url", "workflow_name", "response_timeout", "startup_timeout", "s3_sse_kms")


def _registration(said: dict[str, Any]) -> Registration:
    text = {key: str(said[key]) for key in _PARAMETERS if said.get(key) is not None}
    return Registration(
        url=text.get("url", ""),
        model_name=text.get("workflow_name") or None,
        response_timeout=integer(text.get("response_timeout"), None),
        startup_timeout=integer(text.get("startup_timeout"), None),
        s3_sse_kms=truth(text.get("s3_sse_kms")),
    )


def _body(exchange: Exchange, body: bytes) -> dict[str, Any]:
    """What the body says, a mapping in any case. Raises InvalidBody."""
    content_type = exchange.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if not body.strip():
        return {}
    if kind in _YAML:
        try:
            return documents.from_yaml(body)
        except documents.Misread as error:
            raise InvalidBody(f"The body {error}") from None
    if kind in (forms.MULTIPART, forms.URLENCODED):
        return {field.name: field.value.decode("utf-8", "replace") for field in forms.inputs(content_type, body)}
    if kind != "application/json":
        return {}
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidBody(f"The body is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise InvalidBody(f"The body must be a JSON object, and is a {type(said).__name__}.")
    return said


def _query(exchange: Exchange) -> dict[str, str]:
    """The query's parameters; of a repeated one the first."""
    pairs = parse_qsl(exchange.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    return dict(reversed(pairs))
