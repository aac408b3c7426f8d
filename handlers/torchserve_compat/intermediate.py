"""Streaming of values before the handler returns."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from handlers.errors import PredictionException

if TYPE_CHECKING:
    from handlers.context import Context

logger = logging.getLogger(__name__)


def send_intermediate_predict_response(
    ret: Any, req_id_map: Mapping[int, str], message: str, code: int, context: Context
) -> None:
    """Send one intermediate value for every row in ``ret``; the handler's return value is the last one.

    ``req_id_map`` maps an index in ``ret`` to a request's id: ``context.request_ids``, or a part of it with
    its own indices. Any ``code`` but 200 ends these rows with ``message`` as their error. A row whose batch
    has ended is skipped. Only the first rank of a sharded model sends.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if code == 200 and len(ret) < len(req_id_map):
        raise ValueError(
            f"ret holds {len(ret)} values, req_id_map {len(req_id_map)} requests: give each request one."
        )
    for place, request_id in req_id_map.items():
        row = _find_row(place, request_id, context.request_ids or {})
        if row is None:
            logger.warning(
                "Request %s is not in the batch that runs now: its intermediate value is lost.", request_id
            )
            continue
        context.set_response_header(row, "ts_stream_next", "true")
        context.emit(row, ret[place] if code == 200 else PredictionException(message, code))


def _find_row(place: int, request_id: str, request_ids: Mapping[int, str]) -> int | None:
    """Return the row of the request id, or None.

    A micro-batch counts its rows from 0, so the id decides.
    """
    if request_ids.get(place) == request_id:
        return place
    return next((row for row, known_id in request_ids.items() if known_id == request_id), None)
