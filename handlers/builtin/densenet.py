"""A handler from tensors to tensors, in the format of ``torch.save``."""

from __future__ import annotations

import io
import zipfile
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
        _check_unpacked_size(value or b"")
        tensor = torch.load(io.BytesIO(value or b""), weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes raise many types of errors
        raise PredictionException(
            "The input is no tensor: send the bytes that torch.save writes.", 400
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise PredictionException(f"The input is a {type(tensor).__name__}, not a tensor.", 400)
    if tensor.layout == torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes():
        raise PredictionException(
            f"The tensor is an expanded view of {tuple(tensor.shape)}: send tensor.contiguous().", 400
        )
    return tensor


def _check_unpacked_size(content: bytes | bytearray | memoryview) -> None:
    """Raise ValueError for a file whose entries are compressed, which those of torch.save are not."""
    file = io.BytesIO(content)
    if zipfile.is_zipfile(file) and any(info.compress_type for info in zipfile.ZipFile(file).infolist()):
        raise ValueError("its entries are compressed")
