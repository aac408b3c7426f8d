"""The endpoints of an API as values, from which routing, authorization and OpenAPI documents are derived."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from starlette.routing import compile_path

from serve_app.domain.access import Right

StatusCode = int | str  # "default" stands for the handler's own
Call = Callable[..., Awaitable[Any]]


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
    """An operation of an API: a method of a path.

    ``responses``: the type of the JSON with status 200, or types and contents by status. ``errors``: the
    statuses in the API's error format beside the common ones. ``body``: a type of JSON, or a content.
    ``query`` and ``headers``: TypedDicts, each field a parameter.

    ``call`` answers a request; it takes the parameters of the path by name. Where it is None, the protocol
    routes the path itself. A key needs one of ``rights``; None: those of the method. Requests with
    ``other_methods`` than the path's are refused, answered by the same endpoint, or left to the next path.
    """

    method: str
    path: str
    id: str
    summary: str
    responses: Any
    errors: tuple[int, ...] = ()
    body: Any = None
    query: type | None = None
    headers: type | None = None
    deprecated: bool = False
    call: Call | None = None
    rights: tuple[Right, ...] | None = None
    other_methods: Literal["refused", "same", "next"] = "refused"

    @property
    def required_rights(self) -> tuple[Right, ...]:
        return get_rights(self.method) if self.rights is None else self.rights

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


def get_rights(method: str) -> tuple[Right, ...]:
    """Return the rights that a method of the management API requires, unless its endpoint has others."""
    if method == "OPTIONS":
        return ()
    return ("observe",) if method in ("GET", "HEAD") else ("manage",)


get, post, put, delete, options = (
    partial(Endpoint, method) for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS")
)


@dataclass(frozen=True)
class ErrorFormat:
    """The error responses of an API; those with a status in ``without_body`` have no body.

    Every endpoint has the ``common`` statuses, with a parameter in the path 404, and with a body 413.
    """

    kind: type
    common: tuple[int, ...] = (400, 500)
    without_body: tuple[int, ...] = ()

    def list_statuses(self, endpoint: Endpoint) -> list[int]:
        """Return all error statuses of an endpoint."""
        statuses = {*self.common, *endpoint.errors}
        if "{" in endpoint.path:
            statuses.add(404)
        if endpoint.body is not None:
            statuses.add(413)
        return sorted(statuses)


@dataclass(frozen=True)
class API:
    """The endpoints of one protocol or feature, under one tag."""

    tag: str
    description: str
    errors: ErrorFormat
    endpoints: tuple[Endpoint, ...]


class Match(NamedTuple):
    """The endpoint of a request, None for a method that its path refuses, and the parameters of the path."""

    endpoint: Endpoint | None
    parameters: dict[str, str]


class EndpointTable:
    """Endpoints by path; it is compiled on first use, because few requests of the inference port need it."""

    def __init__(self, apis: tuple[API, ...]) -> None:
        self.endpoints = tuple(endpoint for api in apis for endpoint in api.endpoints)

    def find(self, path: str, method: str) -> Match | None:
        """Return the endpoint of a request; None for an unknown path."""
        for pattern, endpoints in self._paths:
            if (match := pattern.fullmatch(path.rstrip("/") or "/")) is None:
                continue
            first = next(iter(endpoints.values()))
            endpoint = endpoints.get(method)
            if endpoint is None and first.other_methods == "next":
                continue
            if endpoint is None and first.other_methods == "same":
                endpoint = first
            return Match(endpoint, match.groupdict())
        return None

    def list_allowed_methods(self, path: str) -> list[str] | None:
        """Return the methods of a path; None for an unknown one. Source: RFC 9110, 10.2.1."""
        for pattern, endpoints in self._paths:
            if pattern.fullmatch(path.rstrip("/") or "/"):
                implied = [*(["HEAD"] if "GET" in endpoints else []), "OPTIONS"]
                return list(dict.fromkeys([*endpoints, *implied]))
        return None

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], dict[str, Endpoint]]]:
        by_path: dict[str, dict[str, Endpoint]] = {}
        for endpoint in self.endpoints:
            by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        paths = sorted(by_path, key=_rank_segments)
        # The parameter url_path may contain slashes.
        patterns = [compile_path(path.replace("{url_path}", "{url_path:path}"))[0] for path in paths]
        return [(pattern, by_path[path]) for pattern, path in zip(patterns, paths, strict=True)]


def _rank_segments(path: str) -> list[tuple[bool, bool]]:
    """Return a key that sorts a name before a parameter in the same place."""
    return [("{" in segment, segment.endswith("}")) for segment in path.split("/")]
