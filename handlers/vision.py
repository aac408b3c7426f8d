"""Images to tensors, with Pillow and torch alone."""

from __future__ import annotations

import base64
import binascii
import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from handlers import explanations
from handlers.base import BaseHandler
from handlers.errors import PredictionException
from handlers.timer import timed


class Compose:
    """One transform after the other: ``Compose([Resize(256), CenterCrop(224), ToTensor()])``."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


@dataclass(frozen=True)
class ToRGB:
    """Three channels of 8 bits from any image; transparency is dropped, as are the lower half of 16 bits."""

    def __call__(self, image: Image.Image) -> Image.Image:
        if image.mode.startswith("I;16"):  # Pillow itself would make white of whatever is above 255
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image if image.mode == "RGB" else image.convert("RGB")


@dataclass(frozen=True)
class Resize:
    """The shorter side to ``size`` pixels, the proportions kept; or exactly ``(height, width)``.

    Bilinear and antialiased, as Pillow does it.
    """

    size: int | tuple[int, int]

    def __call__(self, image: Image.Image) -> Image.Image:
        if isinstance(self.size, int):
            short, long = sorted(image.size)
            longer = int(self.size * long / short)
            width, height = (self.size, longer) if image.width <= image.height else (longer, self.size)
        else:
            height, width = self.size
        return image if (width, height) == image.size else image.resize((width, height), Image.Resampling.BILINEAR)


@dataclass(frozen=True)
class CenterCrop:
    """The middle ``size`` x ``size`` pixels, or ``(height, width)``; black around an image that is smaller."""

    size: int | tuple[int, int]

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        left, top = _margin(image.width, width), _margin(image.height, height)
        return image.crop((left, top, left + width, top + height))


def _margin(have: int, want: int) -> int:
    return round((have - want) / 2) if have >= want else -((want - have) // 2)


@dataclass(frozen=True)
class ToTensor:
    """Float32, channels x height x width; 8-bit images from 0 to 1, others in their own numbers."""

    def __call__(self, image: Image.Image | np.ndarray) -> torch.Tensor:
        array = np.array(image.convert("L") if isinstance(image, Image.Image) and image.mode == "1" else image)
        tensor = torch.from_numpy(array[:, :, None] if array.ndim == 2 else array).permute(2, 0, 1)
        scaled = tensor.to(torch.float32, memory_format=torch.contiguous_format)
        return scaled.div_(255) if array.dtype == np.uint8 else scaled


@dataclass(frozen=True)
class Normalize:
    """Each channel less its ``mean``, over its ``std``."""

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(values, dtype=tensor.dtype).view(-1, 1, 1) for values in (self.mean, self.std))
        return (tensor - mean) / std


class VisionHandler(BaseHandler):
    """Each row is an image (its bytes, or base64 text) or a JSON list, a tensor already.

    ``image_processing`` makes a tensor of a PIL image; a subclass puts its own callable there. It may be
    called from several threads at once. An unreadable image is its own row's error, status 400.
    """

    image_processing: Callable[[Image.Image], torch.Tensor] = ToTensor()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "preprocess" in vars(cls) and "prepare_row" not in vars(cls):
            cls.prepare_row = None  # its own preprocess would not look at what was prepared

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        heed_pixel_limit(context)

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor:
        """A batch of images, rows x channels x height x width."""
        return self._stack(data, self._image).to(self.device)

    def prepare_row(self, row: Any) -> torch.Tensor:
        """The row's tensor, made while the model is busy with the batch before; see Row."""
        return self._image(row)

    @functools.cached_property
    def ig(self) -> Any:
        """Captum's IntegratedGradients of the model."""
        return explanations.integrated_gradients(self.model)

    def get_insights(self, tensor_data: torch.Tensor, raw_data: Any, target: Any = 0) -> list[Any]:
        """For each row what each pixel of each channel had to do with output ``target``, nested as the image is."""
        question = self.question.of(self.asked, target)
        return explanations.attributions(self.model, tensor_data, question).tolist()

    def _image(self, row: Any) -> torch.Tensor:
        prepared = getattr(row, "prepared", None)
        if isinstance(prepared, Exception):
            raise prepared
        if prepared is not None:
            return prepared
        value = (row.get("data") or row.get("body")) if isinstance(row, dict) else row
        if isinstance(value, str):
            value = from_base64(value)
        if isinstance(value, (bytes, bytearray, memoryview)) and value:
            return self.image_processing(open_image(value))
        if not value:
            raise PredictionException("There is no image: send it as the body, or as the form field data.", 400)
        try:
            tensor = torch.tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise PredictionException(f"The input is neither image nor JSON list of numbers: {error}", 400) from error
        if not tensor.dim():
            raise PredictionException("The input is a single number, and neither image nor JSON list of numbers.", 400)
        return tensor


def heed_pixel_limit(context: Any) -> None:
    """Take away Pillow's guard against decompression bombs, which is the process's, where the server has no limit."""
    if not context.system_properties.get("limit_max_image_pixels"):
        Image.MAX_IMAGE_PIXELS = None


def from_base64(text: str) -> bytes:
    """An image's bytes; PredictionException with status 400 where the text is none."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PredictionException(f"The input is text, but not an image in base64: {error}", 400) from error


def open_image(content: bytes | bytearray | memoryview) -> Image.Image:
    """The image in these bytes, decoded; PredictionException with status 400 where there is none."""
    try:
        image = Image.open(io.BytesIO(content))
        image.load()  # Pillow reads lazily, and a broken image is to show here
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        cure = "limit_max_image_pixels: false lifts this limit."
        raise PredictionException(f"The image is too large: {error} {cure}", 400) from error
    except MemoryError:
        raise
    except Exception as error:  # each of Pillow's decoders has its own ways to fail on broken bytes
        raise PredictionException(f"The input is not an image that can be read: {error}", 400) from error
    return image
