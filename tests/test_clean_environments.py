"""Tests of the wheel in environments without packages for development: the core, [server], [server,onnx]."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import yaml
from onnx import TensorProto, helper

from serve_app.model_store.archiver import ArchiveRecipe, make
from tests.support.clean_environments import CleanEnvironment, build_wheel
from tests.support.explanation_checks import ENTITIES, label_config
from tests.support.hf_folders import SHORT, save_bert, save_llama
from tests.support.server import Server

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> CleanEnvironment:
    return CleanEnvironment(tmp_path_factory.mktemp("core"), wheel)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a sharded language model, a token classifier and an ONNX graph."""
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "llama")
    for name, config in (("whole", {}), ("halves", {"tensor_parallel": 2})):
        (folder / "model-config.yaml").write_text(yaml.safe_dump(config))
        recipe = ArchiveRecipe(name, "1.0", "causal_lm", extra_files=str(folder / "llama"))
        make_archive(folder, recipe, config_file=str(folder / "model-config.yaml"))
    (folder / "entities").mkdir()
    save_bert("BertForTokenClassification", folder / "entities", **label_config(ENTITIES))

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "double.onnx")
    make_archive(folder, ArchiveRecipe("double", "1.0", "onnx", str(folder / "double.onnx")))
    return folder


def make_archive(folder: Path, recipe: ArchiveRecipe, **options: str) -> None:
    make(ArchiveRecipe(**{**vars(recipe), "export_path": str(folder), **options}))


class InstalledServer(Server):
    """A server that the command of another environment starts."""

    environment: CleanEnvironment

    def start(self, timeout: float = 300.0) -> None:
        options = ("--env", str(self._env), "--detach", "--timeout", str(timeout))
        started = self.environment.run("torchrelay", "start", str(self._config), *options, cwd=self.home)
        assert started.returncode == 0, started.stdout + started.stderr


def run_server(home: Path, environment: CleanEnvironment, models: Path) -> Iterator[InstalledServer]:
    server = InstalledServer(home, control={"load_models": "none"})
    server.environment = environment
    shutil.copytree(models, server.store, dirs_exist_ok=True)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, wheel: Path, folder: Path
) -> Iterator[InstalledServer]:
    environment = CleanEnvironment(tmp_path_factory.mktemp("server"), wheel, "server")
    yield from run_server(tmp_path_factory.mktemp("home"), environment, folder)


@pytest.mark.slow
def test_the_core_has_no_torch_and_no_ray(core: CleanEnvironment, tmp_path: Path) -> None:
    assert {"httpx", "numpy", "orjson", "pydantic", "pyyaml", "typer", "rich"} <= core.packages
    assert not {"torch", "ray", "transformers", "onnxruntime", "grpcio"} & core.packages
    shown = core.run("python", "-c", "import torchrelay; print(torchrelay.__version__)", cwd=tmp_path)
    version = core.run("torchrelay", "version", cwd=tmp_path)
    assert version.stdout == f"Torchrelay {shown.stdout}"
    assert core.run("torchrelay", "--help", cwd=tmp_path).returncode == 0
    bench = core.run("torchrelay", "bench", "http://127.0.0.1:1/", "--engine", "asyncio", cwd=tmp_path)
    assert bench.stderr == (
        "The engine asyncio needs httptools, which is not installed: pip install 'torchrelay[load-test]'\n"
    )


@pytest.mark.parametrize("command", [["torchrelay", "start"], ["torchrelay", "stop"], ["torchserve"]])
@pytest.mark.nightly
def test_a_start_without_the_server_prints_the_pip_command(
    core: CleanEnvironment, tmp_path: Path, command: list[str]
) -> None:
    refused = core.run(*command, cwd=tmp_path)
    assert refused.returncode == 1
    message = " ".join((refused.stdout + refused.stderr).split())
    assert (
        "psutil, ray, torch, not installed in this environment: pip install 'torchrelay[server]'" in message
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_doctor_of_the_core_names_the_missing_extra(core: CleanEnvironment, tmp_path: Path) -> None:
    shown = core.run("torchrelay", "doctor", "--json", cwd=tmp_path)
    assert shown.returncode == 1, shown.stderr
    checks = {(check["section"], check["name"]): check for check in json.loads(shown.stdout)["checks"]}
    assert checks["extras", "server"]["state"] == "failed"
    assert checks["extras", "server"]["fix"] == "pip install 'torchrelay[server]'"
    assert checks["engines", "torch"]["state"] == "absent"
    assert "packages as in constraints.txt" in checks["system", "versions"]["found"]
    for name in ("app.yaml", "settings.yaml", "model-config.yaml"):
        assert Path(checks["configs", name]["found"]).is_file()


@pytest.mark.nightly
def test_a_handler_without_torch_raises_the_pip_command(core: CleanEnvironment, tmp_path: Path) -> None:
    refused = core.run("python", "-c", "from torchrelay import BaseHandler", cwd=tmp_path)
    assert refused.stderr.splitlines()[-1] == (
        "ImportError: torchrelay.BaseHandler needs torch, which is not installed: "
        "pip install 'torchrelay[server]'"
    )


@pytest.mark.nightly
def test_the_client_of_the_core_reaches_a_server(core: CleanEnvironment, installed: InstalledServer) -> None:
    code = f"""
import torchrelay
with torchrelay.Client({installed.process.inference!r}, {installed.process.management!r}) as client:
    print(client.register("entities", initial_workers=1, synchronous=True))
    print(client.predict_json("entities", {SHORT!r}))
    try:
        client.predict("nothing", b"")
    except torchrelay.NotFoundError as error:
        print(error.status)
"""
    shown = core.run("python", "-c", code, cwd=installed.home)
    assert shown.returncode == 0, shown.stderr
    registered, entities, status = shown.stdout.splitlines()
    assert "registered" in registered
    assert "entity_group" in entities
    assert status == "404"
    listed = core.run(
        "torchrelay", "models", "--management", installed.process.management, cwd=installed.home
    )
    assert "entities" in listed.stdout, listed.stderr


@pytest.mark.nightly
def test_a_port_in_use_is_changed_in_a_copy_of_the_installed_file(
    installed: InstalledServer, tmp_path: Path
) -> None:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 8080)):  # or by another server
        refused = installed.environment.run("torchrelay", "start", cwd=tmp_path)
        assert refused.returncode == 1
        assert "or change http_options.port in a copy of " in refused.stderr
        assert "/serve_app/cli/app.yaml, and start with it: `torchrelay start COPY`." in refused.stderr


@pytest.mark.nightly
def test_two_ranks_of_a_model_and_explanations_run_with_server_only(installed: InstalledServer) -> None:
    rows = []
    for name in ("whole", "halves"):
        registered = installed.management.post("/models", params={"url": f"{name}.mar", "initial_workers": 1})
        assert registered.status_code == 200, registered.text
        answer = installed.http.post(f"/predictions/{name}", json={"prompt": [5, 6, 7], "logits": True})
        assert answer.status_code == 200, answer.text
        rows.append(answer.json()["logits"])
    assert rows[1] == pytest.approx(rows[0], abs=1e-4)

    if not any(model["modelName"] == "entities" for model in installed.client.models()):
        installed.client.register("entities", initial_workers=1)
    explained = installed.http.post("/explanations/entities", content=SHORT.encode())
    assert explained.status_code == 200, explained.text
    assert "attributions" in json.dumps(explained.json())


@pytest.mark.nightly
def test_an_onnx_graph_is_refused_with_the_pip_command(installed: InstalledServer) -> None:
    refused = installed.management.post("/models", params={"url": "double.mar"})
    assert refused.status_code == 400, refused.text
    message = refused.json()["message"]
    assert "double.onnx needs onnxruntime, which is not installed" in message
    assert "pip install 'torchrelay[onnx]' (or 'torchrelay[gpu]' beside NVIDIA GPUs; never both)" in message


@pytest.mark.nightly
def test_an_onnx_graph_is_served_with_the_extra(
    tmp_path: Path, wheel: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment = CleanEnvironment(tmp_path_factory.mktemp("onnx"), wheel, "server", "onnx")
    assert not {"onnx", "captum-insights", "pytest"} & environment.packages
    for server in run_server(tmp_path, environment, folder):
        registered = server.management.post("/models", params={"url": "double.mar", "initial_workers": 1})
        assert registered.status_code == 200, registered.text
        answer = server.http.post("/predictions/double", json={"x": [1.0, 2.5]})
        assert (answer.status_code, answer.json()) == (200, [2.0, 5.0]), answer.text
