"""The command `torchserve` in Vertex AI's containers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.server_process import StartError
from serve_app.cli.torchserve_flags import TorchServeFlags, translate
from serve_app.settings import Settings, load

Start = Callable[..., tuple[tuple[str, int], Settings]]
ENDPOINT = "/v1/endpoints/7/deployedModels/9"
VARIABLES = {
    "AIP_HTTP_PORT": "9090",
    "AIP_HEALTH_ROUTE": ENDPOINT,
    "AIP_PREDICT_ROUTE": f"{ENDPOINT}:predict",
    "AIP_STORAGE_URI": "gs://caip-tenant/model",
}


@pytest.fixture
def settings_of(tmp_path: Path) -> Start:
    def start(text: str = "", **environment: str) -> tuple[tuple[str, int], Settings]:
        (tmp_path / "store").mkdir(exist_ok=True)
        (tmp_path / "config.properties").write_text(text)
        document: Any = translate(TorchServeFlags(model_store="store"), environment, tmp_path).document
        http = document["http_options"]
        return (http["host"], http["port"]), load(document["applications"][0]["args"])

    return start


def test_port_routes_and_model_are_those_of_the_platform(settings_of: Start) -> None:
    address, settings = settings_of(**VARIABLES)
    assert address == ("0.0.0.0", 9090)
    assert settings.inference.aliases == {ENDPOINT: "/ping", f"{ENDPOINT}:predict": "/invocations"}
    assert settings.inference.ping == "ready" and settings.auth.mode == "off"
    assert settings.control.load_models == "model=gs://caip-tenant/model"
    assert settings.runtime.service_envelope == "vertex"
    assert settings.management.host == settings.management.metrics_host == "127.0.0.1"


def test_management_stays_in_the_container_whatever_the_file_has(settings_of: Start) -> None:
    """The image's own file has all addresses, and the platform's clients send no key."""
    text = "grpc_management_address=0.0.0.0\nmanagement_address=http://0.0.0.0:8081\n"
    _, settings = settings_of(text, **VARIABLES)
    assert settings.auth.mode == "off"
    assert settings.management.host == settings.grpc.management_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "port", "ports"),
    [
        ("", "9090", (8081, 8082)),
        ("", "8081", (8083, 8082)),
        (
            "management_address=http://0.0.0.0:9001\nmetrics_address=http://0.0.0.0:9002/\n",
            "9090",
            (9001, 9002),
        ),
        ("management_address=http://0.0.0.0:9090\n", "9090", (8081, 8082)),
        ("management_address=unix:/a.sock\n", "9090", (8081, 8082)),
    ],
)
def test_ports_within_the_container_differ_from_the_platforms(
    settings_of: Start, text: str, port: str, ports: tuple[int, int]
) -> None:
    _, settings = settings_of(text, AIP_HTTP_PORT=port)
    assert (settings.management.port, settings.management.metrics_port) == ports
    assert settings.management.host == settings.management.metrics_host == "127.0.0.1"


def test_requests_over_grpc_and_large_ones_are_accepted(settings_of: Start) -> None:
    settings = settings_of(**VARIABLES)[1]
    assert (settings.grpc.host, settings.grpc.port) == ("0.0.0.0", 7070)
    assert settings.inference.max_request_size == 64 << 20
    settings = settings_of("grpc_inference_address=127.0.0.1\n", **VARIABLES)[1]
    assert settings.grpc.host == "127.0.0.1"


def test_a_repository_of_hugging_face_may_take_the_place_of_artifacts(settings_of: Start) -> None:
    """Hugging Face's own images for Vertex AI have these variables."""
    variables = {**VARIABLES, "AIP_STORAGE_URI": "", "HF_MODEL_ID": "a/b", "HF_TASK": "text-classification"}
    settings = settings_of(**variables, HF_REVISION="c")[1]
    assert settings.control.load_models == "model=hf://a/b@c"
    assert (settings.store.default_task, settings.store.trusted) == ("text-classification", ())
    assert settings_of(**variables, HF_TRUST_REMOTE_CODE="1")[1].store.trusted == ("*",)
    settings = settings_of(**{**variables, "AIP_STORAGE_URI": "gs://b/m"})[1]
    assert (settings.control.load_models, settings.store.trusted) == ("model=gs://b/m", ("*",))


def test_a_model_without_artifacts_is_in_the_image(settings_of: Start) -> None:
    assert settings_of(**{**VARIABLES, "AIP_STORAGE_URI": ""})[1].control.load_models == "all"


def test_the_file_takes_precedence_for_optional_settings(settings_of: Start) -> None:
    text = "service_envelope=body\nload_models=a.mar\ninference_address=http://127.0.0.1:7000\n"
    address, settings = settings_of(text, **VARIABLES)
    assert address == ("0.0.0.0", 9090)
    assert (settings.runtime.service_envelope, settings.control.load_models) == ("body", "a.mar")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("AIP_HTTP_PORT", "http"), ("AIP_HTTP_PORT", "0"), ("AIP_PREDICT_ROUTE", "predict")],
)
def test_invalid_variables_are_refused(settings_of: Start, variable: str, value: str) -> None:
    with pytest.raises(StartError, match=f"{variable}={value}"):
        settings_of(**{**VARIABLES, variable: value})


def test_outside_vertex_nothing_changes(settings_of: Start) -> None:
    assert settings_of(AIP_STORAGE_URI="gs://caip-tenant/model") == settings_of()
