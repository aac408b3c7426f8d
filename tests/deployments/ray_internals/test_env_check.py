"""The warning at start-up without configs/serve.env, and the effect of its limits."""

from __future__ import annotations

from pathlib import Path

import yaml

from serve_app.cli.server_process import read_env
from serve_app.deployments.ray_internals.env_check import missing_settings_warning
from serve_app.settings import Settings

CONFIGS = Path(__file__).parents[3] / "configs"
ENV = read_env(CONFIGS / "serve.env")
NAMES = (
    "RAY_SERVE_ENABLE_HA_PROXY",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH",
)


def test_the_file_itself_gives_no_reason_to_complain() -> None:
    assert missing_settings_warning(ENV) == ""


def test_each_variable_that_is_missing_is_named_with_the_file() -> None:
    assert [name for name in (*NAMES, "configs/serve.env") if name not in missing_settings_warning({})] == []
    for name in NAMES:
        result = missing_settings_warning({key: value for key, value in ENV.items() if key != name})
        assert [other for other in NAMES if other in result] == [name]
    assert "RAY_SERVE_ENABLE_HA_PROXY" in missing_settings_warning({**ENV, "RAY_SERVE_ENABLE_HA_PROXY": "0"})


def test_an_old_haproxy_lives_until_its_last_client_has_been_answered() -> None:
    kept = yaml.safe_load((CONFIGS / "app.yaml").read_text())["http_options"]["keep_alive_timeout_s"]
    runtime = Settings().runtime
    # A connection may lie idle until just before its end, then ask; its call waits for a replica, and then
    # runs.
    longest = kept + runtime.default_startup_timeout + runtime.default_response_timeout
    assert int(ENV["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= 5 * longest
    assert float(ENV["RAY_SERVE_PORT_QUARANTINE_S"]) >= 2 * kept, (
        "it may still be asked for by a client that it has"
    )


def test_a_busy_machine_does_not_cost_haproxy_its_life() -> None:
    """Ray kills HAProxy when the process beside it is silent three times in a row."""
    assert float(ENV.get("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", 10)) >= 10
