"""Draw a receipt and a rotated photograph of it, send both concurrently, and print the recognised lines.

Usage with an image file: run.py IMAGE
"""

import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torchrelay import Client

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
LINES = ("Corner Bakery", "2 croissants 5.80", "1 espresso 2.40", "Total 8.20 EUR", "Thank you, come again!")


def draw_receipt() -> Image.Image:
    image = Image.new("RGB", (640, 420), "white")
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(LINES):
        draw.text((40, 30 + 75 * number), line, "black", ImageFont.load_default(36))
    return image


def tilt(image: Image.Image) -> Image.Image:
    """Rotate the image on a grey background."""
    return image.rotate(9, Image.Resampling.BICUBIC, expand=True, fillcolor="gray")


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        images = {sys.argv[1]: Path(sys.argv[1]).read_bytes()}
    else:
        images = {"as it is": png(draw_receipt()), "askew": png(tilt(draw_receipt()))}
    # Concurrent requests can share a batch.
    with Client(INFERENCE) as client, ThreadPoolExecutor() as threads:
        answers = threads.map(lambda image: client.request("ocr", image), images.values())
        for name, answer in zip(images, answers):
            print(f"{name}:")
            for line in answer.json():
                print(f"  {line['score']:.2f}  {line['text']:24}  from {line['box'][0]} to {line['box'][2]}")
