"""Requests that schemathesis generates from the OpenAPI document of each port of a running server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import CHECKS

from tests.support.archives import ECHO, make_archive
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.own_server, pytest.mark.nightly]

_CHECKED = (
    *("status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    own = Server(tmp_path_factory.mktemp("ports"))
    make_archive(own.store, "m", ECHO)
    try:
        own.start()
        yield own
        assert own.http.post("/predictions/m", content=b"x").content == b"x", "the server is as it was"
    finally:
        own.close()


def _use_known_model(value: str) -> str:
    return "m" if len(value) % 3 else value


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11, for its version of schemathesis")
@pytest.mark.parametrize("port", ["inference", "management", "metrics"])
def test_every_port_responds_as_it_describes(own: Server, port: str) -> None:
    url = {
        "inference": own.url,
        "management": str(own.management.base_url).rstrip("/"),
        "metrics": own.process.metrics.removesuffix("/metrics"),
    }[port]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    schema.config.update(base_url=url)

    @schema.hook
    def map_path_parameters(context: Any, parameters: Any) -> Any:
        unloads = context.operation.path.endswith("/unload")  # the model has no replica after it
        if port == "inference" and not unloads and parameters and "model_name" in parameters:
            parameters["model_name"] = _use_known_model(parameters["model_name"])
        return parameters

    checks = [CHECKS.get_one(name) for name in _CHECKED]
    operations = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.startswith("/keys") and operation.method == "post":
            continue  # the first key turns authorization on
        if operation.path.endswith("/events"):
            continue  # a stream that waits for an event
        operations += 1

        @seed(11)
        @given(case=operation.as_strategy())
        @settings(
            max_examples=5,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check_operation(case: Any) -> None:
            if case.query:
                case.query.pop("follow", None)  # an endless stream cannot be checked
            response = case.call(timeout=60)
            if response.status_code in (502, 503, 504, 507):  # temporary, and described
                assert response.headers.get("x-torchrelay-reason"), f"{case.method} {case.path}"
                return
            case.validate_response(response, checks=checks)
            reason = response.headers.get("x-torchrelay-reason", [""])[0]
            assert reason != "internal", f"{case.method} {case.path}: a fault of the server"

        check_operation()
    assert operations
