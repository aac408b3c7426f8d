"""Limits of async predictions: their number, their bytes, and how many of a model run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse
from tests.support.async_server import ASYNC, Server, build_table, echo

pytestmark = pytest.mark.integration


def test_limit_of_predictions_names_its_setting(start: Callable[..., Server]) -> None:
    server = start(async_predictions={"max_predictions": 1, "retention_s": 1000})
    server.submit()
    response = server("POST", "/predictions/m", b"x", ASYNC)
    assert (response.status, response["retry-after"]) == (503, "10")
    assert "async_predictions.max_predictions (1)" in response.json["message"]


def test_sizes_are_limited(start: Callable[..., Server]) -> None:
    server = start(async_predictions={"max_bytes": 1000, "max_result_size": 4})
    response = server("POST", "/predictions/m", b"x" * 1001, ASYNC)
    assert response.status == 503 and "async_predictions.max_bytes (1000)" in response.json["message"]
    large = server.result(server.submit(body=b"x" * 5))
    assert large.status == 503 and large["x-torchrelay-reason"] == "response_too_large"
    assert server.result(server.submit(body=b"x" * 4)).body == b"x" * 4


def test_concurrency_per_model_is_limited(start: Callable[..., Server]) -> None:
    sync_response, max_running = [0, 0], [0, 0]

    async def count(request: InferenceRequest) -> InferenceResponse:
        i = ("m", "n").index(request.model)
        sync_response[i] += 1
        max_running[i] = max(max_running[i], sync_response[i])
        await asyncio.sleep(0.005)
        sync_response[i] -= 1
        return await echo(request)

    server = start(count, build_table("m", "n"), async_predictions={"model_concurrency": 2, "concurrency": 3})
    locations = [server.submit(f"/predictions/{model}") for model in "mmmmmmnnn"]
    for location in locations:
        assert server.result(location).status == 200
    assert max_running[0] <= 2 and max_running[1] <= 2
    samples = {(name, labels): value for name, labels, value in server.meters.samples()}
    ended = (("model", "m"), ("state", "done"))
    assert samples["torchrelay_async_predictions_ended_total", ended] == 6
    assert samples["torchrelay_async_predictions", (("model", "m"), ("state", "running"))] == 0
