"""TorchServe's gRPC management API over real channels."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from serve_app import errors
from serve_app.domain.access import KeyGrant
from serve_app.proto.management_pb2 import (
    DescribeModelRequest,
    ListModelsRequest,
    RegisterModelRequest,
    ScaleWorkerRequest,
    SetDefaultRequest,
    UnregisterModelRequest,
)
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub
from tests.support.grpc_calls import access_table, expect_error, trailing_metadata

REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


@pytest.fixture
def manage(managed_by_grpc: Any) -> Iterator[tuple[ManagementAPIsServiceStub, Any]]:
    server = managed_by_grpc()
    yield ManagementAPIsServiceStub(server.channel), server


def test_the_digest_and_the_trust_of_a_registration(manage: Any) -> None:
    stub, server = manage
    stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar", sha256="ab", trusted=True))
    requested = server.control_api.operations[0][1]
    assert (requested.sha256, requested.trusted) == ("ab", True)


def test_model_lifecycle(manage: Any) -> None:
    stub, server = manage
    result = stub.RegisterModel(
        RegisterModelRequest(url="m-1.0.mar", initial_workers=1, synchronous=True)
    ).msg
    assert result == 'Model "m" Version: 1.0 registered with 1 initial workers'
    requested = server.control_api.operations[0][1]
    assert (requested.batch_size, requested.max_batch_delay, requested.response_timeout, requested.wait) == (
        None,
        None,
        None,
        True,
    )
    result = stub.RegisterModel(RegisterModelRequest(url="m-2.0.mar", batch_size=4, max_batch_delay=-1)).msg
    assert result.startswith(
        'Model "m" Version: 2.0 registered with 0 initial workers. Use scale workers API'
    )
    assert (requested.sha256, requested.trusted) == (None, False)
    assert stub.ScaleWorker(ScaleWorkerRequest(model_name="m", min_worker=2, synchronous=True)).msg == (
        "Workers scaled to 2 for model: m"
    )
    scale = ScaleWorkerRequest(model_name="m", model_version="2.0", min_worker=2)
    assert stub.ScaleWorker(scale).msg == "Processing worker updates..."
    assert stub.SetDefault(SetDefaultRequest(model_name="m", model_version="2.0")).msg == (
        'Default version successfully updated for model "m" to "2.0"'
    )
    [described] = json.loads(stub.DescribeModel(DescribeModelRequest(model_name="m")).msg)
    assert (described["modelVersion"], described["batchSize"]) == ("2.0", 4)
    everything = json.loads(stub.DescribeModel(DescribeModelRequest(model_name="m", model_version="all")).msg)
    assert [version["modelVersion"] for version in everything] == ["1.0", "2.0"]
    assert json.loads(stub.ListModels(ListModelsRequest()).msg) == {
        "models": [{"modelName": "m", "modelUrl": "m-2.0.mar"}]
    }
    assert stub.UnregisterModel(UnregisterModelRequest(model_name="m", model_version="1.0")).msg == (
        'Model "m" unregistered'
    )
    path = "/org.pytorch.serve.grpc.management.ManagementAPIsService/UnregisterModel"
    _, method, logged, _, status, _, _, model, version, *_ = server.access_log[-1]
    assert (method, logged, status, model, version) == ("gRPC", path, 0, "m", "1.0")


def test_pages_of_models(manage: Any) -> None:
    stub, _ = manage
    for name in "abc":
        stub.RegisterModel(RegisterModelRequest(url=f"{name}-1.0.mar"))
    first = json.loads(stub.ListModels(ListModelsRequest(limit=2)).msg)
    assert ([m["modelName"] for m in first["models"]], first["nextPageToken"]) == (["a", "b"], "2")
    second = json.loads(stub.ListModels(ListModelsRequest(limit=2, next_page_token=2)).msg)
    assert [m["modelName"] for m in second["models"]] == ["c"]


def test_customized_metadata_is_returned(manage: Any) -> None:
    stub, server = manage
    stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar"))
    server.control_api.metadata = {"labels": 3}
    [described] = json.loads(stub.DescribeModel(DescribeModelRequest(model_name="m", customized=True)).msg)
    assert described["customizedMetadata"] == {"labels": 3}
    server.control_api.metadata = errors.NoReplica("m", None, "")
    error = expect_error(stub.DescribeModel, DescribeModelRequest(model_name="m", customized=True))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error.details().startswith('Model "m" has no worker to serve describe request.')


@pytest.mark.parametrize(
    ("method", "request_", "code", "details"),
    [
        ("RegisterModel", RegisterModelRequest(), "INVALID_ARGUMENT", "Parameter url is required."),
        (
            "RegisterModel",
            RegisterModelRequest(url="m-1.0.mar"),
            "UNKNOWN",
            "Model version 1.0 is already registered",
        ),
        (
            "ScaleWorker",
            ScaleWorkerRequest(model_name="m", min_worker=2, max_worker=1),
            "INVALID_ARGUMENT",
            "max_worker cannot be less than min_worker.",
        ),
        ("ScaleWorker", ScaleWorkerRequest(model_name="x"), "NOT_FOUND", "Model not found: x"),
        ("DescribeModel", DescribeModelRequest(model_name="x"), "NOT_FOUND", "Model not found: x"),
        ("DescribeModel", DescribeModelRequest(), "INVALID_ARGUMENT", "Parameter model_name is required."),
        (
            "SetDefault",
            SetDefaultRequest(model_name="m", model_version="9"),
            "NOT_FOUND",
            "Model version 9 does not exist",
        ),
        (
            "SetDefault",
            SetDefaultRequest(model_name="m"),
            "INVALID_ARGUMENT",
            "Parameter model_version is required.",
        ),
        (
            "UnregisterModel",
            UnregisterModelRequest(model_name="m"),
            "UNKNOWN",
            "Cannot remove default version",
        ),
        ("UnregisterModel", UnregisterModelRequest(model_name="x"), "NOT_FOUND", "Model not found: x"),
    ],
)
def test_management_errors(manage: Any, method: str, request_: Any, code: str, details: str) -> None:
    stub, _ = manage
    for version in ("1.0", "2.0"):
        stub.RegisterModel(RegisterModelRequest(url=f"m-{version}.mar"))
    error = expect_error(getattr(stub, method), request_)
    assert error.code().name == code
    assert error.details().startswith(details)


def test_invalid_worker_counts_are_ignored(manage: Any) -> None:
    stub, server = manage
    stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar"))
    stub.ScaleWorker(ScaleWorkerRequest(model_name="m", min_worker=-1, max_worker=-1))
    assert server.control_api.operations[-1] == ("scale", "m", None, 1, 1, False)


def test_pending_change_is_a_normal_response(manage: Any) -> None:
    stub, server = manage
    server.control_api.error = errors.InProgress("Accepted, and not everywhere in force yet.")
    result = stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar", initial_workers=1)).msg
    assert result == "Accepted, and not everywhere in force yet."


def test_model_api_is_disabled(managed_by_grpc: Any) -> None:
    server = managed_by_grpc(control={"enable_model_api": False})
    error = expect_error(
        ManagementAPIsServiceStub(server.channel).RegisterModel, RegisterModelRequest(url="m-1.0.mar")
    )
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED


def test_management_rights(managed_by_grpc: Any) -> None:
    grants = {
        "looks": KeyGrant(frozenset({"observe"})),
        "mine": KeyGrant(frozenset({"observe", "manage"}), ("team-*",)),
    }
    server = managed_by_grpc(access_table(**grants))
    stub = ManagementAPIsServiceStub(server.channel)
    key = {"metadata": [("authorization", "Bearer looks")]}
    stub.ListModels(ListModelsRequest(), **key)
    error = expect_error(stub.RegisterModel, RegisterModelRequest(url="m-1.0.mar"), **key)
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    assert trailing_metadata(error)["x-torchrelay-reason"] == "missing_permission"
    key = {"metadata": [("authorization", "Bearer mine")]}
    stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar"), **key)
    assert server.control_api.operations[-1][1].allowed_models == ("team-*",)
    error = expect_error(stub.UnregisterModel, UnregisterModelRequest(model_name="m"), **key)
    assert trailing_metadata(error)["x-torchrelay-reason"] == "model_not_allowed"


def test_malformed_message_is_rejected(managed_by_grpc: Any) -> None:
    server = managed_by_grpc()
    call = server.channel.unary_unary("/org.pytorch.serve.grpc.management.ManagementAPIsService/ListModels")
    error = expect_error(call, b"\x1a\x7f")
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "is no ListModelsRequest" in error.details()
    assert trailing_metadata(error)["x-torchrelay-reason"] == "invalid_body"


def test_messages_over_the_limits_are_rejected(managed_by_grpc: Any) -> None:
    server = managed_by_grpc(inference={"max_request_size": 1000}, runtime={"max_response_size": 1000})
    stub = ManagementAPIsServiceStub(server.channel)
    error = expect_error(stub.RegisterModel, RegisterModelRequest(url="m" * 2000))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for name in range(30):
        stub.RegisterModel(RegisterModelRequest(url=f"model{name}-1.0.mar"))
    assert expect_error(stub.ListModels, ListModelsRequest()).code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_metadata_may_have_16_kib(manage: Any) -> None:
    stub, _ = manage
    assert stub.ListModels(ListModelsRequest(), metadata=[("x-mine", "v" * 15_000)]).msg
    error = expect_error(stub.ListModels, ListModelsRequest(), metadata=[("x-mine", "v" * 40_000)])
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_access_log_has_the_address_of_the_client(manage: Any) -> None:
    stub, server = manage
    stub.ListModels(ListModelsRequest())
    host, _, port = server.access_log[-1][0].partition(":")
    assert host == "127.0.0.1" and port.isdecimal()


def test_late_call_is_cancelled(managed_by_grpc: Any) -> None:
    server = managed_by_grpc()

    async def never(registration: Any) -> None:
        await asyncio.Event().wait()

    server.control_api.register = never
    stub = ManagementAPIsServiceStub(server.channel)
    stub.ListModels(ListModelsRequest(), timeout=60)  # opens the connection, which may take longer
    with pytest.raises(grpc.RpcError) as raised:
        stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar"), timeout=2)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    while len(server.access_log) < 2:
        time.sleep(0.005)
    assert server.access_log[-1][4] == grpc.StatusCode.CANCELLED.value[0]
