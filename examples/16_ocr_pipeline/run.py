"""Register the three models and the workflow, read a receipt with it, and print the time of each step.

Usage with an image file: run.py IMAGE
"""

import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

from torchrelay import Client, ConflictError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
OCR_RUN = runpy.run_path(str(Path(__file__).resolve().parent.parent / "15_ocr/run.py"))


def register(client: Client) -> None:
    for name in ("ocr_detector", "ocr_direction", "ocr_reader"):
        with suppress(ConflictError):  # it is registered already
            client.register(f"{name}.mar", initial_workers=1)
    with suppress(ConflictError):
        print(client.register_workflow("receipts.war"))


if __name__ == "__main__":
    receipt = OCR_RUN["png"](OCR_RUN["tilt"](OCR_RUN["draw_receipt"]()).rotate(180))
    with Client(INFERENCE, MANAGEMENT) as client:
        register(client)
        image = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else receipt
        answer = client.request("receipts", image)
    for line in answer.json():
        print(f"  {line['score']:.2f}  {line['text']}")
    for step in answer.headers["server-timing"].split(", "):
        name, _, milliseconds = step.partition(";dur=")
        print(f"{name:>8} {float(milliseconds):7.1f} ms")
