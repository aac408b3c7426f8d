"""Tests of every kind of weights file, loaded through BaseHandler."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError
from handlers.loading import weights
from handlers.loading.module_loader import add_archive_to_path
from tests.support.requirements import needs_program

pytestmark = pytest.mark.integration


MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)
"""
TRUSTED = {"trusted": True}
ROWS = [[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]]


@pytest.fixture
def net() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 2)})


@pytest.fixture
def answers(begin: Callable[..., Context]) -> Callable[..., list[Any]]:
    """Return ``predict(directory, config, **model)``, which returns base_handler's values for ROWS."""

    def predict(directory: Path, config: dict[str, Any] | None = None, **model: str) -> list[Any]:
        entry = handlers.load("base_handler", directory, {"model": model})
        context = Context("net", str(directory), {"model": model}, model_yaml_config=config)
        entry.initialize(context)
        assert entry.instance.initialized and not getattr(entry.instance.model, "training", False)
        return entry([{"body": row} for row in ROWS], begin(context, len(ROWS)))

    return predict


def expected(net: torch.nn.Module) -> list[Any]:
    weight, bias = net["linear"].weight.tolist(), net["linear"].bias.tolist()
    outputs = [[sum(w * x for w, x in zip(ws, row)) + b for ws, b in zip(weight, bias)] for row in ROWS]
    return [pytest.approx(output, abs=1e-5) for output in outputs]


def save_torchscript(module: torch.nn.Module, file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module).save(str(file))


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin"])
def test_a_state_dict_is_loaded(archive: Any, answers: Any, net: Any, name: str) -> None:
    directory = archive(model=MODEL)
    torch.save(net.state_dict(), directory / name)
    assert answers(directory, serializedFile=name, modelFile="model.py") == expected(net)


def _mapped_file(address: int) -> str:
    """Return the file that is mapped at an address of this process; empty for other memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < end:
            return " ".join(line.split()[5:])
    return ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_safetensors_are_mapped_from_their_file(archive: Any, net: Any) -> None:
    directory = archive(model=MODEL)
    add_archive_to_path(directory)
    file = directory / "model.safetensors"
    save_file(net.state_dict(), file)
    model = weights.load_eager(directory / "model.py", file)
    assert {_mapped_file(tensor.data_ptr()) for tensor in model.state_dict().values()} == {
        str(file.resolve())
    }


def test_safetensors_of_another_number_format_are_cast_to_the_models(archive: Any, net: Any) -> None:
    directory = archive(model=MODEL)
    add_archive_to_path(directory)
    file = directory / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in net.state_dict().items()}, file)
    model = weights.load_eager(directory / "model.py", file)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


def test_safetensors_are_loaded(archive: Any, answers: Any, net: Any) -> None:
    directory = archive(model=MODEL)
    save_file(net.state_dict(), directory / "model.safetensors")
    assert answers(directory, serializedFile="model.safetensors", modelFile="model.py") == expected(net)


def test_torchscript_is_loaded(archive: Any, answers: Any, net: Any) -> None:
    directory = archive()
    save_torchscript(net["linear"], directory / "model.pt")
    assert answers(directory, serializedFile="model.pt") == expected(net)


def test_a_model_file_without_weights_is_loaded(archive: Any, answers: Any) -> None:
    source = MODEL.replace("Linear(3, 2)", "Linear(3, 2, bias=False)")
    source = source.replace(
        "    def forward", "        torch.nn.init.ones_(self.linear.weight)\n\n    def forward"
    )
    assert answers(archive(model=source), modelFile="model.py") == [[6.0, 6.0], [-0.5, -0.5]]


def export_program(net: torch.nn.Module) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=64)
    return torch.export.export(net["linear"].eval(), (torch.ones(2, 3),), dynamic_shapes=({0: batch},))


def test_an_exported_program_is_loaded(archive: Any, answers: Any, net: Any) -> None:
    directory = archive()
    torch.export.save(export_program(net), directory / "model.pt2")
    assert answers(directory, TRUSTED, serializedFile="model.pt2") == expected(net)


@pytest.mark.nightly
@needs_program("g++")
def test_an_aotinductor_package_is_loaded(archive: Any, answers: Any, net: Any) -> None:
    directory = archive()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch itself
        torch._inductor.aoti_compile_and_package(
            export_program(net), package_path=str(directory / "model.pt2")
        )
    assert answers(directory, TRUSTED, serializedFile="model.pt2") == expected(net)
    with pytest.raises(
        HandlerLoadError, match=r"compiled this for cpu, and it is to run on cuda:0\. Compile it"
    ):
        weights.load(directory / "model.pt2", torch.device("cuda", 0), trusted=True)


def test_an_untrusted_pt2_file_is_rejected(archive: Any, answers: Any, net: Any) -> None:
    directory = archive()
    torch.export.save(export_program(net), directory / "model.pt2")
    with pytest.raises(HandlerLoadError, match=r"model\.pt2: .*register the model with trusted=true"):
        answers(directory, serializedFile="model.pt2")


def test_damaged_pt2_files_are_rejected(
    archive: Any, answers: Any, net: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = archive()
    file = directory / "model.pt2"
    torch.export.save(export_program(net), file)
    content = file.read_bytes()
    with zipfile.ZipFile(directory / "other.zip", "w") as other:
        other.writestr("a/b", "c")
    for damaged in (
        b"this is no model",
        content[: len(content) // 2],
        (directory / "other.zip").read_bytes(),
    ):
        file.write_bytes(damaged)
        with pytest.raises(HandlerLoadError, match=r"model\.pt2: .*export the model again"):
            answers(directory, TRUSTED, serializedFile="model.pt2")
    capfd.readouterr()


def test_other_files_import_the_models_own_class(archive: Any, answers: Any, net: Any) -> None:
    directory = archive(
        model=MODEL,
        handler="""
        from handlers.base import BaseHandler
        from model import Net

        class Handler(BaseHandler):
            def postprocess(self, data):
                return [isinstance(self.model, Net) for _ in data]
        """,
    )
    torch.save(net.state_dict(), directory / "model.pt")
    model = {"serializedFile": "model.pt", "modelFile": "model.py"}
    entry = handlers.load("handler.py", directory, {"model": model})
    context = Context("net", str(directory), {"model": model})
    entry.initialize(context)
    context.begin(["a"], [{}], [{}])
    assert entry([{"body": ROWS[0]}], context) == [True]


def test_only_trusted_pickles_are_read(archive: Any, answers: Any, net: Any) -> None:
    directory = archive(model=MODEL)
    entry = handlers.load("base_handler", directory, {"model": {"modelFile": "model.py"}})
    entry.initialize(Context("net", str(directory), {"model": {"modelFile": "model.py"}}))
    entry.instance.model.load_state_dict(net.state_dict())
    torch.save(entry.instance.model, directory / "model.pt")
    model = {"serializedFile": "model.pt", "modelFile": "model.py"}
    with pytest.raises(HandlerLoadError, match=r"model\.pt: .* register the model with trusted=true"):
        answers(directory, **model)
    with pytest.raises(HandlerLoadError, match="trusted=true"):
        answers(directory, {"trusted": "no"}, **model)
    assert answers(directory, {"trusted": True}, **model) == expected(net)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import torch\nfrom torch.nn import Linear", r"model\.py: 0 nn\.Module classes"),
        (
            MODEL + MODEL.replace("Net", "Part"),
            r"model\.py: 2 nn\.Module classes are defined in it \(Net, Part\)",
        ),
    ],
)
def test_the_model_file_defines_exactly_one_model(
    archive: Any, answers: Any, source: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        answers(archive(model=source), modelFile="model.py")


def test_the_model_file_may_define_other_classes(archive: Any, answers: Any) -> None:
    assert len(answers(archive(model=MODEL + "\nclass Config:\n    width = 2\n"), modelFile="model.py")) == 2


def test_errors_name_missing_files(archive: Any, answers: Any) -> None:
    directory = archive(model=MODEL)
    for model, file, option in (
        ({"serializedFile": "gone.pt"}, "gone.pt", "--serialized-file"),
        (
            {"serializedFile": "gone.safetensors", "modelFile": "model.py"},
            "gone.safetensors",
            "--serialized-file",
        ),
        ({"modelFile": "gone.py"}, "gone.py", "--model-file"),
    ):
        with pytest.raises(HandlerLoadError) as raised:
            answers(directory, **model)
        assert str(directory / file) in str(raised.value) and option in str(raised.value)


def test_weights_without_their_class_are_rejected(archive: Any, answers: Any, net: Any) -> None:
    directory = archive()
    save_file(net.state_dict(), directory / "model.safetensors")
    torch.save(net.state_dict(), directory / "model.pth")
    torch.save(net.state_dict(), directory / "model.pt")
    with pytest.raises(HandlerLoadError, match=r"No model weights could be loaded: .*--model-file model\.py"):
        answers(directory, serializedFile="model.safetensors")
    with pytest.raises(HandlerLoadError, match=r"No model weights could be loaded: .*--model-file model\.py"):
        answers(directory, serializedFile="model.pth")
    with pytest.raises(HandlerLoadError, match=r"no TorchScript model.*--model-file model\.py"):
        answers(directory, serializedFile="model.pt")
    with pytest.raises(HandlerLoadError, match="neither serializedFile nor modelFile"):
        answers(directory)


def test_damaged_files_are_rejected(archive: Any, answers: Any) -> None:
    directory = archive(model=MODEL)
    for name in ("model.pt", "model.safetensors"):
        (directory / name).write_bytes(b"this is no model")
    with pytest.raises(HandlerLoadError, match=r"model\.pt: this is no TorchScript"):
        answers(directory, serializedFile="model.pt")
    with pytest.raises(HandlerLoadError, match=r"model\.pt: this cannot be read as a state dict"):
        answers(directory, serializedFile="model.pt", modelFile="model.py")
    with pytest.raises(HandlerLoadError, match=r"model\.safetensors: this is no safetensors file"):
        answers(directory, serializedFile="model.safetensors", modelFile="model.py")


def test_weights_of_another_model_are_rejected(archive: Any, answers: Any) -> None:
    directory = archive(model=MODEL)
    torch.save(torch.nn.Linear(3, 2).state_dict(), directory / "model.pt")
    with pytest.raises(
        HandlerLoadError, match=r"model\.pt: this is no state dict of Net in model\.py"
    ) as raised:
        answers(directory, serializedFile="model.pt", modelFile="model.py")
    assert "linear.weight" in str(raised.value)


def test_labels_are_loaded_with_the_model(archive: Any) -> None:
    directory = archive(model=MODEL)
    (directory / "index_to_name.json").write_text(json.dumps({"0": "cat", "1": "dog"}))
    entry = handlers.load("base_handler", directory, {})
    entry.initialize(Context("net", str(directory), {"model": {"modelFile": "model.py"}}))
    assert entry.instance.mapping == {"0": "cat", "1": "dog"}


@pytest.mark.parametrize(
    "pt2", ["eager", {"backend": "eager"}, {"compile": {"enable": True, "backend": "eager"}}]
)
def test_models_are_compiled_if_configured(archive: Any, answers: Any, net: Any, pt2: Any) -> None:
    directory = archive(model=MODEL)
    torch.save(net.state_dict(), directory / "model.pt")
    assert answers(directory, {"pt2": pt2}, serializedFile="model.pt", modelFile="model.py") == expected(net)
    from handlers.optimize import compile

    assert hasattr(compile.compile_model(net, pt2), "_orig_mod")


def test_models_are_not_compiled_if_disabled_or_the_backend_is_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from handlers.optimize import compile

    module = torch.nn.Linear(1, 1)
    options = {"compile": {"enable": False, "backend": "eager"}}
    assert compile.compile_model(module, None) is module
    assert compile.compile_model(module, options) is module
    assert options == {"compile": {"enable": False, "backend": "eager"}}, (
        "the model's configuration is not modified"
    )
    assert compile.compile_model(module, {"export": {"aot_compile": True}}) is module
    assert compile.compile_model(module, "no_such_backend") is module
    assert "no_such_backend" in caplog.text
    with pytest.raises(ValueError, match="pt2 is 3"):
        compile.compile_model(module, 3)
