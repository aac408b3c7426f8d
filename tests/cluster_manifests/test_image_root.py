"""The target cpu, built and started in a Debian of debootstrap: its packages, its rights and its handlers."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import yaml
from onnx import TensorProto, helper
from packaging.utils import canonicalize_name
from PIL import Image

from cluster import lock
from serve_app.model_store.archiver import ArchiveRecipe, make
from tests.support.explanation_checks import ENTITIES, label_config
from tests.support.hf_folders import SHORT, save_bert, save_byte_llama
from tests.support.image_root import Container, ImageBuilder, Stage, make_debian, missing_tools

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(missing_tools()), reason=missing_tools())]

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, kernel_size=4, stride=4)

    def forward(self, x):
        return self.conv(x).mean(dim=(2, 3))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the CPU build of torch, and an index of it in ``index``."""
    folder = tmp_path_factory.mktemp("wheels")
    [pin] = re.findall(r"^torch==\S+", (lock.LOCKS / "cpu.lock").read_text(), re.MULTILINE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "0", "--dest", str(folder)),
            *("--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"),
            *("--extra-index-url", TORCH_INDEX, pin),
        ],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"needs a download of {pin}: {done.stderr[-200:]}")
    [wheel] = folder.glob("torch-*.whl")
    page = folder / "index/torch/index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{wheel.name}">{wheel.name}</a>')
    return folder


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Iterator[ImageBuilder]:
    folder = tmp_path_factory.mktemp("image")
    arguments = {"TORCH_INDEX": "file:///mnt/wheels/index"}
    yield ImageBuilder(folder, make_debian(folder / "debian"), arguments, wheels)
    shutil.rmtree(folder)  # 2.7 GB, which pytest would keep


@pytest.fixture(scope="module")
def stage(builder: ImageBuilder) -> Stage:
    return builder.build("cpu")


def save_archives(folder: Path, store: Path) -> None:
    """Write an archive of each family of handlers."""
    (folder / "net.py").write_text(NET)
    torch.save({"conv.weight": torch.ones(4, 3, 4, 4), "conv.bias": torch.arange(4.0)}, folder / "net.pt")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "double.onnx")
    (folder / "bert").mkdir()
    save_bert("BertForTokenClassification", folder / "bert", **label_config(ENTITIES))
    save_byte_llama(folder / "llama")
    compiled = write_config(
        folder / "compiled.yaml", pt2={"compile": {"enable": True}}, startupTimeout=600
    )  # a busy machine compiles for minutes
    engine = write_config(folder / "engine.yaml", engine={"num_blocks": 32, "page_size": 16})
    recipes = [
        ("colors", "image_classifier", {"model_file": "net.py", "serialized_file": "net.pt"}, compiled),
        ("double", "onnx", {"serialized_file": "double.onnx"}, None),
        ("entities", "huggingface", {"extra_files": "bert"}, None),
        ("poet", "llm", {"extra_files": "llama"}, engine),
    ]
    for name, handler, files, config in recipes:
        paths = {option: str(folder / file) for option, file in files.items()}
        recipe = ArchiveRecipe(name, "1.0", handler, **paths, export_path=str(store), config_file=config)
        make(recipe)


def write_config(path: Path, **config: Any) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.fixture(scope="module")
def container(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    folder = tmp_path_factory.mktemp("container")
    store = folder / "volume/model_store"
    store.mkdir(parents=True)
    save_archives(tmp_path_factory.mktemp("models"), store)
    running = Container(stage, folder / "root", folder / "volume", folder / "output.log")
    try:
        healthy = stage.command("HEALTHCHECK")
        deadline = time.monotonic() + 600  # until every model is loaded
        while running.exec(*healthy).returncode != 0:
            assert running.running and time.monotonic() < deadline, running.logs()
            time.sleep(0.5)
        yield running
    finally:
        running.close()


def predict(container: Container, path: str, body: Any) -> Any:
    """Return the response of a path of the inference port, which is requested inside of the container."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    code = f"""
import json, sys, httpx
key = json.load(open("/srv/torchrelay/key_file.json"))["inference"]["key"]
headers = {{"Authorization": f"Bearer {{key}}", "Content-Type": {kind!r}}}
url = "http://127.0.0.1:8080{path}"
response = httpx.post(url, content=sys.stdin.buffer.read(), headers=headers, timeout=110)
print(json.dumps([response.status_code, response.json()]))
"""
    done = container.exec("python", "-c", code, stdin=data)
    assert done.returncode == 0, done.stderr.decode() + container.logs()
    status, answer = json.loads(done.stdout)
    assert status == 200, answer
    return answer


def locked(target: str) -> dict[str, str]:
    text = "".join((lock.LOCKS / f"{place}.lock").read_text() for place in lock.IMAGES[target])
    return {
        canonicalize_name(n): v for n, v in re.findall(r"^([\w.-]+)(?:\[.*?\])?==(\S+)", text, re.MULTILINE)
    }


def test_the_image_has_the_locked_packages_and_the_server(container: Container) -> None:
    code = """
import importlib.metadata, json
print(json.dumps([(part.name, part.version) for part in importlib.metadata.distributions()]))
"""
    listed = container.exec("python", "-c", code)
    found = {canonicalize_name(name): version for name, version in reversed(json.loads(listed.stdout))}
    base = {"pip", "setuptools", "wheel"}  # of the base image
    assert locked("cpu").items() <= found.items()
    assert found.keys() - locked("cpu").keys() - base == {"torchrelay"}


def test_the_server_has_no_rights_and_a_read_only_root(container: Container) -> None:
    assert container.exec("id", "-u").stdout == b"1000\n"
    refused = container.exec("touch", "/opt/torchrelay/new")
    assert b"Read-only file system" in refused.stderr
    status = container.exec("cat", "/proc/1/status").stdout.decode()
    assert re.search(r"^Uid:\t1000\t1000\t1000\t1000$", status, re.MULTILINE), status
    assert re.findall(r"^Cap\w+:\t(\w+)$", status, re.MULTILINE) == ["0" * 16] * 5
    assert container.exec("python", "-c", "open('/srv/torchrelay/new', 'w')").returncode == 0


def test_an_image_is_classified_by_a_compiled_model_and_explained(container: Container) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (224, 224), (200, 100, 50)).save(buffer, "PNG")
    answer = predict(container, "/predictions/colors", buffer.getvalue())
    assert list(answer) == ["3", "2", "1", "0"], "each class has the bias of its number"
    [pixels] = predict(container, "/explanations/colors", buffer.getvalue())[:1]
    assert len(pixels) == 224


def test_a_hugging_face_folder_is_served_and_explained(container: Container) -> None:
    [entity, *_] = predict(container, "/predictions/entities", SHORT.encode())
    assert "entity_group" in entity
    assert "attributions" in json.dumps(predict(container, "/explanations/entities", SHORT.encode()))


def test_an_onnx_graph_is_served(container: Container) -> None:
    assert predict(container, "/predictions/double", {"x": [1.0, 2.5]}) == [2.0, 5.0]


def test_a_language_model_completes_by_a_grammar(container: Container) -> None:
    request = {
        "model": "poet",
        "prompt": "The",
        "max_tokens": 16,
        "structured_outputs": {"choice": ["sun", "moon"]},
    }
    answer = predict(container, "/v1/completions", request)
    assert answer["choices"][0]["text"] in ("sun", "moon")


def test_the_stop_signal_ends_the_server_in_order(container: Container) -> None:
    assert container.stop() == 0, container.logs()


def test_deepspeed_s_wheel_is_built_for_the_target_gpu(builder: ImageBuilder) -> None:
    [wheel] = (builder.build("source").top / "wheels").iterdir()
    assert wheel.name.startswith(f"deepspeed-{locked('gpu')['deepspeed']}-")
