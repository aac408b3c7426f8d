"""The process that serves versions: one of its own, or those that a pool has loaded.

It answers the requests of its HTTP port, of other processes on its host, and of Ray's handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Any

from ray import serve

from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.dataplane.shadow.mirror import ShadowMirror
from serve_app.deployments.management_client import ManagementClient
from serve_app.deployments.ray_internals import metrics as ray_metrics
from serve_app.deployments.ray_internals.metrics import ExportedLoad, ExportedProcess
from serve_app.deployments.transport.control_rpc import ControlClient
from serve_app.deployments.transport.unix_socket import UdsServer, socket_path, write_chunks
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseChunk, ResponseStream
from serve_app.domain.routing_table import RoutingTable
from serve_app.errors import RelayError
from serve_app.net.private_files import restrict_umask
from serve_app.protocols.http.server import ray_bypass
from serve_app.protocols.http_app import inference_app
from serve_app.runtime.backends import Backend
from serve_app.settings import Settings
from serve_app.telemetry import access_log, crash_reports, host_metrics, logs, torchserve, tracing
from serve_app.telemetry.crash_reports import CrashReporter
from serve_app.telemetry.logs import ProcessIdentity
from serve_app.telemetry.metrics import Meters

RESPONSE_FLUSH_S = 0.3  # seconds in which the last responses are sent before the process ends
_EXIT_HUNG = 70


class ServingProcess(ABC):
    """The base class of the deployments that serve versions."""

    def _configure(self, spec: ModelSpec, settings: Settings, kind: str, **attributes: str) -> None:
        """Configure logs, traces and metrics, and connect to nothing yet."""
        restrict_umask()
        replica = serve.get_replica_context().replica_id.unique_id
        identity = ProcessIdentity.of_replica(spec.name, spec.version, replica)
        logs.configure(settings, identity, spec.config.get("log_level"))
        tracing.configure(settings, kind, replica=replica, **attributes)
        self._spec = spec
        self._settings = settings
        self._replica = replica
        self._is_hung = False
        self._handle_rows = 0  # in calls of Ray's handles, which Ray counts as ongoing
        self._meters = Meters(torchserve.create_recorders(settings))
        self._crash_reporter = CrashReporter(settings.crash_reports_dir, spec.ref.app, spec.digest, replica)
        self._reader = RoutingTableReader(on_table=self._apply_table)
        self._management_client = ManagementClient(self._reader, self._meters, settings.counts_dir)

    async def _serve(self, backend: Backend, plane: DataPlane, mirror: ShadowMirror, path: str) -> None:
        """Open the Unix socket, start the exports, and wait for the first routing table.

        ``backend`` runs the requests of other processes; ``path`` is the prefix of the HTTP port's paths.
        """
        settings, client = self._settings, self._management_client
        self._backend, self._plane, self._mirror = backend, plane, mirror
        client.key_limiter = plane.key_limiter
        client.before_report = self._update_meters
        self._access = access_log.access_log(settings)
        self._uds_server = UdsServer(backend.submit, self._holds_sequence)
        await self._uds_server.open(socket_path(self._replica))
        self._host_metrics = host_metrics.start(self._meters.torchserve, settings)
        process = ExportedProcess(self._spec.ref.app, self._replica, path)
        self._ray_metrics = ray_metrics.start(settings, self._meters, process, self._measure_load)
        client.start()
        await client.wait_for_table(timeout=30)

    @abstractmethod
    def _apply_table(self, table: RoutingTable) -> None:
        """Follow a new routing table."""

    @abstractmethod
    def _update_meters(self) -> None:
        """Set the gauges that a report to Management contains."""

    @property
    @abstractmethod
    def _row_counts(self) -> tuple[int, int]:
        """Return the numbers of rows that wait, and that wait or run."""

    def _holds_sequence(self, sequence: str) -> bool:
        """Return whether the state of a sequence is here."""
        return False

    def _measure_load(self) -> ExportedLoad:
        pending, ongoing = self._row_counts
        return ExportedLoad(pending, max(0, ongoing - self._handle_rows))

    # The methods that Ray Serve calls

    def __serve_build_asgi_app__(self) -> Any:
        # Asynchronous predictions are submitted here too, and the route of fast_path oip returns statistics.
        api = ControlClient(self._management_client.management)
        control = ControlPlane(api, self._settings, lambda: self._plane.access)
        app = inference_app(self._plane, self._settings, self._meters, self._access, control)
        ray_bypass.set_app(app, self._settings.inference.max_request_size, app.callback_app)
        return app

    async def infer(self, payload: bytes) -> bytes:
        """Answer pickled requests of another process: an InferenceResponse, a RelayError or a list of chunks
        for each.
        """
        requests = pickle.loads(payload)
        self._handle_rows += len(requests)
        try:
            return await _pickle_responses(await self._backend.infer_all(requests))
        finally:
            self._handle_rows -= len(requests)

    async def stream(self, request: InferenceRequest) -> AsyncIterator[ResponseChunk | RelayError]:
        """Answer one request as chunks or an error."""
        self._handle_rows += 1
        try:
            async with contextlib.aclosing(_stream_chunks(self._backend.infer(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._handle_rows -= 1

    async def holds(self, sequence: str) -> bool:
        """Return whether the state of a sequence is here."""
        return self._holds_sequence(sequence)

    async def awake(self) -> None:
        """Return at once: Ray Serve starts a replica for this request where there is none."""
        return None

    async def check_health(self) -> None:
        if self._is_hung:
            raise RuntimeError("a handler hangs")

    # The end of the process

    def _exit_hung(self, reason: str, **report: Any) -> None:
        """End this process after the last responses were sent, because a handler hangs; Ray Serve starts
        another one.
        """
        self._crash_reporter.report(reason, **report)
        self._is_hung = True
        asyncio.get_running_loop().call_later(RESPONSE_FLUSH_S, os._exit, _EXIT_HUNG)

    async def _disconnect(self) -> None:
        self._uds_server.close()
        await self._mirror.close()
        await asyncio.to_thread(tracing.shutdown)
        await self._management_client.disconnect()


async def report_crashes(settings: Settings, replica: str, management: Any) -> None:
    """Report crashes of replicas on this node to Management, which sees only its own node."""
    folder = settings.crash_reports_dir
    if deaths := await asyncio.to_thread(crash_reports.collect_reports, folder, replica):
        management.died.remote(deaths)


async def _pickle_responses(responses: Sequence[Any]) -> bytes:
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


async def _stream_chunks(
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
