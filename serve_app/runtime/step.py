"""One step of a model with continuous batching: of each row its handler says whether there is more to come."""

from __future__ import annotations

from typing import Any

import numpy as np

from serve_app.errors import RelayError
from serve_app.runtime.turn import Turn, failure
from serve_app.types import Chunk, Reply


class Step(Turn):
    """A turn that gives a Chunk for each row that streams, whose ``head`` is a reply with the piece in it.

    ``context.stopping_criteria[i]`` is called with what the handler returned for row i: True ends its stream, False
    goes on with it, None makes a whole answer of it, as does a handler that sets no criteria.
    """

    _closing = False

    def close(self, values: Any) -> list[Any]:
        self._closing = True
        return super().close(list(values) if isinstance(values, np.ndarray) else values)

    def _reply(self, index: int, value: Any) -> Any:
        reply = super()._reply(index, value)
        criteria = self.context.stopping_criteria
        if not self._closing or not criteria or isinstance(reply, RelayError):
            return reply
        try:
            stops = criteria[index](value)
        except Exception as error:
            return failure(error, self.failures)
        assert isinstance(reply, Reply)
        return reply if stops is None else Chunk(reply.body, bool(stops), reply)
