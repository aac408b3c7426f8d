"""What is said at start-up where configs/serve.env was not read."""

from __future__ import annotations

from pathlib import Path

from serve_app.cli.process import read_env
from serve_app.deployments.serve_env import complaint

ENV = read_env(Path(__file__).parents[2] / "configs/serve.env")
NAMES = (
    "RAY_SERVE_ENABLE_HA_PROXY",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
)


def test_the_file_itself_gives_no_reason_to_complain() -> None:
    assert complaint(ENV) == ""


def test_each_variable_that_is_missing_is_named_with_the_file() -> None:
    assert [name for name in (*NAMES, "configs/serve.env") if name not in complaint({})] == []
    for name in NAMES:
        said = complaint({key: value for key, value in ENV.items() if key != name})
        assert [other for other in NAMES if other in said] == [name]
    assert "RAY_SERVE_ENABLE_HA_PROXY" in complaint({**ENV, "RAY_SERVE_ENABLE_HA_PROXY": "0"})
