"""The target cpu, built and run as a container: its packages, rights, handlers, health and volume."""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
from serve_app.cli.commands.new import create_project
from serve_app.model_store.archiver import ArchiveRecipe, make
from tests.support.archives import make_archive
from tests.support.container_images import ROOT, Container, Images, missing_tools, run
from tests.support.explanation_checks import ENTITIES, label_config
from tests.support.hf_folders import SHORT, save_bert, save_byte_llama

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(missing_tools()), reason=missing_tools())]

# Docker's options of the page for a container without rights.
RESTRICTED = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--tmpfs", "/tmp:exec", "--volume", "/home/torchrelay"),
    *("--shm-size", "2g", "--memory", "8g"),
)
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
def images() -> Iterator[Images]:
    found = Images()
    yield found
    found.remove_containers()


@pytest.fixture(scope="module")
def image(images: Images, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the image of a checkout that only its owner may read, as with umask 077."""
    return images.build("cpu", copy_checkout(tmp_path_factory.mktemp("checkout")))


COUNT_WORDS = """
import json
def handle(data, context):
    if data is None:
        return None
    rows = [row.get("body") or row.get("data") or row for row in data]
    rows = [json.loads(row) if isinstance(row, (bytes, bytearray)) else row for row in rows]
    return [{"words": len(row["text"].split())} for row in rows]
"""


def save_double(path: Path) -> None:
    """Write a graph that doubles its input."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)


def save_archives(folder: Path, store: Path) -> None:
    """Write an archive of each family of handlers."""
    (folder / "net.py").write_text(NET)
    torch.save({"conv.weight": torch.ones(4, 3, 4, 4), "conv.bias": torch.arange(4.0)}, folder / "net.pt")
    save_double(folder / "double.onnx")
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


def copy_checkout(folder: Path) -> Path:
    """Copy what the Dockerfile needs, without rights for others, except for the locks.

    The locks keep their rights: the layer with the packages is made again after any change of them.
    """
    sent = (ROOT / "cluster/Dockerfile.dockerignore").read_text().splitlines()
    names = [line.removeprefix("!") for line in sent if line.startswith("!")]
    for name in ("cluster/Dockerfile", "cluster/Dockerfile.dockerignore", *names):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    locks = folder / "cluster/requirements"
    for path in folder.rglob("*"):
        if locks not in (path, *path.parents):
            path.chmod(path.stat().st_mode & 0o700)
    return folder


@pytest.fixture(scope="module")
def container(images: Images, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    store = tmp_path_factory.mktemp("store")
    store.chmod(0o755)  # the server has another user
    save_archives(tmp_path_factory.mktemp("models"), store)
    running = Container(images, image, *RESTRICTED, "--volume", f"{store}:/srv/torchrelay/model_store:ro")
    running.wait_until_healthy()
    yield running
    running.remove()


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


def test_the_image_states_its_user_volume_ports_and_signals(images: Images, image: str) -> None:
    config = images.inspect(image)["Config"]
    assert config["User"] == "1000:1000"
    assert list(config["Volumes"]) == ["/srv/torchrelay"]
    assert config["StopSignal"] == "SIGINT"
    assert {"8080/tcp", "8081/tcp", "7070/tcp"} <= config["ExposedPorts"].keys()


def test_the_server_has_no_rights_and_a_read_only_root(container: Container) -> None:
    assert container.exec("id", "-u").stdout == b"1000\n"
    refused = container.exec("touch", "/opt/torchrelay/new")
    assert b"Read-only file system" in refused.stderr
    status = container.exec("cat", "/proc/1/status").stdout.decode()
    assert re.search(r"^Uid:\t1000\t1000\t1000\t1000$", status, re.MULTILINE), status
    assert re.findall(r"^Cap\w+:\t(\w+)$", status, re.MULTILINE) == ["0" * 16] * 5
    limited = container.exec("torchrelay", "doctor", "--json")
    checks = {check["name"]: check["found"] for check in json.loads(limited.stdout)["checks"]}
    assert "8.0 GiB by the cgroup" in checks["memory"]
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


def test_a_model_store_of_another_user_is_an_error(images: Images, image: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    refused = Container(images, image, *RESTRICTED, "--volume", f"{tmp_path}:/srv/torchrelay/model_store:ro")
    run(*images.podman, "wait", refused.id, timeout=60)
    logs = " ".join(refused.logs().split())
    assert "model store /srv/torchrelay/model_store: permission denied" in logs
    assert "the user 1000 must read" in logs
    assert refused.state["ExitCode"] == 1
    refused.remove()


# Dockerfiles for the image of TorchServe, in the shapes that are common in public repositories.
TORCHSERVE_DOCKERFILES = {
    "archive": """
FROM pytorch/torchserve:latest-cpu
COPY spam.mar /home/model-server/model-store/
CMD ["torchserve", "--start", "--ncs", "--model-store", "/home/model-server/model-store", \\
     "--models", "spam=spam.mar"]
""",
    "archiver": """
FROM pytorch/torchserve:latest-cpu
USER root
RUN printf "\\ndefault_response_timeout=60\\nload_models=spam.mar\\n" >> /home/model-server/config.properties
COPY handler.py /home/model-server/
RUN chown model-server /home/model-server/handler.py
USER model-server
RUN torch-model-archiver --model-name spam --version 1.0 --handler /home/model-server/handler.py \\
    --export-path /home/model-server/model-store
ENTRYPOINT ["/usr/local/bin/dockerd-entrypoint.sh"]
CMD ["serve"]
""",
    "shell": """
FROM pytorch/torchserve:latest-cpu
WORKDIR /home/model-server
COPY --chown=model-server . .
RUN mkdir -p stores && cp spam.mar stores/
CMD torchserve --start --model-store=stores --models=all --ts-config=config.properties && tail -f /dev/null
""",
}


@pytest.mark.parametrize("kind", ["new project", *TORCHSERVE_DOCKERFILES])
def test_a_dockerfile_for_this_image_or_torchserve_s_is_built_and_answers(
    images: Images, image: str, tmp_path: Path, kind: str
) -> None:
    folder, name = tmp_path / "spam", "localhost/torchrelay:derived"
    if kind == "new project":
        create_project(folder)
        run(*images.podman, "tag", image, "docker.io/library/torchrelay:cpu")
    else:
        folder.mkdir()
        (folder / "Dockerfile").write_text(TORCHSERVE_DOCKERFILES[kind])
        (folder / "handler.py").write_text(COUNT_WORDS)
        make_archive(folder, "spam", COUNT_WORDS).rename(folder / "spam.mar")
        run(*images.podman, "tag", image, "docker.io/pytorch/torchserve:latest-cpu")
    build = (*images.buildah, "build", "--isolation", "chroot", "--format", "docker", "--pull-never")
    run(*build, "--tag", name, folder, timeout=300)
    derived = Container(images, name, "--shm-size", "1g")
    derived.wait_until_healthy()
    code = """
import json, time, urllib.error, urllib.request
key = json.load(open("/home/model-server/key_file.json"))["inference"]["key"]
url, body = "http://127.0.0.1:8080/predictions/spam", b'{"text": "a b c"}'
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
while True:
    try:
        print(urllib.request.urlopen(urllib.request.Request(url, body, headers)).read().decode())
        break
    except urllib.error.HTTPError as error:  # the model is being loaded
        assert error.code in (404, 503), error.read()
        time.sleep(0.2)
"""
    done = derived.exec("timeout", "120", "python", "-c", code)
    assert done.returncode == 0, done.stderr.decode() + derived.logs()
    assert json.loads(done.stdout) == {"words": 3}
    derived.remove()
    run(*images.podman, "rmi", name)


@dataclass
class Platform:
    """A platform's start of the image: command, variables, and the model's folder, file and text."""

    command: tuple[str, ...]
    variables: dict[str, str]
    folder: str
    file: str
    text: str


PLATFORMS = {
    "sagemaker": Platform(
        ("serve",),
        {},
        "/opt/ml/model",
        "code/inference.py",
        """
import json
def model_fn(model_dir):
    return len
def input_fn(body, content_type):
    return json.loads(body)
def predict_fn(data, model):
    return {"words": model(data["text"].split())}
def output_fn(prediction, accept):
    return json.dumps(prediction)
""",
    ),
    "vertex": Platform(
        (),
        {"AIP_HTTP_PORT": "8080", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"},
        "/home/model-server/model-store",
        "spam.mar",
        COUNT_WORDS,
    ),
    "azureml": Platform(
        (),
        {"AZUREML_ENTRY_SCRIPT": "score.py", "AML_APP_ROOT": "/var/azureml-app"},
        "/var/azureml-app",
        "score.py",
        """
import json
def init():
    global count
    count = len
def run(raw_data):
    return {"words": count(json.loads(raw_data)["text"].split())}
""",
    ),
    "hf-endpoint": Platform(
        (),
        {"HF_MODEL_DIR": "/repository"},
        "/repository",
        "handler.py",
        """
class EndpointHandler:
    def __init__(self, path=""):
        self.count = len
    def __call__(self, data):
        return [{"words": self.count(data["inputs"]["text"].split())}]
""",
    ),
}


@pytest.mark.parametrize("contract", PLATFORMS)
def test_a_platform_s_command_serves_its_model_by_its_contract(
    images: Images, image: str, tmp_path: Path, contract: str
) -> None:
    platform = PLATFORMS[contract]
    file = tmp_path / platform.file
    file.parent.mkdir(exist_ok=True)
    if file.suffix == ".mar":
        make_archive(tmp_path, "spam", platform.text).rename(file)
    else:
        file.write_text(platform.text)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o755)
    variables = [f"--env={name}={value}" for name, value in platform.variables.items()]
    mount = ("--volume", f"{tmp_path}:{platform.folder}:ro")
    started = Container(images, image, "--shm-size", "1g", *variables, *mount, command=platform.command)
    try:
        port = 5001 if contract == "azureml" else 8080
        options = ("--base-url", f"http://127.0.0.1:{port}", "--instance", '{"text": "a b c"}')
        check = ("torchrelay", "conformance", contract, *options)
        deadline = time.monotonic() + 180
        while (done := started.exec(*check)).returncode != 0:
            output = (done.stdout + done.stderr).decode()
            assert started.state["Running"] and time.monotonic() < deadline, output + started.logs()
            time.sleep(2)
        assert started.health() == 0, "the health check follows the platform's port"
        recognised = json.loads(started.exec("torchrelay", "doctor", "--container", "--json").stdout)
        assert recognised["problem"] == "", recognised
    finally:
        started.remove()


def test_it_stops_in_order_before_docker_kills_it(container: Container) -> None:
    assert container.stop(timeout=10) == 0, container.logs()


def test_a_killed_container_starts_again_with_its_registry(
    images: Images, image: str, tmp_path: Path
) -> None:
    """Docker's restart policies start the same container again, with what a crash left in its files."""
    save_double(tmp_path / "double.onnx")
    make(
        ArchiveRecipe(
            "double", "1.0", "onnx", serialized_file=str(tmp_path / "double.onnx"), export_path=str(tmp_path)
        )
    )
    archive = (tmp_path / "double.mar").read_bytes()
    volume = ("--volume", "registry:/srv/torchrelay")
    first = Container(images, image, *volume)
    first.wait_until_healthy()
    copied = first.exec("sh", "-c", "cat > /srv/torchrelay/model_store/double.mar", stdin=archive)
    assert copied.returncode == 0, copied.stderr
    registered = first.exec("torchrelay", "models", "register", "double.mar")
    assert registered.returncode == 0, registered.stdout + registered.stderr
    assert predict(first, "/predictions/double", {"x": [1.0, 2.5]}) == [2.0, 5.0]
    first.kill()
    first.start()
    first.wait_until_healthy()
    assert predict(first, "/predictions/double", {"x": [1.0, 2.5]}) == [2.0, 5.0]
    first.kill()
    first.remove()
    second = Container(images, image, *volume)
    second.wait_until_healthy()
    assert predict(second, "/predictions/double", {"x": [1.0, 2.5]}) == [2.0, 5.0]
    assert second.stop() == 0, second.logs()


def test_deepspeed_s_wheel_is_built_for_the_target_gpu(images: Images) -> None:
    with images.mounted(images.build("source")) as root:
        [wheel] = (root / "wheels").iterdir()
    assert wheel.name.startswith(f"deepspeed-{locked('gpu')['deepspeed']}-")
