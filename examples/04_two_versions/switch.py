"""Register two versions, send requests to both, and switch the default version back and forth."""

import json
import os
from pathlib import Path

from torchrelay import Client, ConflictError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
THREE = json.loads(Path(__file__).with_name("three.json").read_text())


def register(client: Client, url: str) -> None:
    try:
        status = client.register(url, initial_workers=1)
    except ConflictError:
        status = "already registered"
    print(f"POST /models?url={url}: {status}")


def set_default(client: Client, version: str) -> None:
    print(f"PUT /models/reader/{version}/set-default: {client.set_default('reader', version)}")


def predict(client: Client, version: str | None = None) -> None:
    answer = client.predict_json("reader", THREE, version)
    print(f"POST /predictions/reader{f'/{version}' if version else ''}: {json.dumps(answer)}")


if __name__ == "__main__":
    with Client(INFERENCE, MANAGEMENT) as client:
        register(client, "reader-1.mar")
        register(client, "reader-2.mar")
        for default in ("1.0", "2.0", "1.0"):
            set_default(client, default)
            for version in (None, "1.0", "2.0"):
                predict(client, version)
