"""A handler from tensors to tensors, in the format of ``torch.save``."""

from __future__ import annotations

import io
from typing import Any

import torch

from handlers.base import BaseHandler
from handlers.errors import PredictionException
from handlers.torchserve_compat.timer import timed


class DenseNetHandler(BaseHandler):
    """A handler whose rows are tensors of ``torch.save``; each value is the model's output, a batch of
    one.
    """

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor:
        return self._stack_rows(data, _load_tensor).to(self.device)

    @timed
    def postprocess(self, data: torch.Tensor) -> list[torch.Tensor]:
        # torch.save would write the whole storage of a view.
        return [row.clone() for row in data.cpu().split(1)]


def _load_tensor(row: Any) -> torch.Tensor:
    value = (row.get("data") or row.get("body")) if isinstance(row, dict) else row
    try:
        tensor = torch.load(io.BytesIO(value or b""), weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes raise many types of errors
        raise PredictionException(
            "The input is no tensor: send the bytes that torch.save writes.", 400
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise PredictionException(f"The input is a {type(tensor).__name__}, not a tensor.", 400)
    return tensor
