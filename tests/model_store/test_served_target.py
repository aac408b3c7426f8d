"""Targets of `torchrelay serve`: what each kind becomes in a model store, and errors before a start."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from serve_app.model_store.archiver import ArchiverError
from serve_app.model_store.served_target import read_target

pytestmark = pytest.mark.integration  # each inspection is a process

MODEL = "class Model:\n    def predict(self, text: str) -> str:\n        return text\n"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def config(archive: Path) -> dict:
    with zipfile.ZipFile(archive) as file:
        return yaml.safe_load(file.read("model-config.yaml"))


def manifest(archive: Path) -> dict:
    with zipfile.ZipFile(archive) as file:
        return json.loads(file.read("MAR-INF/MANIFEST.json"))["model"]


def test_a_python_file(tmp_path: Path, store: Path) -> None:
    (tmp_path / "spam.py").write_text(MODEL)
    target = read_target(f"{tmp_path}/spam.py:Model")
    assert target.name == "spam"
    assert target.schemas and target.schemas["input"]["mediaType"] == "text/plain"
    assert target.write(store, "2.0", tmp_path / "report") == "spam.mar"
    assert manifest(store / "spam.mar")["handler"] == "spam.py:Model"
    assert manifest(store / "spam.mar")["modelVersion"] == "2.0"
    reload = config(store / "spam.mar")["reload"]
    assert reload["source"] == str(tmp_path / "spam.py")
    assert not reload["tree"]


def test_a_folder_with_a_class_has_all_of_its_files(tmp_path: Path, store: Path) -> None:
    folder = tmp_path / "project"
    (folder / ".hidden").mkdir(parents=True)
    (folder / ".hidden/file").touch()
    (folder / "model.py").write_text(MODEL)
    (folder / "weights.bin").write_bytes(b"w")
    target = read_target(str(folder))
    assert (target.name, target.write(store, "1.0")) == ("project", "project.mar")
    with zipfile.ZipFile(store / "project.mar") as file:
        assert set(file.namelist()) == {"model.py", "weights.bin", "MAR-INF/MANIFEST.json"}


def test_archives_model_folders_and_names_of_a_hub(tmp_path: Path, store: Path) -> None:
    (tmp_path / "digits.tar.gz").write_bytes(b"an archive")
    target = read_target(str(tmp_path / "digits.tar.gz"))
    assert (target.name, target.write(store, "1.0")) == ("digits", "digits.tar.gz")
    assert (store / "digits.tar.gz").read_bytes() == b"an archive"
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    for name in ("bert", "bert/model.safetensors"):
        target = read_target(str(tmp_path / name))
        assert (target.name, target.write(store, "1.0")) == ("bert", "bert")
    assert (store / "bert/config.json").is_file()
    target = read_target("hf://owner/tiny@main")
    assert (target.name, target.write(store, "1.0")) == ("tiny", "hf://owner/tiny@main")


def test_a_model_directory_of_mlflow(tmp_path: Path) -> None:
    folder = tmp_path / "churn"
    folder.mkdir()
    (folder / "MLmodel").write_text("{}")
    (folder / "model.py").write_text(MODEL)
    target = read_target(str(folder), trusted=True)
    assert (target.name, target.path, target.trusted) == ("churn", folder, True)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_weights(tmp_path: Path, store: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "line.pt")
    assert read_target(str(tmp_path / "line.pt")).write(store, "1.0") == "line.mar"
    assert manifest(store / "line.mar")["handler"] == "base_handler"
    (tmp_path / "graph.onnx").write_bytes(b"")
    assert read_target(str(tmp_path / "graph.onnx"), name="other").write(store, "1.0") == "other.mar"
    assert manifest(store / "other.mar")["handler"] == "onnx"
    save_file({"w": torch.zeros(1)}, tmp_path / "state.safetensors")
    (tmp_path / "net.py").write_text("class Net: pass\n")
    target = read_target(str(tmp_path / "state.safetensors"), model_file=str(tmp_path / "net.py"))
    target.write(store, "1.0")
    assert manifest(store / "state.mar")["modelFile"] == "net.py"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modle.py", None, r"modle\.py does not exist; did you mean .*model\.py\?"),
        ("broken.py", b"a = 1\nb = (\n", r"broken\.py, line 2: '\(' was never closed"),
        ("empty.py", b"x = 1\n", r"empty\.py: there is no handler in it\. .*Define a class with predict"),
        ("image.png", b"", r"image\.png is none of \.py, .*write a model\.py"),
        ("weights.pt2", b"", r"weights\.pt2: .* --trusted"),
        ("state.safetensors", b"", r"state\.safetensors has weights without their class.*--model-file"),
        (".", None, r"has no model\.py, no MAR-INF/MANIFEST\.json, and no Hugging Face model"),
    ],
)
def test_an_invalid_target_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    folder = tmp_path / "empty" if name == "." else tmp_path
    folder.mkdir(exist_ok=True)
    if name != ".":
        (tmp_path / "model.py").write_text(MODEL)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArchiverError, match=f"(?s){message}"):
        read_target(str(folder / name))
