"""Send a drawing to the server, and draw the detected boxes on it."""

import argparse
import io
import json
import os
from pathlib import Path

from drawings import draw
from PIL import Image, ImageDraw
from torchrelay import Client

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
COLORS = {"figure": "#b3261e", "house": "#1a56a8", "sun": "#e08a00"}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image", type=Path, nargs="?", help="a drawing; a generated one unless it is given")
parser.add_argument("--output", type=Path, default=Path("detected.png"))
options = parser.parse_args()
image = Image.open(options.image).convert("RGB") if options.image else draw(5009)[0]
body = io.BytesIO()
image.save(body, "PNG")
with Client(INFERENCE) as client:
    found = json.loads(client.predict("drawings", body.getvalue(), content_type="image/png"))
shown = image.resize((3 * image.width, 3 * image.height))
pen = ImageDraw.Draw(shown)
for detection in found:
    score = detection.pop("score")
    [(label, box)] = detection.items()
    print(f"{label:7} {score:.2f} at {[round(x) for x in box]}")
    pen.rectangle([3 * x for x in box], outline=COLORS[label], width=3)
    pen.text((3 * box[0] + 5, 3 * box[1] + 3), f"{label} {score:.2f}", fill=COLORS[label], font_size=15)
shown.save(options.output)
print(f"drawn: {options.output}")
