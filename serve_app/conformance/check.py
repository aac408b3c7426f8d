"""A check of one requirement, and the server that it is applied to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

JSON = "application/json"


class ContractViolation(Exception):
    """A difference from a requirement, in a sentence."""


@dataclass(frozen=True)
class ServerUnderTest:
    """A server: its client, its only or named model, and a valid input of that model, a value of JSON.

    ``health`` and ``predict`` are the paths of contracts whose platform chooses them.
    """

    http: httpx.Client
    model: str
    instance: Any
    health: str = ""
    predict: str = ""

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, path: str, document: Any, content_type: str = JSON, **headers: str) -> httpx.Response:
        """Send a value of JSON, or bytes as they are."""
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self.http.post(path, content=content, headers={"content-type": content_type, **headers})


@dataclass(frozen=True)
class ContractCheck:
    """A requirement in a sentence, and the function that raises ContractViolation where a server differs."""

    requirement: str
    function: Callable[[Any], None]


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check; ``problem`` is empty where the server conforms."""

    requirement: str
    problem: str


def apply(check: ContractCheck, server: Any) -> CheckOutcome:
    """Return the outcome of a check, also where no valid response arrives."""
    try:
        check.function(server)
    except ContractViolation as violation:
        return CheckOutcome(check.requirement, str(violation))
    except httpx.HTTPError as error:
        return CheckOutcome(check.requirement, f"{type(error).__name__}: {error}")
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # of reading a response
        return CheckOutcome(
            check.requirement, f"a response has another structure: {type(error).__name__}: {error}"
        )
    return CheckOutcome(check.requirement, "")


def expect_status(response: httpx.Response, *statuses: int) -> None:
    if response.status_code not in statuses:
        expected = " or ".join(map(str, statuses))
        raise ContractViolation(f"{_describe(response)}; expected {expected}")


def expect_refused(response: httpx.Response) -> None:
    if response.status_code < 400:
        raise ContractViolation(f"{_describe(response)}; expected an error")


def read_object(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    """Return a response's JSON object."""
    expect_status(response, *(statuses or (200,)))
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ContractViolation(f"{_describe(response)}; expected a JSON object")
    return document


def expect_type(document: dict[str, Any], key: str, kind: type | tuple[type, ...], place: str = "") -> Any:
    """Return a member of an object that has this type."""
    value = document.get(key)
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ContractViolation(f"{place}{key} is {value!r:.200}; expected {names}")
    return value


def expect_equal(value: Any, expected: Any, name: str) -> None:
    if value != expected:
        raise ContractViolation(f"{name} is {value!r:.200}; expected {expected!r:.200}")


def expect_media_type(response: httpx.Response, media_type: str) -> None:
    found = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    expect_equal(found, media_type, "the content type")


def _describe(response: httpx.Response) -> str:
    request = response.request
    text = response.text[:200].replace("\n", " ")
    return f"{request.method} {request.url.raw_path.decode()} is {response.status_code}, {text!r}"
