"""Decoding of images in requests."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

from PIL import Image

from handlers.errors import PredictionException


def apply_pixel_limit(context: Any) -> None:
    """Disable Pillow's process-wide guard against decompression bombs if the server has no limit."""
    if not context.system_properties.get("limit_max_image_pixels"):
        Image.MAX_IMAGE_PIXELS = None


def decode_base64(text: str) -> bytes:
    """Return an image's bytes. Raises PredictionException (400) if the text is not base64."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PredictionException(f"The input is text, but not an image in base64: {error}", 400) from error


def open_image(content: bytes | bytearray | memoryview) -> Image.Image:
    """Return the decoded image in these bytes. Raises PredictionException (400) if there is none."""
    try:
        image = Image.open(io.BytesIO(content))
        image.load()  # Pillow reads lazily; a broken image must fail here
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        hint = "limit_max_image_pixels: false lifts this limit."
        raise PredictionException(f"The image is too large: {error} {hint}", 400) from error
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many types of errors for broken bytes
        raise PredictionException(f"The input is not an image that can be read: {error}", 400) from error
    return image
