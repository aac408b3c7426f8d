"""Decoding of images in requests."""

from __future__ import annotations

import base64
import binascii
import io
import string
from collections.abc import Sequence
from typing import Any

from PIL import Image, UnidentifiedImageError

from handlers.errors import PredictionException

_BASE64 = (string.ascii_letters + string.digits + "+/=" + string.whitespace).encode()
_REMEDY = "Send the image's file as the body, as `curl -T FILE` does, or its base64."
_LIFTED = "limit_max_image_pixels: false lifts this limit."
_USUAL_SIDE = 256  # pixels of the shorter side after a usual resizing
_MAX_ENLARGED_PIXELS = 2**24  # 64 MiB in Pillow's RGB


def apply_pixel_limit(context: Any) -> None:
    """Disable Pillow's process-wide guard against decompression bombs if the server has no limit."""
    if not context.system_properties.get("limit_max_image_pixels"):
        Image.MAX_IMAGE_PIXELS = None


def decode_base64(text: str, kind: str = "an image") -> bytes:
    """Return the bytes of ``kind``. Raises PredictionException (400) if the text is not base64."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PredictionException(
            f"The input is text, but not {kind} in base64: {error}. Send the file as the body, as "
            "`curl -T FILE` does, or its base64.",
            400,
        ) from error


def open_image(content: bytes | bytearray | memoryview) -> Image.Image:
    """Return the decoded image in these bytes.

    Raises PredictionException (400) if there is none, or if it is too large.
    """
    return _read(content, decode=True)


def check_image(content: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the (width, height) of the image in these bytes, which is not decoded.

    Raises PredictionException (400) as ``open_image`` does.
    """
    return _read(content, decode=False).size


def check_images(contents: Sequence[bytes]) -> None:
    """Raise PredictionException (400) where images have more pixels together than one may have.

    They are not decoded: a file of 2 KB may have 16 million pixels.
    """
    pixels = sum(width * height for width, height in map(check_image, contents))
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise PredictionException(
            f"The {len(contents)} images are too large: they have {pixels} pixels together, and the limit is "
            f"{limit}. {_LIFTED}",
            400,
        )


def check_resizing(size: tuple[int, int], resized: tuple[int, int]) -> None:
    """Raise PredictionException (400) where resizing an image to ``resized`` needs too much memory.

    Sizes are (width, height). Pillow resizes the rows first: between, the image has the new width and the old
    height.
    """
    pixels = resized[0] * max(resized[1], size[1])
    if pixels > max(_MAX_ENLARGED_PIXELS, size[0] * size[1]):
        raise PredictionException(
            f"The image is too large after resizing: {size[0]} x {size[1]} pixels become {resized[0]} x "
            f"{resized[1]}. Send a part of it.",
            400,
        )


def resize_shorter_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Return the (width, height) of an image whose shorter side is resized to ``side``.

    The proportions are kept. Raises PredictionException (400) as ``check_resizing`` does.
    """
    width, height = size
    longer = int(side * max(size) / min(size))
    resized = (side, longer) if width <= height else (longer, side)
    check_resizing(size, resized)
    return resized


def check_processor(processor: Any, size: tuple[int, int]) -> None:
    """Raise PredictionException (400) where transformers' ``processor`` would enlarge an image too much."""
    target = getattr(processor, "size", None) or {}
    if not getattr(processor, "do_resize", False):
        return
    if target.get("height") and target.get("width"):
        check_resizing(size, (target["width"], target["height"]))
    elif target.get("shortest_edge") and not target.get("longest_edge"):
        resize_shorter_side(size, target["shortest_edge"])


def _read(content: bytes | bytearray | memoryview, decode: bool) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(content))
        _check_size(image.size)
        if decode:
            image.load()  # Pillow reads lazily; a broken image must fail here
    except PredictionException:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(str(error)) from error
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many types of errors for broken bytes
        # An Open Inference tensor in JSON has no other form of an image.
        if content and not bytes(content).translate(None, _BASE64):
            return _read(decode_base64(bytes(content).decode()), decode)
        if isinstance(error, UnidentifiedImageError):  # its text is the address of a Python object
            error = ValueError(f"no known format begins with {bytes(content[:8])!r}")
        raise PredictionException(
            f"The input is not an image that can be read: {error}. {_REMEDY}", 400
        ) from error
    return image


def _check_size(size: tuple[int, int]) -> None:
    """Raise PredictionException (400) for an image above Pillow's limit, of which Pillow itself only warns.

    So is a narrow image that would be above the limit after a usual resizing of its shorter side.
    """
    limit = Image.MAX_IMAGE_PIXELS
    if limit is None:
        return
    short, long = sorted(size)
    if short * long > limit:
        raise _too_large(f"it has {short * long} pixels, and the limit is {limit}.")
    if short < _USUAL_SIDE and _USUAL_SIDE**2 * long > limit * short:
        raise _too_large(f"with a shorter side of {_USUAL_SIDE} pixels, it would have more than {limit}.")


def _too_large(reason: str) -> PredictionException:
    return PredictionException(f"The image is too large: {reason} {_LIFTED}", 400)
