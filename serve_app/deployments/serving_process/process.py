"""Parts of the processes that answer requests of Ray's handles: a version's replica, and a host of a pool."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.deployments.transport.control_rpc import ControlClient
from serve_app.deployments.transport.unix_socket import write_chunks
from serve_app.domain.request import InferenceResponse, ResponseChunk, ResponseStream
from serve_app.errors import RelayError
from serve_app.protocols.http.server import ray_bypass
from serve_app.protocols.http_app import inference_app
from serve_app.settings import Settings
from serve_app.telemetry import crash_reports
from serve_app.telemetry.access_log import AccessLog
from serve_app.telemetry.metrics import Meters

RESPONSE_FLUSH_S = 0.3  # seconds in which the last responses are sent before the process ends
_EXIT_HUNG = 70


def create_asgi_app(
    plane: DataPlane, settings: Settings, meters: Meters, access: AccessLog | None, management: Any
) -> Any:
    """Return the application of the process's HTTP port, with the routes that need Management."""
    # Asynchronous predictions are submitted here too, and the route of fast_path oip returns statistics.
    control = ControlPlane(ControlClient(management).api, settings, lambda: plane.access)
    app = inference_app(plane, settings, meters, access, control)
    ray_bypass.set_app(app, settings.inference.max_request_size, app.callback_app)
    return app


async def report_crashes(settings: Settings, replica: str, management: Any) -> None:
    """Report crashes of replicas on this node to Management, which sees only its own node."""
    folder = settings.crash_reports_dir
    if deaths := await asyncio.to_thread(crash_reports.collect_reports, folder, replica):
        management.died.remote(deaths)


def exit_after_flush() -> None:
    """End this process after the last responses were sent."""
    asyncio.get_running_loop().call_later(RESPONSE_FLUSH_S, os._exit, _EXIT_HUNG)


async def pickle_responses(responses: Sequence[Any]) -> bytes:
    """Return responses for another process, with the list of its chunks in place of a stream.

    Raises an exception among them that is no RelayError; all streams are closed.
    """
    results = list(responses)
    streams = [(i, response) for i, response in enumerate(results) if isinstance(response, ResponseStream)]
    try:
        for response in results:
            if isinstance(response, BaseException) and not isinstance(response, RelayError):
                raise response
        for i, stream in streams:
            try:
                results[i] = [chunk async for chunk in write_chunks(stream)]
            except RelayError as error:
                results[i] = error
    finally:
        for _, stream in streams:
            await stream.aclose()
    return pickle.dumps(results, pickle.HIGHEST_PROTOCOL)


async def stream_chunks(
    pending: Awaitable[InferenceResponse | ResponseStream],
) -> AsyncGenerator[ResponseChunk | RelayError, None]:
    """Yield a response's chunks; the first has the head, and is the last where the handler does not stream.

    An error is yielded: raised, Ray would log its traceback as a fault of ours.
    """
    response: InferenceResponse | ResponseStream | None = None
    try:
        response = await pending
        if isinstance(response, InferenceResponse):
            yield ResponseChunk(b"", last=True, head=response)
            return
        async for chunk in write_chunks(response):
            yield chunk
    except RelayError as error:
        yield error
    finally:
        if isinstance(response, ResponseStream):
            await response.aclose()
