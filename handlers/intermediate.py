"""Streaming: values that leave before the handler returns."""

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
    """Send one intermediate value for every row in ``ret``; what the handler returns in the end is the last.

    ``req_id_map`` maps a place in ``ret`` to a request's id: ``context.request_ids``, or a part of it
    with places of its own. Any ``code`` but 200 ends these rows with ``message`` as their error. A row
    whose batch is over is passed by. Of a sharded model only the first rank sends.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if code == 200 and len(ret) < len(req_id_map):
        raise ValueError(f"ret holds {len(ret)} values, req_id_map {len(req_id_map)} requests: give each request one.")
    for place, request_id in req_id_map.items():
        row = _row(place, request_id, context.request_ids or {})
        if row is None:
            logger.warning("Request %s is not in the batch that runs now: its intermediate value is lost.", request_id)
            continue
        context.set_response_header(row, "ts_stream_next", "true")
        context.emit(row, ret[place] if code == 200 else PredictionException(message, code))


def _row(place: int, request_id: str, request_ids: Mapping[int, str]) -> int | None:
    """A micro-batch counts its places from 0, so the id says which row it is."""
    if request_ids.get(place) == request_id:
        return place
    return next((row for row, known in request_ids.items() if known == request_id), None)
