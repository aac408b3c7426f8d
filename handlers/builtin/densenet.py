"""Tensors in, tensors out, as ``torch.save`` writes them."""

from __future__ import annotations

import io
from typing import Any

import torch

from handlers.base import BaseHandler
from handlers.errors import PredictionException
from handlers.timer import timed


class DenseNetHandler(BaseHandler):
    """Each row is a tensor that ``torch.save`` wrote; its answer is the model's output, a batch of one."""

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor:
        return self._stack(data, _loaded).to(self.device)

    @timed
    def postprocess(self, data: torch.Tensor) -> list[torch.Tensor]:
        return [row.clone() for row in data.cpu().split(1)]  # torch.save would write all that a view belongs to


def _loaded(row: Any) -> torch.Tensor:
    value = (row.get("data") or row.get("body")) if isinstance(row, dict) else row
    try:
        tensor = torch.load(io.BytesIO(value), weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes fail in as many ways as there are opcodes
        raise PredictionException("The input is no tensor: send the bytes that torch.save writes.", 400) from error
    if not isinstance(tensor, torch.Tensor):
        raise PredictionException(f"The input is a {type(tensor).__name__}, not a tensor.", 400)
    return tensor
