"""Helpers of tests of TorchServe's REST management API."""

from __future__ import annotations

import json

from serve_app.domain.model import ModelSpec, ReplicaInfo

WORKER = ReplicaInfo("9000", 98972, 1538487893.034, True, 89247744)
PROGRESS = (202, "Processing worker updates...")
PARTIAL = (206, "Workers scaling in progress...")


def make_spec(name: str = "noop", version: str = "1.11", **more) -> ModelSpec:
    return ModelSpec(name, version, f"{name}.mar", "sha256", "archive", **more)


def parse_status(response) -> tuple[int, str]:
    """Return the status and the sentence; the body is exactly TorchServe's."""
    sentence = json.loads(response.body)["status"]
    assert response.body == b'{\n  "status": %s\n}\n' % json.dumps(sentence).encode()
    assert response["content-type"] == "application/json"
    return response.status, sentence


def parse_error(response) -> tuple[int, str, str]:
    body = json.loads(response.body)
    assert body["code"] == response.status
    return response.status, body["type"], body["message"]
