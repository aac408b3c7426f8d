"""A decode step of continuous batching, after which the handler's criteria end some of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from serve_app.domain.request import InferenceResponse, ResponseChunk
from serve_app.errors import RelayError
from serve_app.runtime.batch_execution import BatchExecution, handler_error


class DecodeStep(BatchExecution):
    """An execution that returns a ResponseChunk for each row that streams; its ``head`` is a response with
    the chunk.

    ``context.stopping_criteria[i]`` is called with the handler's value for row i: True ends its stream, False
    continues it, and None makes it a whole response. A handler without criteria returns whole responses.
    """

    _closing = False

    def close(self, values: Any) -> list[Any]:
        self._closing = True
        return super().close(list(values) if isinstance(values, np.ndarray) else values)

    def _response(self, index: int, value: Any) -> Any:
        reply = super()._response(index, value)
        criteria = self.context.stopping_criteria
        if not self._closing or not criteria or isinstance(reply, RelayError):
            return reply
        try:
            stops = criteria[index](value)
        except Exception as error:
            return handler_error(error, self.failures)
        assert isinstance(reply, InferenceResponse)
        return reply if stops is None else ResponseChunk(reply.body, bool(stops), reply)
