"""The table of the management API's endpoints: every row is complete, and only some differ from its rule."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from serve_app.protocols.http.endpoints import Endpoint, EndpointTable, get
from serve_app.protocols.http.json_errors import ERRORS
from serve_app.protocols.management.routes import MANAGEMENT

ENDPOINTS = EndpointTable(MANAGEMENT).endpoints


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.id)
def test_a_call_takes_the_parameters_of_its_path(endpoint: Endpoint) -> None:
    assert endpoint.call is not None
    inspect.signature(endpoint.call).bind(None, **dict.fromkeys(re.findall(r"{(\w+)}", endpoint.path)))


def test_ids_and_places_are_unique() -> None:
    assert len({endpoint.id for endpoint in ENDPOINTS}) == len(ENDPOINTS)
    assert len({(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}) == len(ENDPOINTS)


def test_reading_needs_the_right_to_observe_and_changing_that_to_manage() -> None:
    exceptions = {e.id: e.required_rights for e in ENDPOINTS if e.rights is not None}
    assert exceptions == {
        "access": ("infer", "observe", "manage", "token"),
        "audit": ("manage",),
        "keys": ("manage",),
        "logs": ("manage",),
        "reward": ("manage", "infer"),
        "token": ("token",),
    }


async def answer(*_: Any) -> None: ...


def test_a_name_wins_over_a_parameter_in_the_same_place() -> None:
    paths = ("/m/{a}/{b}", "/m/{a}/adapters", "/m/{a}/{b}/drift", "/m/{a}/adapters/{c}", "/{rest}")
    api = type(MANAGEMENT[0])("", "", ERRORS, tuple(get(path, path, "", str, call=answer) for path in paths))
    table = EndpointTable((api,))

    def find(path: str) -> str | None:
        match = table.find(path, "GET")
        return match.endpoint.path if match is not None and match.endpoint is not None else None

    assert find("/m/x/adapters") == "/m/{a}/adapters"
    assert find("/m/x/y/") == "/m/{a}/{b}"
    assert find("/m/x/adapters/drift") == "/m/{a}/adapters/{c}"
    assert find("/m/x/y/drift") == "/m/{a}/{b}/drift"
    assert (find("/m"), find("/m/x/y/z"), find("/m\n/x")) == ("/{rest}", None, None)
