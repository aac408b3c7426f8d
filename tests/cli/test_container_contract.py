"""`torchrelay doctor --container`: the platform that is recognised, and what is served there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli.app import app
from serve_app.cli.container_contract import ContainerContract, inspect, read_start

Inspect = Callable[..., ContainerContract]


@pytest.fixture
def found(tmp_path: Path) -> Inspect:
    """Return the contract of these files below /opt/ml/model and of these variables."""
    home = tmp_path / "home/model-server"
    for folder in (home / "model-store", tmp_path / "opt/ml", tmp_path / "srv/torchrelay"):
        folder.mkdir(parents=True)
    (home / "config.properties").write_text(f"model_store={home}/model-store\n")

    def run(*files: str, **variables: str) -> ContainerContract:
        for file in files:
            path = tmp_path / "opt/ml/model" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        return inspect(variables, tmp_path)

    return run


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["code/inference.py"], "code/inference.py"),
        (["MLmodel"], "a model of MLflow"),
        (["a.mar"], "archives"),
        (["config.json", "model.safetensors"], "a Hugging Face folder"),
        (["model.pt"], "files for the default functions"),
    ],
)
def test_the_model_of_sagemaker(found: Inspect, files: list[str], kind: str) -> None:
    secrets = {"SAGEMAKER_API_KEY": "secret", "SAGEMAKER_STORE_SAS": "secret"}
    contract = found(
        *files, SAGEMAKER_TS_BATCH_SIZE="8", SAGEMAKER_INDEX="https://me:secret@host/index", **secrets
    )
    assert contract.platform == f"Amazon SageMaker, {kind}"
    assert not contract.problem
    paths = contract.address, contract.health, contract.predictions
    assert paths == ("0.0.0.0:8080", "/ping", "/invocations")
    shown = {"SAGEMAKER_INDEX": "https://host/index", "SAGEMAKER_TS_BATCH_SIZE": "8"}
    assert contract.variables == shown, "no secrets are shown"


def test_many_models_of_sagemaker(found: Inspect) -> None:
    contract = found(SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_BIND_TO_PORT="9000")
    assert contract.platform == "Amazon SageMaker, many models"
    assert (contract.address, contract.predictions) == ("0.0.0.0:9000", "/models/{model}/invoke")


def test_a_repository_of_hugging_face_on_sagemaker(found: Inspect, tmp_path: Path) -> None:
    contract = found(SAGEMAKER_BIND_TO_PORT="9000", HF_MODEL_ID="a/b", HF_TASK="text-classification")
    assert contract.platform == "Amazon SageMaker, the repository hf://a/b"
    paths = contract.address, contract.predictions, contract.models
    assert paths == ("0.0.0.0:9000", "/invocations", "model=hf://a/b") and not contract.problem
    folder = str(tmp_path / "opt/ml/model")
    contract = found("config.json", "model.safetensors", HF_MODEL_ID=folder)
    assert contract.platform == "Amazon SageMaker, a Hugging Face folder"
    assert (contract.models, contract.predictions) == (f"model={folder}", "/invocations")
    assert found(HF_MODEL_ID="a/b", SAGEMAKER_BIND_TO_PORT="9000").models == f"model={folder}"


def test_vertex(found: Inspect) -> None:
    contract = found(
        AIP_HTTP_PORT="9090",
        AIP_HEALTH_ROUTE="/v1/d",
        AIP_PREDICT_ROUTE="/v1/d:predict",
        AIP_STORAGE_URI="gs://b/m",
    )
    assert (contract.platform, contract.models) == ("Vertex AI", "model=gs://b/m")
    assert (contract.health, contract.predictions) == ("/v1/d", "/v1/d:predict")


def test_kserve_and_torchserves_image(found: Inspect) -> None:
    contract = found(PROTOCOL_VERSION="v2")
    assert contract.platform == "KServe, protocol v2"
    assert (contract.health, contract.predictions) == ("/v2/health/ready", "/v2/models/{model}/infer")
    contract = found()
    assert contract.platform == "TorchServe's image"
    assert contract.predictions == "/predictions/{model}"


def test_a_model_of_sagemaker_does_not_count_on_another_platform(found: Inspect) -> None:
    contract = found("MLmodel", AIP_HTTP_PORT="9090", AIP_STORAGE_URI="")
    assert (contract.platform, contract.models) == ("Vertex AI", "all")


def test_the_folders_of_a_start(tmp_path: Path) -> None:
    """SageMaker's model needs no config.properties, and its server none of the working directory."""
    flags, env, folder = read_start({}, tmp_path)
    assert (flags.ts_config, env) == (f"{tmp_path}/home/model-server/config.properties", {})
    assert folder == Path.cwd()
    home = {"TORCHRELAY_HOME": "/h", "MODEL_SERVER_HOME": "/m"}
    assert read_start(home, tmp_path)[0].ts_config == "/m/config.properties"
    _, env, folder = read_start({**home, "SAGEMAKER_MULTI_MODEL": "true"}, tmp_path)
    assert (env["SAGEMAKER_BASE_DIR"], folder) == (f"{tmp_path}/opt/ml", Path("/h"))
    (tmp_path / "opt/ml/model").mkdir(parents=True)
    flags, env, _ = read_start(home, tmp_path)
    assert (flags.ts_config, env["SAGEMAKER_BASE_DIR"]) == (None, f"{tmp_path}/opt/ml")


def test_a_contradiction_is_the_problem(found: Inspect) -> None:
    assert "AIP_HTTP_PORT=x" in found(AIP_HTTP_PORT="x").problem


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIP_HTTP_PORT", "x")
    shown: Any = CliRunner().invoke(app, ["doctor", "--container", "--json"])
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["platform"] == "Vertex AI"
    assert "AIP_HTTP_PORT=x" in CliRunner().invoke(app, ["doctor", "--container"]).stdout
