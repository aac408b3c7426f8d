"""The command `torchserve` in Amazon SageMaker's containers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.process import StartError
from serve_app.cli.translation import Flags, translate
from serve_app.settings import Settings, load

Start = Callable[..., tuple[tuple[str, int], Settings]]


@pytest.fixture
def starts(tmp_path: Path) -> Start:
    def start(text: str = "", **environment: str) -> tuple[tuple[str, int], Settings]:
        (tmp_path / "store").mkdir(exist_ok=True)
        (tmp_path / "config.properties").write_text(text)
        document: Any = translate(Flags(model_store="store"), environment, tmp_path).document
        http = document["http_options"]
        return (http["host"], http["port"]), load(document["applications"][0]["args"])

    return start


def test_one_port_has_it_all_for_many_models(starts: Start) -> None:
    address, settings = starts(SAGEMAKER_MULTI_MODE="true", SAGEMAKER_BIND_TO_PORT="9001")
    assert address == ("0.0.0.0", 9001)
    assert settings.inference.also_management and settings.control.enable_model_api
    assert settings.runtime.default_workers_per_model == 1
    assert settings.auth.mode == "off"
    assert starts(SAGEMAKER_MULTI_MODE="true")[0] == ("0.0.0.0", 8080)


def test_the_file_goes_before_where_sagemaker_does_not_care(starts: Start) -> None:
    text = "default_workers_per_model=3\ndisable_token_authorization=false\ninference_address=http://127.0.0.1:7000\n"
    address, settings = starts(text, SAGEMAKER_MULTI_MODE="true", SAGEMAKER_BIND_TO_PORT="9001")
    assert address == ("0.0.0.0", 9001)
    assert (settings.runtime.default_workers_per_model, settings.auth.mode) == (3, "on")


def test_a_single_model_has_its_port_and_no_management_there(starts: Start) -> None:
    address, settings = starts(SAGEMAKER_BIND_TO_PORT="9001", SAGEMAKER_SAFE_PORT_RANGE="21000-21003")
    assert address == ("0.0.0.0", 9001)
    assert not settings.inference.also_management and not settings.control.enable_model_api
    here, grpc = settings.management, settings.grpc
    assert (here.metrics_port, grpc.port, grpc.management_port, here.port) == (21000, 21001, 21002, 21003)
    assert here.host == here.metrics_host == "127.0.0.1"


@pytest.mark.parametrize("said", ["21000", "21000-21002", "0-9", "65530-65600", "b-a"])
def test_a_range_that_is_none_stops_the_start(starts: Start, said: str) -> None:
    with pytest.raises(StartError, match=f"SAGEMAKER_SAFE_PORT_RANGE={said}"):
        starts(SAGEMAKER_SAFE_PORT_RANGE=said)


@pytest.mark.parametrize("said", ["http", "0", "70000"])
def test_a_port_that_is_none_stops_the_start(starts: Start, said: str) -> None:
    with pytest.raises(StartError, match=f"SAGEMAKER_BIND_TO_PORT={said}"):
        starts(SAGEMAKER_BIND_TO_PORT=said)


def test_elsewhere_nothing_changes(starts: Start) -> None:
    assert starts(SAGEMAKER_MULTI_MODE="false") == starts()
