"""The endpoints of an API as values: routes, and the types of what they receive and send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

StatusCode = int | str  # "default" stands for the handler's own


@dataclass(frozen=True)
class Content:
    """The content of a request or response: types by media type.

    A response ``from_model`` has the header of the version that answered.
    """

    types: Mapping[str, Any]
    description: str = ""
    required: bool = True
    from_model: bool = False


NO_CONTENT = Content({})


def json(kind: Any, description: str = "", required: bool = True, from_model: bool = False) -> Content:
    return Content({"application/json": kind}, description, required, from_model)


@dataclass(frozen=True)
class Endpoint:
    """One method of a path.

    ``responses``: the type of the JSON with status 200, or types and contents by status. ``errors``: the
    statuses in the API's error format beside the common ones. ``body``: a type of JSON, or a content.
    ``query`` and ``headers``: TypedDicts, each field a parameter.
    """

    method: str
    id: str
    summary: str
    responses: Any
    errors: tuple[int, ...] = ()
    body: Any = None
    query: type | None = None
    headers: type | None = None
    deprecated: bool = False

    @property
    def request_content(self) -> Content | None:
        return None if self.body is None else _to_content(self.body)

    @property
    def contents(self) -> dict[StatusCode, Content]:
        """The contents of the responses that are no errors, by status."""
        responses = self.responses if isinstance(self.responses, dict) else {200: self.responses}
        return {status: _to_content(content) for status, content in responses.items()}


def _to_content(content: Any) -> Content:
    return content if isinstance(content, Content) else json(content)


get, post, put, delete, options = (
    partial(Endpoint, method) for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS")
)
Paths = Mapping[str, list[Endpoint]]


@dataclass(frozen=True)
class ErrorFormat:
    """The error responses of an API; those with a status in ``without_body`` have no body.

    Every endpoint has the ``common`` statuses, with a parameter in the path 404, and with a body 413.
    """

    kind: type
    common: tuple[int, ...] = (400, 500)
    without_body: tuple[int, ...] = ()

    def list_statuses(self, path: str, endpoint: Endpoint) -> list[int]:
        """Return all error statuses of an endpoint."""
        statuses = {*self.common, *endpoint.errors}
        if "{" in path:
            statuses.add(404)
        if endpoint.body is not None:
            statuses.add(413)
        return sorted(statuses)


@dataclass(frozen=True)
class API:
    """The endpoints of one protocol, under one tag."""

    tag: str
    description: str
    errors: ErrorFormat
    paths: Paths

    @property
    def endpoints(self) -> Iterator[tuple[str, Endpoint]]:
        """Every endpoint, behind its path."""
        return ((path, endpoint) for path, endpoints in self.paths.items() for endpoint in endpoints)
