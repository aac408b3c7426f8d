"""The command `torchserve` in containers of Azure ML and of Hugging Face's Inference Endpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import container_contract
from serve_app.cli.container_contract import ContainerContract
from serve_app.cli.errors import StartError
from serve_app.cli.torchserve_flags import TorchServeFlags, translate
from serve_app.settings import Settings, load

Start = Callable[..., tuple[int, Settings]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return the port and the settings of the image's argument ``serve`` with these variables."""
    (tmp_path / "srv/torchrelay/model_store").mkdir(parents=True)

    def run(**environment: str) -> tuple[int, Settings]:
        flags, env, folder = container_contract.read_start(environment, tmp_path)
        document: Any = translate(flags, env, folder).document
        assert document["http_options"]["host"] == "0.0.0.0"
        return document["http_options"]["port"], load(document["applications"][0]["args"])

    return run


def write(folder: Path, *files: str) -> str:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return str(folder)


def check_common(settings: Settings) -> None:
    """Check that management stays in the container, without keys, and that its owner's code runs."""
    assert settings.auth.mode == "off" and settings.inference.ping == "ready"
    assert settings.management.host == settings.management.metrics_host == "127.0.0.1"
    assert settings.grpc.management_host == "127.0.0.1" and not settings.inference.serve_management
    assert settings.store.trusted == ("*",) and settings.runtime.handler_env_vars == ("*",)
    assert settings.runtime.install_py_dep_per_model


def test_a_script_of_azure_is_the_model(start: Start, tmp_path: Path) -> None:
    app = write(tmp_path / "app", "onlinescoring/score.py")
    port, settings = start(
        AML_APP_ROOT=app,
        AZUREML_ENTRY_SCRIPT="onlinescoring/score.py",
        AZUREML_MODEL_DIR="/var/azureml-app/azureml-models/m/1",
        WORKER_COUNT="3",
        SCORING_TIMEOUT_MS="90000",
        AZUREML_LOG_LEVEL="debug",
        AML_CORS_ORIGINS="https://a.example",
    )
    check_common(settings)
    assert port == 5001 and settings.inference.aliases == {"GET /": "/ping", "/score": "/invocations"}
    assert settings.control.load_models == f"model={app}/onlinescoring"
    assert settings.store.default_service_handler == "azureml" and not settings.runtime.decode_input_request
    runtime = settings.runtime
    assert (runtime.default_workers_per_model, runtime.default_response_timeout) == (3, 90)
    assert settings.telemetry.log_level == "DEBUG"
    assert settings.inference.cors_allowed_origin == "https://a.example"


@pytest.mark.parametrize("nested", ["", "folder/"])
def test_a_model_of_azure_without_a_script(start: Start, tmp_path: Path, nested: str) -> None:
    folder = write(tmp_path / "azureml-models/m/1", f"{nested}MLmodel")
    port, settings = start(AZUREML_MODEL_DIR=folder)
    check_common(settings)
    assert (port, settings.control.load_models) == (8080, f"model={folder}/{nested}".rstrip("/"))
    assert settings.store.default_service_handler == "" and settings.runtime.decode_input_request
    write(tmp_path / "other", "a.mar")
    assert start(AZUREML_MODEL_DIR=str(tmp_path / "other"))[1].control.load_models == "all"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AZUREML_ENTRY_SCRIPT": "none.py"}, "AZUREML_ENTRY_SCRIPT=none.py: there is no file"),
        ({"AZUREML_MODEL_DIR": "/none"}, "AZUREML_MODEL_DIR=/none: there is no such folder"),
        ({"AZUREML_MODEL_DIR": "/empty"}, "AZUREML_MODEL_DIR=.*/empty: .* has no files"),
        ({"HF_MODEL_DIR": "/empty"}, "HF_MODEL_DIR=.*/empty: .* has no files"),
        ({"AZUREML_MODEL_DIR": "/m", "WORKER_COUNT": "many"}, "WORKER_COUNT=many"),
        ({"AZUREML_MODEL_DIR": "/m", "AZUREML_LOG_LEVEL": "loud"}, "AZUREML_LOG_LEVEL=LOUD: it is one of"),
    ],
)
def test_invalid_variables_are_refused(
    start: Start, tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "m", "model.pt")
    places = {"/m": f"{tmp_path}/m", "/empty": f"{tmp_path}/empty"}
    variables = {name: places.get(value, value) for name, value in variables.items()}
    with pytest.raises(StartError, match=message):
        start(**variables)


def test_another_command_has_models_of_its_own(tmp_path: Path) -> None:
    """Microsoft's example of TorchServe has a command, and a model's folder in AZUREML_MODEL_DIR."""
    flags = TorchServeFlags(model_store=str(tmp_path), models=("a.mar",))
    outside = translate(flags, {}, tmp_path).document
    environment = {"AZUREML_MODEL_DIR": "/m", "HF_MODEL_ID": "a/b"}
    assert translate(flags, environment, tmp_path).document == outside


def test_a_custom_handler_of_hugging_face(start: Start, tmp_path: Path) -> None:
    folder = write(tmp_path / "repository", "handler.py", "config.json", "model.safetensors")
    port, settings = start(HF_MODEL_DIR=folder, HF_TASK="text-classification")
    check_common(settings)
    assert (port, settings.control.load_models) == (8080, f"model={folder}")
    assert (settings.store.default_service_handler, settings.store.default_task) == (
        "hf_endpoint",
        "text-classification",
    )
    routes = {"GET /": "/ping", "/health": "/ping", "POST /": "/invocations", "/predict": "/invocations"}
    assert settings.inference.aliases == routes


def test_a_repository_runs_its_own_code_where_the_variable_allows_it(start: Start, tmp_path: Path) -> None:
    assert start(HF_MODEL_ID="a/b")[1].store.trusted == ()
    assert start(HF_MODEL_ID="a/b", HF_TRUST_REMOTE_CODE="True")[1].store.trusted == ("*",)
    folder = write(tmp_path / "repository", "config.json", "model.safetensors")
    assert start(HF_MODEL_DIR=folder, HF_TRUST_REMOTE_CODE="0")[1].store.trusted == ()
    _, environment, _ = container_contract.read_start({"HF_MODEL_ID": "a/b", "HF_HUB_TOKEN": "t"}, tmp_path)
    assert environment["HF_TOKEN"] == "t"


def test_a_repository_of_hugging_face_is_fetched(start: Start) -> None:
    assert start(HF_MODEL_ID="a/b", HF_REVISION="main")[1].control.load_models == "model=hf://a/b@main"
    assert start(HF_MODEL_ID="a/b")[1].control.load_models == "model=hf://a/b"
    assert start(HF_MODEL_ID="s3://b/m")[1].control.load_models == "model=s3://b/m"


def test_a_custom_handler_may_have_another_file(start: Start, tmp_path: Path) -> None:
    folder = write(tmp_path / "repository", "pipeline.py", "config.json", "model.safetensors")
    assert start(HF_MODEL_DIR=folder)[1].store.trusted == ()
    assert start(HF_MODEL_DIR=folder, HF_DEFAULT_PIPELINE_NAME="pipeline.py")[1].store.trusted == ("*",)
    for name in ("/a/handler.py", "handler", "*.py", "../a.py"):
        with pytest.raises(StartError, match=r"HF_DEFAULT_PIPELINE_NAME=.*such as handler.py"):
            start(HF_MODEL_DIR=folder, HF_DEFAULT_PIPELINE_NAME=name)


def test_the_variable_of_a_repository_may_have_a_folder(start: Start, tmp_path: Path) -> None:
    folder = write(tmp_path / "repository", "config.json", "model.safetensors")
    assert start(HF_MODEL_ID=folder)[1].control.load_models == f"model={folder}"
    with pytest.raises(StartError, match="HF_MODEL_ID=/nowhere: there is no such folder"):
        start(HF_MODEL_ID="/nowhere")


def test_the_contract_is_shown(tmp_path: Path) -> None:
    (tmp_path / "srv/torchrelay").mkdir(parents=True)

    def inspect(**variables: str) -> ContainerContract:
        contract = container_contract.inspect(variables, tmp_path)
        assert not contract.problem
        return contract

    app = write(tmp_path / "app", "score.py")
    azure = inspect(AML_APP_ROOT=app, AZUREML_ENTRY_SCRIPT="score.py", AML_APP_INSIGHTS_KEY="secret")
    assert azure.platform == "Azure Machine Learning, score.py"
    assert (azure.address, azure.health, azure.predictions) == ("0.0.0.0:5001", "/", "/score")
    assert set(azure.variables) == {"AML_APP_ROOT", "AZUREML_ENTRY_SCRIPT"}, "no secrets are shown"
    folder = write(tmp_path / "model", "config.json", "model.safetensors")
    hub = inspect(HF_MODEL_DIR=folder)
    assert hub.platform == "Hugging Face Inference Endpoints, a Hugging Face folder"
    assert (hub.health, hub.predictions) == ("/health", "/")
    write(tmp_path / "model", "handler.py")
    assert inspect(HF_MODEL_DIR=folder).platform == "Hugging Face Inference Endpoints, handler.py"
    (tmp_path / "srv/torchrelay/model_store").mkdir()
    assert inspect(HF_MODEL_ID="a/b").platform == "Hugging Face Inference Endpoints, the repository a/b"
