"""MLflow's deployment plugin: ``mlflow deployments ... -t torchrelay``, and ``get_deploy_client``.

A deployment is a model, whose versions are archives of the directories that MLflow's URIs name.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow.artifacts import download_artifacts
from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2

from serve_app.cli.api_client import INFERENCE, MANAGEMENT, key_file, next_major_version, sibling_address
from serve_app.client import AuthenticationError, Client, NotFoundError, ServerError, TransportError
from serve_app.domain import traffic_policy
from serve_app.model_store.archive import MLFLOW, is_mlflow_model
from serve_app.model_store.archiver import ArchiveRecipe, ArchiverError, make
from serve_app.protocols.torchserve.parameters import AUTOSCALING_PARAMETERS

_FLAVOR = "python_function"
_STORE = "model_store"
_BODY_KEYS = ("dataframe_split", "dataframe_records", "instances", "inputs")
_CODES = {
    400: "INVALID_PARAMETER_VALUE",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    409: "RESOURCE_ALREADY_EXISTS",
    503: "TEMPORARILY_UNAVAILABLE",
}
_HELP = f"""\
Torchrelay: models of a running server.

The target is `torchrelay`, or `torchrelay:http://HOST:8081` with the address of the management API.
Without an address it is that of TORCHRELAY_MANAGEMENT, or {MANAGEMENT}.
TORCHRELAY_INFERENCE has the address of predictions, TORCHRELAY_TOKEN a key.

Configuration (-C NAME=VALUE):
  {_STORE}     a folder that the server reads, where archives are written; TORCHRELAY_MODEL_STORE, or
                  ./model_store
  version         the version, by default 1.0, and the next whole number of an update
  any parameter of POST /models (create, update with a model), such as initial_workers=2, batch_size=8
  any parameter of PUT /models/NAME (update without a model), such as min_worker=2
"""


def target_help() -> str:
    return _HELP


def run_local(name: str, model_uri: str, flavor: str | None = None, config: Any = None) -> None:
    """Serve a model in a server of its own, until it is interrupted. Raises MlflowException."""
    folder = _fetch(model_uri, flavor)
    command = [sys.executable, "-m", "serve_app.cli", "serve", folder, "--trusted", "--name", name]
    raise SystemExit(subprocess.run(command, check=False).returncode)


class TorchrelayDeploymentClient(BaseDeploymentClient):
    """A client of a server's models, as MLflow's deployments."""

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)
        own = target_uri.partition(":")[2].strip("/")
        self._management = own or os.environ.get("TORCHRELAY_MANAGEMENT", MANAGEMENT)
        inference = sibling_address(own, "inference") if own else INFERENCE
        self._inference = os.environ.get("TORCHRELAY_INFERENCE", inference)

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: Mapping[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Register a model and wait for its replicas."""
        _refuse_endpoint(endpoint)
        with self._connect() as client:
            if _find_versions(client, name):
                raise _error(f"There is a deployment {name}: update it, or delete it first.", 409)
            version = self._register(client, name, model_uri, flavor, "1.0", config or {})
        return {"name": name, "flavor": _FLAVOR, "version": version}

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: Mapping[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, Any]:
        """Replace the default version by a new one, without a lost request; without a URI, scale it."""
        _refuse_endpoint(endpoint)
        with self._connect() as client:
            versions = _find_versions(client, name)
            if not versions:
                raise _error(f"There is no deployment {name}: create it.", 404)
            if model_uri is None:
                client.scale(name, **{**(config or {}), "synchronous": True})
            else:
                old = versions[0]  # the default one
                _check_unused(client, name, old["modelVersion"])
                options = {"initial_workers": old["minWorkers"], **(config or {})}
                number = next_major_version(str(each["modelVersion"]) for each in versions)
                version = self._register(client, name, model_uri, flavor, number, options)
                if "initial_workers" not in (config or {}):
                    _copy_bounds(client, old, version)
                client.set_default(name, version)
                client.unregister(name, old["modelVersion"])
        return {"name": name, "flavor": _FLAVOR}

    def delete_deployment(
        self, name: str, config: Mapping[str, Any] | None = None, endpoint: str | None = None
    ) -> None:
        """Remove all versions of a model; one that is not there is no error.

        The traffic policy is reset first. An experiment or a rollout refuses that, and nothing is removed.
        """
        _refuse_endpoint(endpoint)
        with self._connect() as client:
            names = [str(version["modelVersion"]) for version in reversed(_find_versions(client, name))]
            done = []
            if len(names) > 1:
                client.reset_traffic(name)
                done.append("reset the traffic policy")
            for version in names:
                try:
                    client.unregister(name, version)
                except ServerError as error:
                    message = f"{error} Done before: {', '.join(done) or 'nothing'}."
                    raise _error(message, error.status) from error
                done.append(f"removed version {version}")

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        _refuse_endpoint(endpoint)
        with self._connect() as client:
            return [{"name": model["modelName"], "url": model["modelUrl"]} for model in client.models()]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        _refuse_endpoint(endpoint)
        with self._connect() as client:
            versions = _find_versions(client, name)
        if not versions:
            raise _error(f"There is no deployment {name}.", 404)
        return {"name": name, "version": versions[0]["modelVersion"], "versions": versions}

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> PredictionsResponse:
        """Return the predictions for a data frame, an array, or a body of MLflow's scoring protocol."""
        _refuse_endpoint(endpoint)
        if not deployment_name:
            raise _error("A prediction needs the name of a deployment.", 400)
        with self._connect() as client:
            answer = client.predict(deployment_name, _to_body(inputs), "application/json")
        return PredictionsResponse.from_json(answer)

    @contextlib.contextmanager
    def _connect(self) -> Iterator[Client]:
        """Yield the client of the server, whose errors are raised as MLflow's."""
        token, keys = os.environ.get("TORCHRELAY_TOKEN", ""), key_file(self._management)
        try:
            with Client(self._inference, self._management, token=token, key_file=keys) as client:
                yield client
        except AuthenticationError as error:
            raise _error(f"{error}. Set a key with TORCHRELAY_TOKEN.", 403) from error
        except ServerError as error:
            raise _error(str(error), error.status) from error
        except TransportError as error:
            raise _error(f"No server responds at {self._management}: {error}", 503) from error

    def _register(
        self,
        client: Client,
        name: str,
        model_uri: str,
        flavor: str | None,
        version: str,
        config: Mapping[str, Any],
    ) -> str:
        """Register the model as a version, which is returned."""
        options = dict(config)
        store = Path(options.pop(_STORE, None) or os.environ.get("TORCHRELAY_MODEL_STORE", _STORE))
        version = str(options.pop("version", version))
        if not store.is_dir():
            raise _error(f"{store}: no such model store: name the server's by -C {_STORE}=FOLDER", 400)
        folder = _fetch(model_uri, flavor)
        requirements = Path(folder, "requirements.txt")
        with tempfile.TemporaryDirectory(prefix=".mlflow-", dir=store) as temporary:
            recipe = ArchiveRecipe(
                name,
                version,
                MLFLOW,
                extra_files=folder,
                export_path=temporary,
                requirements_file=str(requirements) if requirements.is_file() else None,
            )
            try:
                archive = make(recipe).path
            except ArchiverError as error:
                raise _error(str(error), 400) from error
            url = archive.relative_to(store).as_posix()  # of which the server keeps a copy
            client.register(url, **{"initial_workers": 1, **options, "model_name": name, "synchronous": True})
        return version


def _fetch(model_uri: str, flavor: str | None) -> str:
    """Return the local folder of a model. Raises MlflowException."""
    if flavor not in (None, _FLAVOR):
        raise _error(f"The flavor is {flavor}: every model is served as {_FLAVOR}.", 400)
    folder = download_artifacts(artifact_uri=model_uri)
    if not is_mlflow_model(Path(folder)):
        raise _error(f"{model_uri}: there is no file MLmodel in it, so it is no model of MLflow.", 400)
    return folder


def _find_versions(client: Client, name: str) -> list[dict[str, Any]]:
    """Return the versions of a model, the default one first; none where there is no such model."""
    try:
        return client.describe(name, "all")
    except NotFoundError:
        return []


def _check_unused(client: Client, name: str, version: str) -> None:
    """Raise MlflowException where a policy, an experiment or a rollout keeps a version from being removed."""
    document = client.traffic(name)
    active = document["active"]
    if version in traffic_policy.read(document).referenced_versions:
        raise _error(
            f"The traffic policy of {name} names version {version}, which an update removes. "
            f"Reset it with `torchrelay traffic {name} --default`, and update again.",
            409,
        )
    if active["by"] == "rollout" or (active["by"] == "experiment" and version in active["versions"]):
        raise _error(
            f"The {active['by']} {active['id']} of {name} needs version {version}, which an update removes. "
            "Update when it has ended.",
            409,
        )


def _copy_bounds(client: Client, old: dict[str, Any], version: str) -> None:
    """Scale a version as an autoscaled old one, which may have no replica until a request wakes it."""
    scaling = old.get("autoscaling")
    if scaling is None:
        return
    parameters = {name: scaling[key] for name, key in AUTOSCALING_PARAMETERS.items() if key in scaling}
    bounds = {"min_worker": old["minWorkers"], "max_worker": old["maxWorkers"]}
    client.scale(old["modelName"], version, **bounds, **parameters, synchronous=True)


def _to_body(inputs: Any) -> str:
    """Return a body of MLflow's scoring protocol."""
    if hasattr(inputs, "to_dict"):  # a data frame
        inputs = {"dataframe_split": inputs.to_dict(orient="split")}
    elif not isinstance(inputs, Mapping) or not any(key in inputs for key in _BODY_KEYS):
        inputs = {"inputs": inputs}
    return json.dumps(inputs, default=_to_plain)


def _to_plain(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise _error(f"inputs have a {type(value).__name__}, which has no JSON", 400)


def _refuse_endpoint(endpoint: str | None) -> None:
    if endpoint is not None:
        raise _error("There are no endpoints: name the deployment alone.", 400)


def _error(message: str, status: int) -> MlflowException:
    code = _CODES.get(status, "INTERNAL_ERROR")
    return MlflowException(message, error_code=getattr(databricks_pb2, code))
