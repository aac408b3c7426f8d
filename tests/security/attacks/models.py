"""Attacks by requests to models: on the generation loop that clients share, and on a replica's memory."""

from __future__ import annotations

import io
import json
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from PIL import Image

from tests.security.attack import Outcome, Target, attack
from tests.support.hf_folders import save_byte_llama

MIB = 1 << 20
STREAMING_S = 8.0
ENGINE = {"engine": {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 64}}
NET = b"""
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, kernel_size=4, stride=4)

    def forward(self, x):
        return self.conv(x).mean(dim=(2, 3))
"""


@contextmanager
def served(target: Target, name: str, handler: str, files: Mapping[str, bytes]) -> Iterator[None]:
    """Register a model of a built-in handler with one replica, and unregister it afterwards."""
    model = {"modelName": name, "modelVersion": "1.0", "handler": handler, "configFile": "model-config.yaml"}
    if "model.py" in files:
        model["modelFile"] = "model.py"
    contents = {
        "MAR-INF/MANIFEST.json": json.dumps({"model": model}).encode(),
        "model-config.yaml": yaml.safe_dump(ENGINE if handler == "llm" else {}).encode(),
        **files,
    }
    with zipfile.ZipFile(target.home / "model_store" / f"{name}.mar", "w") as archive:
        for file, content in contents.items():
            archive.writestr(file, content)
    params = {"url": f"{name}.mar", "initial_workers": "1", "synchronous": "true"}
    target.manage("POST", "/models", params=params).raise_for_status()
    try:
        yield
    finally:
        target.manage("DELETE", f"/models/{name}")


@attack(
    "models", "temperature 1e-40 while other clients stream", before="each request ended all streams (503)"
)
def tiny_temperature(target: Target) -> Outcome:
    url = f"{target.inference}/v1/completions"
    body: dict[str, Any] = {"model": "poet", "prompt": "Once", "max_tokens": 200, "temperature": 1}
    streams: Counter[str] = Counter()
    attacks: Counter[int] = Counter()
    end = threading.Event()

    def attack_loop() -> None:
        tiny = {**body, "max_tokens": 1, "temperature": 1e-40}
        while not end.is_set():
            attacks[httpx.post(url, json=tiny, headers=target.headers(), timeout=30).status_code] += 1

    def stream() -> str:
        with httpx.stream(
            "POST", url, json={**body, "stream": True}, headers=target.headers("beta"), timeout=60
        ) as response:
            return "complete" if response.read().endswith(b"data: [DONE]\n\n") else "failed"

    with tempfile.TemporaryDirectory() as folder:
        save_byte_llama(Path(folder))
        files = {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}
    with served(target, "poet", "llm", files):
        attacker = threading.Thread(target=attack_loop)
        attacker.start()
        try:
            deadline = time.monotonic() + STREAMING_S
            while time.monotonic() < deadline:
                streams[stream()] += 1
        finally:
            end.set()
            attacker.join()
    return Outcome(
        f"{attacks.total()} attacks: {dict(attacks)}; streams of another client: {dict(streams)}",
        set(attacks) <= {200, 400} and set(streams) == {"complete"},
    )


def replica_memory(target: Target, name: str, field: str) -> int:
    """Return a field in bytes, such as VmHWM, of /proc/PID/status, summed over the replicas of a model."""
    total = 0
    for process in target.processes():
        try:
            if name in " ".join(process.cmdline()):
                status = Path(f"/proc/{process.pid}/status").read_text()
                total += int(status.split(f"{field}:")[1].split()[0]) << 10
        except (psutil.Error, OSError, IndexError):
            continue
    return total


@attack(
    "models",
    "resize bombs: PNGs of 1 x 20,000 to 10,000 x 9,000 pixels",
    before="1 x 10,000, 99 bytes: + 2.8 GB; 1 x 100,000: the replica is killed",
)
def resize_bomb(target: Target) -> Outcome:
    bombs = []
    for size in ((1, 20_000), (20_000, 1), (1, 100_000), (10_000, 9000)):
        buffer = io.BytesIO()
        Image.new("1", size).save(buffer, "PNG")
        bombs.append(buffer.getvalue())
    buffer = io.BytesIO()
    Image.new("RGB", (400, 300)).save(buffer, "PNG")
    with served(target, "classifier", "image_classifier", {"model.py": NET}):
        ordinary = target.infer("classifier", content=buffer.getvalue()).status_code
        before = replica_memory(target, "classifier", "VmHWM")
        with ThreadPoolExecutor(8) as pool:
            statuses = Counter(
                pool.map(lambda bomb: target.infer("classifier", content=bomb).status_code, bombs * 4)
            )
        grown = replica_memory(target, "classifier", "VmHWM") - before
        afterwards = target.infer("classifier", content=buffer.getvalue()).status_code
    memory = f"peak memory of the replica {before // MIB} MB, + {grown // MIB} MB"
    return Outcome(
        f"{dict(statuses)}; {memory}; an image afterwards: {afterwards}",
        set(statuses) == {400} and before > 0 and grown < 100 * MIB and ordinary == afterwards == 200,
    )
