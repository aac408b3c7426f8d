"""The commands of docs/guides/coming-from.md, with what users of the other servers have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
import yaml
from onnx import TensorProto, helper

from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.own_server, pytest.mark.slow]

GUIDE = (ROOT / "docs/guides/coming-from.md").read_text()
APPLICATION = """
from ray import serve
from starlette.requests import Request

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Mine:
    async def __call__(self, request: Request):
        return {"next": (await request.json())["number"] + 1}

app = Mine.bind()
"""
SCRIPT = """
import json

def model_fn(model_dir):
    return 2

def input_fn(data, content_type):
    return json.loads(data)

def predict_fn(data, model):
    return [model * number for number in data]

def output_fn(prediction, accept):
    return json.dumps(prediction), "application/json"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with a further application of Ray Serve, as the guide adds it."""
    home = tmp_path_factory.mktemp("home")
    (home / "my_module.py").write_text(APPLICATION)
    server = Server(home)
    document = yaml.safe_load(server.process.config.read_text())
    (added,) = re.findall(r"```yaml\napplications:\n(.*?)```", GUIDE, re.DOTALL)
    document["applications"] += yaml.safe_load(added)
    server.process.config.write_text(yaml.safe_dump(document))
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("PYTHONPATH", f"{home}:{os.environ.get('PYTHONPATH', '')}")
        server.start()
    yield server
    server.close()


@pytest.fixture
def run(server: Server) -> Callable[[str], None]:
    """Return a function that runs the block of commands of a section of the guide."""

    def run(section: str) -> None:
        (block,) = re.findall(rf"^## {section}\n.*?^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[:1]
        subprocess.run(
            ["bash", "-euc", block],
            cwd=server.home,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "TORCHRELAY_MANAGEMENT": server.process.management,
            },
            check=True,
        )

    return run


def test_a_folder_of_sagemaker(server: Server, run: Callable[[str], None]) -> None:
    (server.home / "model/code").mkdir(parents=True)
    (server.home / "model/code/inference.py").write_text(SCRIPT)
    run("SageMaker")
    assert server.http.post("/predictions/model", json=[1, 2]).json() == [2, 4]


def test_a_graph_of_triton(server: Server, run: Callable[[str], None]) -> None:
    folder = server.home / "models/m/1"
    folder.mkdir(parents=True)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    run("Triton")
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    response = server.http.post("/v2/models/m/infer", json={"inputs": [tensor]})
    assert response.json()["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]}
    ]


def test_an_application_of_ray_serve_beside_it(server: Server) -> None:
    server.wait(lambda: server.http.post("/mine", json={"number": 1}).json() == {"next": 2})
