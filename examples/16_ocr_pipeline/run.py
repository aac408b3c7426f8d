"""Registers the three models and the workflow, asks it to read a receipt, and says where the time went.

An image file of your own instead: run.py IMAGE
"""

import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

from serve_app.client import Client, Conflict

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
DRAWN = runpy.run_path(str(Path(__file__).resolve().parent.parent / "15_ocr/run.py"))


def register(client: Client) -> None:
    for name in ("ocr_detector", "ocr_direction", "ocr_reader"):
        with suppress(Conflict):  # it is there already
            client.register(f"{name}.mar", initial_workers=1)
    with suppress(Conflict):
        print(client.register_workflow("receipts.war"))


if __name__ == "__main__":
    drawn = DRAWN["png"](DRAWN["askew"](DRAWN["receipt"]()).rotate(180))
    with Client(INFERENCE, MANAGEMENT) as client:
        register(client)
        answer = client.ask("receipts", Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else drawn)
    for line in answer.json():
        print(f"  {line['score']:.2f}  {line['text']}")
    for step in answer.headers["server-timing"].split(", "):
        name, _, milliseconds = step.partition(";dur=")
        print(f"{name:>8} {float(milliseconds):7.1f} ms")
