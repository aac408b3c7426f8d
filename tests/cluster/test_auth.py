"""Keys in force: by every way in alike, at once, and until they expire; APIs that share the inference
port.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.archives import ECHO, make_archive
from tests.support.ports import free_port
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.own_server, pytest.mark.slow]

OWN = {
    "ops": "manage",
    "watcher": "observe",
    "team": "infer",
    "root": "manage",
}  # the keys are called after their names
WAYS = ("/predictions/", "/%70redictions/")  # the replica's own route; what HAProxy brings to the gateway
EXPIRATION = 15.0  # seconds


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server that requires keys, with management API and metrics on the inference port as well."""
    keys: list[dict[str, Any]] = [
        {"name": name, "key": f"sha256:{sha256(name.encode()).hexdigest()}", "role": role}
        for name, role in OWN.items()
    ]
    keys[0]["models"] = "ech*"
    keys[2]["models"] = ["echo", "none"]
    management = free_port()
    home = tmp_path_factory.mktemp("locked")
    locked = Server(
        home,
        auth={"mode": "on", "token_expiration": EXPIRATION / 60, "keys": keys},
        inference={"serve_management": True, "serve_metrics": True},
        management={"port": management, "metrics_port": management},
    )
    make_archive(locked.store, "echo", ECHO)
    make_archive(locked.store, "other", ECHO)
    try:
        locked.start()
        assert "Requests need a key" in locked.process.log.read_text()
        scaled = locked.management.put(
            "/models/echo", params={"min_worker": 2, "synchronous": "true"}, headers=bearer("ops")
        )
        assert scaled.status_code == 200, scaled.text
        yield locked
    finally:
        locked.close()


@pytest.fixture
def tokens(locked: Server) -> dict[str, str]:
    """TorchServe's keys by kind, just renewed."""
    for kind in ("inference", "management"):
        renew(locked, kind)
    return read(locked)


def read(locked: Server) -> dict[str, str]:
    result = json.loads((locked.home / "key_file.json").read_text())
    return {kind: token["key"] for kind, token in result.items()}


def renew(locked: Server, kind: str) -> httpx.Response:
    answer = locked.management.get("/token", params={"type": kind}, headers=bearer(read(locked)["API"]))
    assert (answer.status_code, answer.content) == (200, b"\n"), answer.text
    return answer


def infer(locked: Server, key: str | None, model: str = "echo") -> list[tuple[int, str]]:
    """Return the answer of every protocol: status, and the body or the reason of a refusal."""
    result = []
    for way in WAYS:
        answer = locked.http.post(way + model, content=b"hi", headers=bearer(key) if key else {})
        if answer.status_code >= 400:
            expected = "TooManyRequestsException" if answer.status_code == 429 else "InvalidKeyException"
            assert answer.json()["type"] == expected, answer.text
        result.append((answer.status_code, answer.headers.get("x-torchrelay-reason") or answer.text))
    return result


def test_the_file_is_for_its_owner_alone(locked: Server) -> None:
    assert stat.S_IMODE((locked.home / "key_file.json").stat().st_mode) == 0o600


def test_every_way_in_decides_alike(locked: Server, tokens: dict[str, str]) -> None:
    served, both = (200, "hi"), len(WAYS)
    assert infer(locked, tokens["inference"]) == [served] * both
    assert infer(locked, "team") == infer(locked, "ops") == [served] * both
    assert infer(locked, None) == [(400, "missing_token")] * both
    assert infer(locked, "guess") == [(400, "invalid_token")] * both
    for key in (tokens["management"], tokens["API"], "watcher"):
        assert infer(locked, key) == [(400, "missing_permission")] * both
    assert infer(locked, "ops", "other") == [(400, "model_not_allowed")] * both


def test_health_needs_no_key(locked: Server) -> None:
    for path in ("/ping", "/health/live", "/health/ready", "/api-description"):
        assert locked.http.get(path).status_code == 200, path
    assert locked.http.options("/").status_code == 200


def test_management_on_both_ports(locked: Server, tokens: dict[str, str]) -> None:
    for port in (locked.management, locked.http):
        assert port.get("/models").headers["x-torchrelay-reason"] == "missing_token"
        assert (
            port.get("/models", headers=bearer(tokens["inference"])).headers["x-torchrelay-reason"]
            == "missing_permission"
        )
        for key in (tokens["management"], "watcher"):
            models = port.get("/models", headers=bearer(key)).json()["models"]
            assert [model["modelName"] for model in models] == ["echo", "other"]
        assert [
            model["modelName"] for model in port.get("/models", headers=bearer("ops")).json()["models"]
        ] == ["echo"]
        assert port.get("/models/none", headers=bearer("watcher")).status_code == 404
        refused = port.put("/models/echo", params={"min_worker": 2}, headers=bearer("watcher"))
        assert refused.headers["x-torchrelay-reason"] == "missing_permission"
        assert "torchrelay_requests_total{" in port.get("/metrics").text
        assert "event: ready" in port.get("/models/echo/events", headers=bearer("watcher")).text
        assert port.get("/models/echo/events").status_code == 400
        assert port.get("/nothing").status_code == 400


def test_a_registration_beyond_the_key_s_models_leaves_nothing(locked: Server, tmp_path: Path) -> None:
    make_archive(locked.store, "stranger", ECHO)
    for port in (locked.management, locked.http):
        refused = port.post("/models", params={"url": "stranger-1.0.mar"}, headers=bearer("ops"))
        assert (refused.status_code, refused.headers["x-torchrelay-reason"]) == (400, "model_not_allowed")
        assert port.get("/models/stranger", headers=bearer("watcher")).status_code == 404
    make_archive(locked.store, "echoes", ECHO)
    taken = locked.http.post("/models", params={"url": "echoes-1.0.mar"}, headers=bearer("ops"))
    assert taken.status_code == 200, taken.text
    assert locked.http.delete("/models/echoes", headers=bearer("ops")).status_code == 200


def test_a_key_of_the_api_is_limited_and_revoked_everywhere(locked: Server) -> None:
    document = {"name": "guest", "limits": {"requests_per_second": 5}}
    refused = locked.management.post("/keys", json=document, headers=bearer("ops"))
    assert refused.headers["x-torchrelay-reason"] == "model_not_allowed"
    created = locked.management.post("/keys", json=document, headers=bearer("root"))
    assert created.status_code == 200, created.text
    key = created.json()["key"]
    answers = [answer for _ in range(30) for answer in infer(locked, key)]
    admitted = answers.count((200, "hi"))
    assert 2 <= admitted < 60 and answers.count((429, "rate_limited")) == 60 - admitted
    metrics = locked.http.get("/metrics").text
    assert 'torchrelay_key_refused_total{key="guest",limit="requests_per_second"}' in metrics
    rotated = locked.management.post("/keys/guest/rotate", json={"grace": 60}, headers=bearer("root"))
    revoked = locked.management.delete("/keys/guest", headers=bearer("root"))
    assert (rotated.status_code, revoked.status_code) == (200, 200)
    for old in (key, rotated.json()["key"]):
        assert infer(locked, old) == [(400, "invalid_token")] * len(WAYS)


def test_a_new_key_is_in_force_at_once_everywhere(locked: Server, tokens: dict[str, str]) -> None:
    for _ in range(3):
        old = read(locked)["inference"]
        renew(locked, "inference")
        new = read(locked)["inference"]
        for _ in range(4):  # more often than there are replicas
            assert infer(locked, old) == [(400, "invalid_token")] * len(WAYS)
            assert infer(locked, new) == [(200, "hi")] * len(WAYS)
    assert read(locked)["management"] == tokens["management"]


def test_only_the_api_key_makes_keys(locked: Server, tokens: dict[str, str]) -> None:
    for key in (tokens["management"], tokens["inference"], "ops", "guess"):
        refused = locked.management.get("/token", params={"type": "inference"}, headers=bearer(key))
        assert (refused.status_code, refused.json()["type"]) == (400, "InvalidKeyException")
        assert "Token Authentication failed" in refused.json()["message"]
    assert read(locked) == tokens


def test_no_key_is_shown_anywhere(locked: Server, tokens: dict[str, str]) -> None:
    infer(locked, tokens["inference"])
    shown = locked.http.get("/metrics").text
    shown += locked.http.get("/models/echo/all", headers=bearer("watcher")).text
    logs = [path for path in locked.home.rglob("*.log") if path.is_file()]
    assert logs
    shown += "".join(path.read_text(errors="replace") for path in logs)
    for key in tokens.values():
        assert key not in shown
        assert sha256(key.encode()).hexdigest() not in shown


def test_keys_outlive_a_crash_of_management(locked: Server, tokens: dict[str, str]) -> None:
    [management] = locked.actors("Management")
    os.kill(management.pid, signal.SIGKILL)
    # What was served goes on being served, and refused, meanwhile.
    assert infer(locked, "guess") == [(400, "invalid_token")] * len(WAYS)
    assert infer(locked, tokens["inference"]) == [(200, "hi")] * len(WAYS)
    listed = locked.http.get("/models", headers=bearer("watcher"))
    assert listed.status_code in (200, 503), (
        listed.text
    )  # the gateway asks Management, which may be back by then
    locked.wait(
        lambda: locked.actors("Management") not in ([], [management]), description="another Management"
    )
    locked.wait(
        lambda: locked.management.get("/models", headers=bearer("watcher")).status_code == 200,
        description="its port",
    )
    assert read(locked) == tokens
    renew(locked, "inference")
    assert infer(locked, read(locked)["inference"]) == [(200, "hi")] * len(WAYS)


@pytest.mark.nightly
def test_a_key_expires(locked: Server, tokens: dict[str, str]) -> None:
    made = time.time()
    locked.wait(lambda: infer(locked, tokens["inference"])[0][0] == 400, description="its end")
    assert time.time() - made > EXPIRATION / 2
    assert infer(locked, tokens["inference"]) == [(400, "expired_token")] * len(WAYS)
    # Those of the configuration do not, and the API key makes new ones.
    assert infer(locked, "team") == [(200, "hi")] * len(WAYS)
    renew(locked, "inference")
    assert infer(locked, read(locked)["inference"]) == [(200, "hi")] * len(WAYS)
