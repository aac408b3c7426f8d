"""Archives of model classes: local imports, options, and errors before anything is written."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import handlers
from handlers.context import Context
from serve_app.cli.app import app
from serve_app.model_store.class_archive import ClassFile, find_local_imports

pytestmark = pytest.mark.integration  # each inspection is a process

MODEL = """
import torchrelay
from words import WORD

@torchrelay.model(batch_size=8, replicas=2, num_gpus=0)
class Model:
    def predict(self, text: str) -> str:
        import pieces.names
        return WORD + pieces.names.NAME + text
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "greeter.py").write_text(MODEL)
    (tmp_path / "words.py").write_text("WORD = 'hello '\n")
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces/__init__.py").write_text("import further\n")
    (tmp_path / "pieces/names.py").write_text("NAME = 'dear '\n")
    (tmp_path / "further.py").write_text("")
    (tmp_path / "unrelated.py").write_text("")
    return tmp_path


def archive(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["archive", *arguments])
    return result.exit_code, result.output


def test_the_archive_of_a_class_has_its_imports_and_options(folder: Path) -> None:
    code, output = archive("greeter.py")
    assert code == 0, output
    assert "greeter.mar: greeter 1.0" in output
    with zipfile.ZipFile("greeter.mar") as file:
        assert {"greeter.py", "words.py", "pieces/__init__.py", "pieces/names.py", "further.py"} < set(
            file.namelist()
        )
        assert "unrelated.py" not in file.namelist()
        config = yaml.safe_load(file.read("model-config.yaml"))
        file.extractall(folder / "unpacked")
    assert config == {"batchSize": 8, "minWorkers": 2, "maxWorkers": 2, "num_gpus": 0}
    entry = handlers.load("", folder / "unpacked", {"model": {"handler": "greeter.py"}})
    context = Context("m", str(folder / "unpacked"), {})
    entry.initialize(context)
    context.begin(["1"], [{}], [{}])
    assert entry([{"body": "Ada"}], context) == ["hello dear Ada"]


def test_a_model_config_takes_precedence(folder: Path) -> None:
    (folder / "model-config.yaml").write_text("batchSize: 4\nlabels: [a]\n")
    assert archive("greeter.py:Model", "--model-name", "other", "--version", "2.0")[0] == 0
    with zipfile.ZipFile("other.mar") as file:
        config = yaml.safe_load(file.read("model-config.yaml"))
    assert config == {"batchSize": 4, "minWorkers": 2, "maxWorkers": 2, "num_gpus": 0, "labels": ["a"]}


def test_local_imports_may_be_circular(folder: Path) -> None:
    (folder / "further.py").write_text("import words, greeter, numpy\n")
    found = find_local_imports(folder / "greeter.py")
    assert sorted(path.name for path in found) == ["further.py", "pieces", "words.py"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Model:\n    def guess(self, x): pass", "no method predict"),
        ("x = (", "line 1: '(' was never closed; correct the file"),
        ("a = 1\nimport absent_package", "line 2: importing it failed with ModuleNotFoundError"),
        ("import os\nos._exit(3)", "importing it ended the process with code 3"),
        (
            "import torchrelay\n@torchrelay.model(batch_sise=1)\nclass M:\n    def predict(self, x): pass",
            "no option 'batch_sise'; did you mean 'batch_size'?",
        ),
        (
            "import torchrelay\n@torchrelay.model(num_gpus='a')\nclass M:\n    def predict(self, x): pass",
            "num_gpus: 'a' must be a number from 0",
        ),
    ],
)
def test_an_invalid_class_is_refused_before_anything_is_written(
    folder: Path, source: str, message: str
) -> None:
    (folder / "broken.py").write_text(source)
    code, output = archive("broken.py" if "guess" not in source else "broken.py:Model")
    assert code == 1
    assert message in " ".join(output.split())
    assert not (folder / "broken.mar").exists()


def test_output_of_the_file_does_not_disturb(folder: Path) -> None:
    (folder / "greeter.py").write_text("print('loading', end='')\n" + MODEL)
    assert ClassFile.parse("greeter.py").inspect().class_name == "Model"


def test_the_options_of_torch_model_archiver_are_required_without_a_class(folder: Path) -> None:
    code, output = archive("--model-name", "m", "--version", "1.0")
    assert code == 2
    assert "--handler" in output
    assert archive("greeter.py", "--handler", "greeter.py")[0] == 2
    assert "does not exist" in archive("absent.py")[1]
