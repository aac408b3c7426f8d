"""The Open Inference Protocol: one echo by this protocol and by TorchServe's, and a MiB as raw bytes and
as JSON.
"""

from __future__ import annotations

import json
import random
import struct
from functools import partial
from typing import Any

import httpx

from serve_app.load_test import LoadRequest, send
from tests.benchmarks.archives import MODELS
from tests.benchmarks.servers import PeerFailed
from tests.benchmarks.targets import Contender

LENGTH = "Inference-Header-Content-Length"
NUMBERS = 1 << 18  # FP32 numbers of a MiB


def echo(name: str, address: str, model: str) -> Contender:
    """Return a contender that sends the body of the model ``echo`` as a raw tensor of one text."""
    text = MODELS["echo"].body
    raw = struct.pack("<I", len(text)) + text
    tensor = {"name": "data", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
    return _contender(
        name, address, model, {"inputs": [tensor], "parameters": {"binary_data_output": True}}, raw
    )


def mebibyte(name: str, address: str, model: str, binary: bool) -> Contender:
    """Return a contender that sends a MiB of numbers, raw or as JSON, to a model that returns them."""
    draw = random.Random(0)
    raw = struct.pack(f"<{NUMBERS}f", *(draw.gauss(0, 1) for _ in range(NUMBERS)))
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, NUMBERS]}
    if binary:
        tensor["parameters"] = {"binary_data_size": len(raw)}
        return _contender(
            name, address, model, {"inputs": [tensor], "parameters": {"binary_data_output": True}}, raw
        )
    # The fewest digits that tell singles apart; clients write twice as many.
    tensor["data"] = [float(f"{number:.9g}") for number in struct.unpack(f"<{NUMBERS}f", raw)]
    return _contender(name, address, model, {"inputs": [tensor]}, b"")


def _contender(name: str, address: str, model: str, result: dict[str, Any], raw: bytes) -> Contender:
    """One that has just answered rightly: with the tensor that it was sent. Raises PeerFailed."""
    head = json.dumps(result, separators=(",", ":")).encode()
    url = f"{address}/v2/models/{model}/infer"
    headers = {LENGTH: str(len(head))} if raw else {}
    kind = "application/octet-stream" if raw else "application/json"
    answer = httpx.post(url, content=head + raw, headers={**headers, "content-type": kind}, timeout=30)
    if answer.status_code != 200:
        raise PeerFailed(f"{url} gave no answer: {answer.status_code} {answer.text[:200]}")
    size = int(answer.headers.get(LENGTH, len(answer.content)))
    [output] = json.loads(answer.content[:size])["outputs"]
    sent, back = result["inputs"][0].get("data"), output.get("data")
    if answer.content[size:] != raw or (sent and _singles(sent)) != (back and _singles(back)):
        raise PeerFailed(f"{url} gave a wrong answer")
    return Contender(
        name, partial(send, LoadRequest(url, body=head + raw, content_type=kind, headers=headers))
    )


def _singles(numbers: list[float]) -> bytes:
    """FP32 numbers, however many digits they were written with."""
    return struct.pack(f"<{len(numbers)}f", *numbers)
