"""The command `torchserve` in Amazon SageMaker's containers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.server_process import StartError
from serve_app.cli.torchserve_flags import TorchServeFlags, translate
from serve_app.settings import Settings, load

Start = Callable[..., tuple[tuple[str, int], Settings]]


@pytest.fixture
def settings_of(tmp_path: Path) -> Start:
    def start(text: str = "", **environment: str) -> tuple[tuple[str, int], Settings]:
        (tmp_path / "store").mkdir(exist_ok=True)
        (tmp_path / "config.properties").write_text(text)
        document: Any = translate(TorchServeFlags(model_store="store"), environment, tmp_path).document
        http = document["http_options"]
        return (http["host"], http["port"]), load(document["applications"][0]["args"])

    return start


def test_multi_model_mode_serves_all_apis_on_one_port(settings_of: Start) -> None:
    address, settings = settings_of(SAGEMAKER_MULTI_MODE="true", SAGEMAKER_BIND_TO_PORT="9001")
    assert address == ("0.0.0.0", 9001)
    assert settings.inference.serve_management and settings.control.enable_model_api
    assert settings.runtime.default_workers_per_model == 1
    assert settings.auth.mode == "off"
    assert settings_of(SAGEMAKER_MULTI_MODE="true")[0] == ("0.0.0.0", 8080)


def test_file_takes_precedence_for_optional_settings(settings_of: Start) -> None:
    text = "default_workers_per_model=3\ndisable_token_authorization=false\ninference_address=http://127.0.0.1:7000\n"
    address, settings = settings_of(text, SAGEMAKER_MULTI_MODE="true", SAGEMAKER_BIND_TO_PORT="9001")
    assert address == ("0.0.0.0", 9001)
    assert (settings.runtime.default_workers_per_model, settings.auth.mode) == (3, "on")


def test_single_model_mode_has_no_management_on_its_port(settings_of: Start) -> None:
    address, settings = settings_of(SAGEMAKER_BIND_TO_PORT="9001", SAGEMAKER_SAFE_PORT_RANGE="21000-21003")
    assert address == ("0.0.0.0", 9001)
    assert not settings.inference.serve_management and not settings.control.enable_model_api
    management, grpc = settings.management, settings.grpc
    assert (management.metrics_port, grpc.port, grpc.management_port, management.port) == (
        21000,
        21001,
        21002,
        21003,
    )
    assert management.host == management.metrics_host == "127.0.0.1"


@pytest.mark.parametrize("value", ["21000", "21000-21002", "0-9", "65530-65600", "b-a"])
def test_invalid_port_ranges_are_refused(settings_of: Start, value: str) -> None:
    with pytest.raises(StartError, match=f"SAGEMAKER_SAFE_PORT_RANGE={value}"):
        settings_of(SAGEMAKER_SAFE_PORT_RANGE=value)


@pytest.mark.parametrize("value", ["http", "0", "70000"])
def test_invalid_ports_are_refused(settings_of: Start, value: str) -> None:
    with pytest.raises(StartError, match=f"SAGEMAKER_BIND_TO_PORT={value}"):
        settings_of(SAGEMAKER_BIND_TO_PORT=value)


def test_outside_sagemaker_nothing_changes(settings_of: Start) -> None:
    assert settings_of(SAGEMAKER_MULTI_MODE="false") == settings_of()
