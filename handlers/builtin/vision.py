"""Handlers and transforms of images, based on Pillow and torch alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from handlers.base import BaseHandler
from handlers.errors import PredictionException
from handlers.explain import attributions
from handlers.images import (
    apply_pixel_limit,
    check_resizing,
    decode_base64,
    open_image,
    resize_shorter_side,
)
from handlers.torchserve_compat.timer import timed


class Compose:
    """A sequence of transforms: ``Compose([Resize(256), CenterCrop(224), ToTensor()])``."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


@dataclass(frozen=True)
class ToRGB:
    """A conversion of any image to three channels of 8 bits; transparency and the lower half of 16 bits are
    dropped.
    """

    def __call__(self, image: Image.Image) -> Image.Image:
        if image.mode.startswith("I;16"):  # Pillow itself would turn values above 255 white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image if image.mode == "RGB" else image.convert("RGB")


@dataclass(frozen=True)
class Resize:
    """A resizing of the shorter side to ``size`` pixels, or of both sides to exactly ``(height, width)``.

    The former keeps the proportions. Both are bilinear and antialiased, as in Pillow. Raises
    PredictionException (400) for an image that would need too much memory.
    """

    size: int | tuple[int, int]

    def __call__(self, image: Image.Image) -> Image.Image:
        size = self.output_size(image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BILINEAR)

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (width, height) of an image of ``size`` after resizing."""
        if isinstance(self.size, int):
            return resize_shorter_side(size, self.size)
        height, width = self.size
        check_resizing(size, (width, height))
        return width, height


class RGBResize(Resize):
    """A conversion to RGB and a resizing, in one: as in TorchServe, ``Resize`` is the first transform."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return super().__call__(ToRGB()(image))


@dataclass(frozen=True)
class CenterCrop:
    """A crop of the central ``size`` x ``size`` pixels, or ``(height, width)``; smaller images get a black
    border.
    """

    size: int | tuple[int, int]

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        left, top = _crop_offset(image.width, width), _crop_offset(image.height, height)
        return image.crop((left, top, left + width, top + height))


def _crop_offset(length: int, target: int) -> int:
    return round((length - target) / 2) if length >= target else -((target - length) // 2)


@dataclass(frozen=True)
class ToTensor:
    """A conversion to float32, channels x height x width; 8-bit images are scaled to 0 to 1, others are
    not.
    """

    def __call__(self, image: Image.Image | np.ndarray) -> torch.Tensor:
        array = np.array(
            image.convert("L") if isinstance(image, Image.Image) and image.mode == "1" else image
        )
        tensor = torch.from_numpy(array[:, :, None] if array.ndim == 2 else array).permute(2, 0, 1)
        scaled = tensor.to(torch.float32, memory_format=torch.contiguous_format)
        return scaled.div_(255) if array.dtype == np.uint8 else scaled


class RGBToTensor(ToTensor):
    """A conversion to RGB and to a tensor, in one."""

    def __call__(self, image: Image.Image | np.ndarray) -> torch.Tensor:
        return super().__call__(ToRGB()(image) if isinstance(image, Image.Image) else image)


@dataclass(frozen=True)
class Normalize:
    """A normalization of each channel by its ``mean`` and ``std``."""

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        mean, std = (
            torch.tensor(values, dtype=tensor.dtype).view(-1, 1, 1) for values in (self.mean, self.std)
        )
        return (tensor - mean) / std


class VisionHandler(BaseHandler):
    """A handler whose rows are images (bytes, or base64 text) or JSON lists, which are tensors already.

    ``image_processing`` converts a PIL image to a tensor; a subclass may replace it. It may be called from
    several threads at once. An unreadable image fails its own row, with status 400.
    """

    input_type = "image/*"
    image_processing: Callable[[Image.Image], torch.Tensor] = ToTensor()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "preprocess" in vars(cls) and "prepare_row" not in vars(cls):
            # Its own preprocess does not read prepared rows.
            setattr(cls, "prepare_row", None)  # noqa: B010  (a method is replaced on purpose)

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        apply_pixel_limit(context)

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor:
        """Return a batch of images, rows x channels x height x width."""
        return self._stack_rows(data, self._read_image).to(self.device)

    def prepare_row(self, row: Any) -> torch.Tensor:
        """Return the row's tensor, created while the model runs the previous batch; see Row."""
        return self._read_image(row)

    @functools.cached_property
    def ig(self) -> Any:
        """Captum's IntegratedGradients of the model."""
        return attributions.integrated_gradients(self.model)

    def get_insights(self, tensor_data: torch.Tensor, raw_data: Any, target: Any = 0) -> list[Any]:
        """Return for each row the attribution of each channel's pixels to output ``target``, nested as the
        image is.
        """
        options = self.explanation_options.for_row(self.explained_row, target)
        return attributions.attribute(self.model, tensor_data, options).tolist()

    def _read_image(self, row: Any) -> torch.Tensor:
        prepared = getattr(row, "prepared", None)
        if isinstance(prepared, Exception):
            raise prepared
        if prepared is not None:
            return prepared
        value = (row.get("data") or row.get("body")) if isinstance(row, dict) else row
        if isinstance(value, str):
            value = decode_base64(value)
        if isinstance(value, (bytes, bytearray, memoryview)) and value:
            return self.image_processing(open_image(value))
        if not value:
            raise PredictionException(
                "There is no image: send it as the body, or as the form field data.", 400
            )
        if isinstance(value, dict):
            raise PredictionException(
                "The input is a JSON object, and neither image nor JSON list of numbers. "
                "Send the image's file as the body, as `curl -T FILE` does, or as the form field data.",
                400,
            )
        try:
            tensor = torch.tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise PredictionException(
                f"The input is neither image nor JSON list of numbers: {error}", 400
            ) from error
        if not tensor.dim():
            raise PredictionException(
                "The input is a single number, and neither image nor JSON list of numbers.", 400
            )
        return tensor
