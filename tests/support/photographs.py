"""Test images in every mode and in odd sizes, cut from a photograph without resampling.

They are the same with every version of Pillow.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image


def photographs() -> dict[str, bytes]:
    """Return the bytes of lossless files, by name."""
    whole = Image.fromarray(load_sample_image("china.jpg"))  # 640 x 427
    flower = Image.fromarray(load_sample_image("flower.jpg"))
    red, green, blue = whole.split()
    grey = whole.convert("L")
    palette = grey.point(lambda value: value // 4)
    palette.putpalette(
        [channel for index in range(64) for channel in (index * 4, 255 - index * 4, index * 2)]
    )
    turned = Image.Exif()
    turned[0x0112] = 6  # orientation: viewers rotate it
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + np.asarray(red))
    images = {
        "whole": whole,
        "flower": flower,
        "portrait": whole.transpose(Image.Transpose.ROTATE_90),
        "odd": whole.crop((3, 5, 304, 228)),
        "odd portrait": whole.crop((3, 5, 232, 350)),
        "as large as the crop": whole.crop((100, 100, 324, 324)),
        "as large as the resize": whole.crop((100, 100, 356, 356)),
        "small": whole.crop((200, 200, 250, 237)),
        "one row of tiles": whole.crop((0, 200, 640, 263)),
        "grey": grey,
        "palette": palette,
        "transparent": Image.merge("RGBA", (red, green, blue, grey)),
        "grey and transparent": Image.merge("LA", (grey, red)),
        "cmyk": Image.merge("CMYK", (red, green, blue, grey.point(lambda value: value // 2))),
        "black and white": grey.point(lambda value: 255 * (value > 127)).convert(
            "1", dither=Image.Dither.NONE
        ),
        "16 bits": deep,
        "orientation": whole,
    }
    return {name: _encode(image, turned if name == "orientation" else None) for name, image in images.items()}


def _encode(image: Image.Image, exif: Image.Exif | None) -> bytes:
    buffer = io.BytesIO()
    if image.mode == "CMYK":
        image.save(buffer, "TIFF")
    else:
        image.save(buffer, "PNG", **({} if exif is None else {"exif": exif}))
    return buffer.getvalue()
