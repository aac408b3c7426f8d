"""A model in this process that predicts the rows of blocks, with the batcher of a replica."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from serve_app.batch_prediction.rows import BatchRow, RowResult, decode_body
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InputPart, ResponseStream
from serve_app.errors import InvalidInput, RelayError
from serve_app.model_store.archive import Archive
from serve_app.runtime.batching.row_batcher import create_row_batcher
from serve_app.runtime.handler_thread import HandlerThread
from serve_app.runtime.host import malloc
from serve_app.runtime.runner import Runner
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)
_EXIT_HUNG = 70


class BlockPredictor:
    """A loaded model that answers blocks of rows; ``gpu`` is the index of its device, None on CPUs.

    Raises StartFailed where the model does not load. A failed batch is run again in halves, so an invalid
    row fails alone.
    """

    def __init__(self, spec: ModelSpec, directory: Path, settings: Settings, gpu: int | None) -> None:
        self._spec = spec
        self._hung = False
        self._handler_thread = HandlerThread(on_idle=malloc.trim)
        archive = Archive.read(directory, spec.url, settings.store.default_service_handler)
        runner = self._runner = Runner(spec, directory, dict(archive.manifest.raw), settings.runtime, gpu)
        self._handler_thread.submit(runner.load).result()
        self._handler_thread.submit(runner.warm_up).result()
        self._loop = asyncio.new_event_loop()
        self._batcher = create_row_batcher(
            runner, runner.run, spec, Meters(), self._handler_thread, self._on_hung
        )

    def predict(self, rows: Sequence[BatchRow]) -> list[RowResult]:
        """Return the result of each row, in their order."""
        if self._hung:  # the thread never returns; another process takes the block
            os._exit(_EXIT_HUNG)
        return self._loop.run_until_complete(self._predict_all(rows))

    def close(self) -> None:
        """End the handler's thread, and release the event loop."""
        self._loop.run_until_complete(self._batcher.close())
        self._loop.close()
        self._handler_thread.shutdown()
        if self._runner.loop is not None:
            self._runner.loop.close()

    async def _predict_all(self, rows: Sequence[BatchRow]) -> list[RowResult]:
        return list(await asyncio.gather(*map(self._predict_row, rows)))

    async def _predict_row(self, row: BatchRow) -> RowResult:
        if row.problem:
            return RowResult.of_error(row.number, InvalidInput(row.problem))
        request = InferenceRequest(
            self._spec.name,
            self._spec.version,
            (InputPart("body", row.body, row.content_type),),
            request_id=f"row-{row.number}",
        )
        try:
            response = await self._batcher.infer(request)
            if isinstance(response, ResponseStream):
                head, body = response.head, b"".join([chunk async for chunk in response])
            else:
                head, body = response, response.body
        except RelayError as error:
            return RowResult.of_error(row.number, error)
        if head.status >= 400:  # the handler has set it
            message = body.decode(errors="replace")
            return RowResult(row.number, reason=f"status_{head.status}", message=message)
        return RowResult(row.number, decode_body(body))

    def _on_hung(self, reason: str) -> None:
        log.error("%s: %s", self._spec.ref.app, reason)
        self._hung = True
