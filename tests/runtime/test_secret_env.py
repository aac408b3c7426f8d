"""The environment of a replica, in a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import json, os, sys
from serve_app.runtime.secret_env import hide_secrets
from serve_app.settings import load
hide_secrets(load(json.loads(sys.argv[1])))
block = open("/proc/self/environ", "rb").read().split(b"\\0") if os.path.exists("/proc/self/environ") else []
shown = [entry.decode().partition("=")[0] for entry in block if entry]
print(json.dumps([sorted(os.environ), shown, os.popen("env").read()]))
"""
SECRET = dict.fromkeys(
    (
        "TORCHRELAY_TOKEN",
        "TORCHRELAY_INFERENCE_KEY",
        "TORCHRELAY_WEBHOOK_SECRET",
        "TORCHRELAY_DB_PASSWORD",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
        "AZURE_CLIENT_CERTIFICATE_PASSWORD",
        "FSSPEC_S3_SECRET",
        "HF_TOKEN",
        "MY_KEY",
        "MY_WEBHOOK",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        "PIP_EXTRA_INDEX_URL",
        "PIP_INDEX_URL",
        "POSTGRES_PASSWORD",
        "RAY_AUTH_TOKEN",
        "RAY_REDIS_PASSWORD",
    ),
    "s3cr3t",
)
SETTINGS = {
    "auth": {"keys": [{"name": "ops", "key": "env:MY_KEY", "role": "manage"}]},
    "async_predictions": {"webhook_secret": "env:MY_WEBHOOK"},
}


def hide(settings: dict[str, Any]) -> tuple[set[str], set[str], str]:
    """Return the variables in os.environ and in /proc, and the output of ``env`` in a child process."""
    env = {**os.environ, **SECRET, "TORCHRELAY_RUN": "an-id", "PLAIN": "x"}
    result = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(settings)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    names, shown, child = json.loads(result.stdout)
    assert {"TORCHRELAY_RUN", "PLAIN"} <= set(names)
    return set(names), set(shown), child


def test_secrets_leave_the_environment_and_proc() -> None:
    names, shown, child = hide(SETTINGS)
    assert not names & SECRET.keys()
    assert not shown & SECRET.keys()
    assert "s3cr3t" not in child
    assert not shown or {"TORCHRELAY_RUN", "PLAIN"} <= shown


def test_operator_keeps_and_hides_variables() -> None:
    runtime = {"handler_env_vars": ["HF_*"], "blacklist_env_vars": "PATH_TO_.*|LANG"}
    names, _, _ = hide({**SETTINGS, "runtime": runtime})
    assert names & SECRET.keys() == {"HF_TOKEN"}
    assert "LANG" not in names


@pytest.mark.parametrize("pattern", [".*", "TORCHRELAY_.*"])
def test_id_that_finds_the_servers_processes_stays(pattern: str) -> None:
    names, _, _ = hide_with_pattern(pattern)
    assert "TORCHRELAY_RUN" in names


def hide_with_pattern(pattern: str) -> tuple[set[str], set[str], str]:
    env = {**os.environ, "TORCHRELAY_RUN": "an-id"}
    settings = json.dumps({"runtime": {"blacklist_env_vars": pattern}})
    result = subprocess.run(
        [sys.executable, "-c", CODE, settings], env=env, capture_output=True, text=True, check=True
    )
    names, shown, child = json.loads(result.stdout)
    return set(names), set(shown), child
