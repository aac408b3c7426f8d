"""The upload of captured requests: a replica sends its closed files to Management, which has credentials."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

from serve_app.dataplane.capture.recorder import CaptureRecorder
from serve_app.domain.model import ModelRef

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_RETRY_PERIOD_S = 20.0  # after an error
_TIMEOUT_S = 120.0  # of one file
_ORPHAN_AGE_S = 120.0  # without a change, after which a file is that of a replica that crashed


async def upload_files(recorder: CaptureRecorder, management: Any, ref: ModelRef) -> None:
    """Send closed files until cancelled; a file stays in the folder until it is stored."""
    while True:
        error = ""
        try:
            for file in await asyncio.to_thread(recorder.files.find_closed, _ORPHAN_AGE_S):
                error = await _upload(file, management, ref)
                if error:
                    recorder.set_error(error)
                    break
        except asyncio.CancelledError:
            raise
        except Exception as failure:  # Management is being replaced, or slow
            error = type(failure).__name__
            log.info("captured requests were not uploaded (%s); trying again", error)
        await asyncio.sleep(_RETRY_PERIOD_S if error else _PERIOD_S)


async def _upload(file: Path, management: Any, ref: ModelRef) -> str:
    """Send one file, and remove it once it is stored; return an error, or an empty text."""
    try:
        data = await asyncio.to_thread(file.read_bytes)
    except FileNotFoundError:
        return ""  # beyond the bound, or uploaded by another replica
    error = str(await asyncio.wait_for(management.store_capture.remote(ref, file.name, data), _TIMEOUT_S))
    if not error:
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(file.unlink)
    return error
