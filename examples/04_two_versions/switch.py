"""Registers two versions, asks both, and moves the default from one to the other and back."""

import json
import os
from pathlib import Path

import httpx

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
THREE = json.loads(Path(__file__).with_name("three.json").read_text())


def register(client: httpx.Client, url: str) -> None:
    answer = client.post(f"{MANAGEMENT}/models", params={"url": url, "initial_workers": 1})
    if answer.status_code != 409:  # 409: it is there already
        answer.raise_for_status()
    print(f"POST /models?url={url}: {answer.json().get('status', 'already registered')}")


def set_default(client: httpx.Client, version: str) -> None:
    answer = client.put(f"{MANAGEMENT}/models/reader/{version}/set-default").raise_for_status()
    print(f"PUT /models/reader/{version}/set-default: {answer.json()['status']}")


def ask(client: httpx.Client, path: str) -> None:
    answer = client.post(f"{INFERENCE}{path}", json=THREE).raise_for_status()
    print(f"POST {path}: {json.dumps(answer.json())}")


if __name__ == "__main__":
    with httpx.Client(timeout=120) as client:
        register(client, "reader-1.mar")
        register(client, "reader-2.mar")
        for default in ("1.0", "2.0", "1.0"):
            set_default(client, default)
            for path in ("/predictions/reader", "/predictions/reader/1.0", "/predictions/reader/2.0"):
                ask(client, path)
