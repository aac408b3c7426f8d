"""MLflow's command `mlflow deployments` with the target torchrelay, against a real control plane."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from mlflow.deployments import cli, get_deploy_client, interface
from mlflow.exceptions import MlflowException
from mlflow.models import infer_signature

from serve_app.client import Client
from serve_app.domain.access import ROLES, AccessTable, KeyGrant
from tests.support.archives import ECHO, make_archive
from tests.support.control_server import ControlServer, serve_control
from tests.support.handler_server import serve_handler
from tests.support.ports import free_port

MODEL = """
import mlflow

class Double(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        return (model_input["a"] * 2).tolist()

mlflow.models.set_model(Double())
"""
Run = Callable[..., str]
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.integration]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("mlflow")
    (place / "double.py").write_text(MODEL)
    mlflow.pyfunc.save_model(
        place / "model",
        python_model=str(place / "double.py"),
        signature=infer_signature(pd.DataFrame({"a": [1.0]}), [1.0]),
        pip_requirements=["pandas"],
    )
    return str(place / "model")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlServer]:
    with serve_control(tmp_path, enable_model_api=True) as server:
        monkeypatch.setenv("TORCHRELAY_MANAGEMENT", server.url)
        monkeypatch.setenv("TORCHRELAY_MODEL_STORE", str(server.store))
        yield server


@pytest.fixture
def run() -> Run:
    """Return ``run(*words)``, which returns the output of `mlflow deployments` for this target."""
    interface.plugin_store.register("torchrelay", "serve_app.cli.mlflow_deployments")

    def call(*words: str, fails: bool = False) -> str:
        result = CliRunner().invoke(cli.commands, [*words, "-t", "torchrelay"])
        assert (result.exception is not None) == fails, result.output
        return str(result.exception) if fails else result.output

    return call


def test_a_deployment_is_created_updated_and_deleted(run: Run, server: ControlServer, model: str) -> None:
    created = run("create", "--name", "double", "-m", model, "-C", "initial_workers=2")
    assert "python_function deployment double is created" in created
    assert "'name': 'double'" in run("list")
    assert "version: 1.0" in run("get", "--name", "double")
    assert "There is a deployment double" in run("create", "--name", "double", "-m", model, fails=True)

    assert "double is updated (with flavor python_function)" in run(
        "update", "--name", "double", "-m", f"file://{model}"
    )
    [version] = get_deploy_client("torchrelay").get_deployment("double")["versions"]
    assert (version["modelVersion"], version["minWorkers"]) == ("2.0", 2)
    run("update", "--name", "double", "-C", "min_worker=1", "-C", "max_worker=1")
    [version] = get_deploy_client("torchrelay").get_deployment("double")["versions"]
    assert (version["modelVersion"], version["minWorkers"]) == ("2.0", 1)
    assert not list(server.store.iterdir()), "the server has a copy of its own"

    limits = ("-C", "min_worker=0", "-C", "max_worker=3", "-C", "target_ongoing_requests=7")
    run("update", "--name", "double", *limits)
    run("update", "--name", "double", "-m", model)
    [version] = get_deploy_client("torchrelay").get_deployment("double")["versions"]
    assert (version["modelVersion"], version["minWorkers"], version["maxWorkers"]) == ("3.0", 0, 3)
    assert version["autoscaling"]["target_ongoing_requests"] == 7

    assert "double is deleted" in run("delete", "--name", "double")
    assert "double is deleted" in run("delete", "--name", "double")
    assert "double" not in run("list")


def test_a_traffic_policy_keeps_no_deployment_from_its_removal(
    run: Run, server: ControlServer, model: str
) -> None:
    run("create", "--name", "double", "-m", model)
    with Client(server.url, server.url) as client:
        make_archive(server.store, "double", ECHO, "2.0")
        client.register("double-2.0.mar", initial_workers=1, synchronous=True)
        client.set_traffic("double", {"versions": {"1.0": 5000, "2.0": 5000}})
        refused = run("update", "--name", "double", "-m", model, fails=True)
        assert "The traffic policy of double names version 1.0, which an update removes." in refused
        client.reset_traffic("double")
        arms = {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}}
        document = {"name": "try", "arms": arms, "baseline": "a", "metrics": [{"name": "latency"}]}
        experiment = client.start_experiment("double", document)
        for command in (("update", "-m", model), ("delete",)):
            refused = run(*command, "--name", "double", fails=True)
            assert "experiment" in refused and len(client.describe("double", "all")) == 2
        client.stop_experiment(experiment["id"])
        client.set_traffic("double", {"versions": {"1.0": 5000, "2.0": 5000}})
        assert "double is deleted" in run("delete", "--name", "double")
        assert client.models() == []


def test_what_cannot_be_done_is_an_error_of_mlflow(
    run: Run, server: ControlServer, model: str, tmp_path: Path
) -> None:
    assert "There is no deployment none" in run("get", "--name", "none", fails=True)
    assert "There is no deployment none" in run("update", "--name", "none", "-m", model, fails=True)
    create = ("create", "--name", "a")
    assert "no such model store" in run(*create, "-m", model, "-C", "model_store=/none", fails=True)
    assert "every model is served as python_function" in run(*create, "-m", model, "-f", "onnx", fails=True)
    (tmp_path / "empty").mkdir()
    assert "no file MLmodel" in run(*create, "-m", str(tmp_path / "empty"), fails=True)
    assert "There are no endpoints" in run("list", "--endpoint", "e", fails=True)
    assert "cannot be part of a route" in run(*create, "-m", model, "-C", "version=a b", fails=True)
    assert "'name'" not in run("list"), "nothing was registered"
    assert "TORCHRELAY_MANAGEMENT" in run("help")


def test_no_server_and_no_key_are_errors_of_mlflow(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(MlflowException, match=f"No server responds at {address}"):
        get_deploy_client(f"torchrelay:{address}").list_deployments()
    table = AccessTable((KeyGrant(ROLES["manage"], name="ops"),))
    with (
        serve_control(tmp_path, table) as server,
        pytest.raises(MlflowException, match="Set a key with TORCHRELAY_TOKEN"),
    ):
        get_deploy_client(f"torchrelay:{server.url}").list_deployments()


@pytest.mark.parametrize("inputs", ["frame", "array", "body", "columns"])
def test_predictions(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: str
) -> None:
    values: dict[str, Any] = {
        "frame": pd.DataFrame({"a": [1.0, 2.0]}),
        "array": {"a": np.array([1.0, 2.0])},
        "body": {"dataframe_split": {"columns": ["a"], "data": [[1.0], [2.0]]}},
        "columns": {"a": [1.0, 2.0]},
    }
    with serve_handler("double", "mlflow", Path(model)) as url:
        monkeypatch.setenv("TORCHRELAY_INFERENCE", url)
        client = get_deploy_client("torchrelay")
        answer = client.predict("double", values[inputs])
        assert answer.get_predictions("ndarray").tolist() == [2.0, 4.0]
        (tmp_path / "input.json").write_text(json.dumps({"a": [3.0]}))
        shown = run("predict", "--name", "double", "-I", str(tmp_path / "input.json"))
        assert json.loads(shown) == {"predictions": [6.0]}
        with pytest.raises(MlflowException, match="a"):
            client.predict("double", {"b": [1.0]})
        with pytest.raises(MlflowException, match="Model not found"):
            client.predict("none", {"a": [1.0]})


def test_the_package_has_the_entry_point() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [module] = re.findall(r'\[project.entry-points."mlflow.deployments"\]\ntorchrelay = "([\w.]+)"\n', text)
    plugin = importlib.import_module(module)
    assert "torchrelay:http://HOST:8081" in plugin.target_help()
