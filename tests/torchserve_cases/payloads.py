"""Files of the cases' archives that are made when they are needed."""

from __future__ import annotations

import base64
import io
import wave
import zipfile
from collections.abc import Mapping

import numpy as np


def make_zip(files: Mapping[str, str]) -> bytes:
    """Return a zip file with these texts."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def make_png() -> bytes:
    """Return a grey picture with one white square."""
    from PIL import Image

    image = Image.new("L", (16, 12), 40)
    image.paste(255, (3, 4, 8, 9))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def make_base64_png() -> bytes:
    return base64.b64encode(make_png())


def make_wave() -> bytes:
    """Return a mono file of 100 samples at 8 kHz."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\x10\x27" * 100)
    return buffer.getvalue()


def make_array() -> bytes:
    """Return a file of numpy.save."""
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6, dtype=np.float32).reshape(2, 3))
    return buffer.getvalue()
