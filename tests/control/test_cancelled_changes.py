"""Changes whose callers are gone before they are stored: over gRPC, and with an Idempotency-Key."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from serve_app.control import registry_changes
from serve_app.control.registry import Registry
from serve_app.domain.audit import AuditQuery
from serve_app.domain.model import ModelSpec
from serve_app.errors import Unavailable
from serve_app.proto.management_pb2 import SetDefaultRequest, UnregisterModelRequest
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub
from serve_app.protocols.grpc_app import management_server
from tests.control.test_cancelled_operations import stored_request
from tests.support.control_services import ControlServices, until

pytestmark = pytest.mark.integration

Run = Callable[[Callable[[ControlServices], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that passes services with a model of two versions to a test."""

    async def start(test: Callable[[ControlServices], Coroutine[Any, Any, None]]) -> None:
        services = ControlServices(tmp_path)
        registry = Registry()
        for version in ("1.0", "2.0"):
            registry = registry_changes.register(registry, ModelSpec("m", version, "m.mar", "d" * 64, "a"))
        await services.state.commit(registry)
        await services.start()
        await test(services)
        await services.close()

    return lambda test: asyncio.run(start(test))


@contextlib.contextmanager
def locked(services: ControlServices) -> Any:
    file = services.settings.database_url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("COMMIT")


@contextlib.asynccontextmanager
async def management_port(services: ControlServices) -> Any:
    server = management_server(services.control, services.settings, services.meters)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield ManagementAPIsServiceStub(channel)
    await server.stop(None)


@pytest.mark.parametrize("method", ["SetDefault", "UnregisterModel"])
def test_a_deadline_during_the_commit_leaves_memory_and_database_equal(
    run: Run, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def change(services: ControlServices) -> None:
        save, commits = services.database.save, []
        monkeypatch.setattr(services.database, "save", lambda *args: commits.append(args) or save(*args))
        request_type = {"SetDefault": SetDefaultRequest, "UnregisterModel": UnregisterModelRequest}[method]
        stored = services.database.generation
        async with management_port(services) as stub:
            with locked(services):
                timeout = 0.3
                while not commits:  # a slow machine reaches the commit later
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await getattr(stub, method)(
                            request_type(model_name="m", model_version="2.0"), timeout=timeout
                        )
                    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    timeout *= 2
            await until(lambda: services.database.generation > stored)
            # The next change is stored although it restores what was.
            await stub.SetDefault(SetDefaultRequest(model_name="m", model_version="1.0"))
            assert services.database.load() == services.state.registry
            assert services.state.registry.models["m"].default == "1.0"

    run(change)


def test_a_cancelled_change_that_cannot_be_stored_changes_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def change(services: ControlServices) -> None:
        before = services.state.registry
        monkeypatch.setattr(services.database, "save", lambda *args: _raise(Unavailable("locked")))
        task = asyncio.ensure_future(services.control.api.set_default("m", "2.0"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert services.database.load() == services.state.registry == before
        [record] = await services.trail.list_audit_records(AuditQuery(action="set_default"), ("*",))
        assert record["result"] == "cancelled"

    run(change)


def test_a_repeated_submission_is_the_same_though_the_first_is_cancelled(run: Run) -> None:
    async def submit(services: ControlServices) -> None:
        request = stored_request(b"x", key="key")
        with locked(services):
            first = asyncio.ensure_future(services.control.api.submit_prediction(request))
            await until(lambda: services.predictions._adding)
            first.cancel()
            second = asyncio.ensure_future(services.control.api.submit_prediction(request))
            for _ in range(10):
                await asyncio.sleep(0)
        repeated = await second
        assert [repeated["id"]] == list(services.predictions._all)

    run(submit)


def _raise(error: Exception) -> None:
    raise error
