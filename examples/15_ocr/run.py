"""Draws a receipt and a photograph of it that was taken askew, sends both at once, and prints the lines that come back.

An image file of your own instead: run.py IMAGE
"""

import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from serve_app.client import Client

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
LINES = ("Corner Bakery", "2 croissants 5.80", "1 espresso 2.40", "Total 8.20 EUR", "Thank you, come again!")


def receipt() -> Image.Image:
    image = Image.new("RGB", (640, 420), "white")
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(LINES):
        draw.text((40, 30 + 75 * number), line, "black", ImageFont.load_default(36))
    return image


def askew(image: Image.Image) -> Image.Image:
    """Held at an angle, on a grey table."""
    return image.rotate(9, Image.Resampling.BICUBIC, expand=True, fillcolor="gray")


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        images = {sys.argv[1]: Path(sys.argv[1]).read_bytes()}
    else:
        images = {"as it is": png(receipt()), "askew": png(askew(receipt()))}
    with Client(INFERENCE) as client, ThreadPoolExecutor() as threads:  # at once, so that they meet in a batch
        for name, answer in zip(images, threads.map(lambda image: client.ask("ocr", image), images.values())):
            print(f"{name}:")
            for line in answer.json():
                print(f"  {line['score']:.2f}  {line['text']:24}  from {line['box'][0]} to {line['box'][2]}")
