"""Tests of archives written for TorchServe, each run in a process of its own."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.torchserve_compat.names import NAMES, REPLACEMENT_HINTS

pytestmark = pytest.mark.integration


ROOT = Path(__file__).parents[3]


@pytest.fixture
def run() -> Callable[..., str]:
    """Return ``python(code, *path)``, which runs code in a new process and returns its output."""

    def python(code: str, *path: Path) -> str:
        code = f"import sys; sys.path[:0] = {[str(folder) for folder in path]}\n{textwrap.dedent(code)}"
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    return python


@pytest.fixture
def foreign_ts(tmp_path: Path) -> Path:
    """Return a folder with a package ``ts`` of another origin."""
    package = tmp_path / "site" / "ts" / "torch_handler"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("__version__ = 'foreign'")
    (package / "__init__.py").touch()
    (package / "base_handler.py").write_text("class BaseHandler:\n    pass")
    return tmp_path / "site"


def test_an_archive_of_torchserve_runs_unchanged(archive: Any, run: Any, foreign_ts: Path) -> None:
    directory = archive(
        model="""
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super(Net, self).__init__()
                self.fc = nn.Linear(2, 2)

            def forward(self, x):
                return self.fc(x)
        """,
        handler="""
        import logging
        import os

        import torch
        from ts.handler_utils.timer import timed
        from ts.torch_handler.base_handler import BaseHandler
        from ts.utils.util import PredictionException, map_class_to_label

        logger = logging.getLogger(__name__)

        class MyHandler(BaseHandler):
            def __init__(self):
                super(MyHandler, self).__init__()
                self.initialized = False

            def initialize(self, context):
                super(MyHandler, self).initialize(context)
                properties = context.system_properties
                assert os.path.isfile(os.path.join(properties.get("model_dir"), "model.pt"))
                self.initialized = True

            @timed
            def preprocess(self, data):
                rows = [row.get("data") or row.get("body") for row in data]
                if any(len(row) != 2 for row in rows):
                    raise PredictionException("Two numbers, please", 422)
                return torch.as_tensor(rows, device=self.device)

            def postprocess(self, data):
                probs = torch.softmax(data, dim=1).tolist()
                return map_class_to_label(probs, self.mapping, [[0, 1]] * len(probs))
        """,
    )
    layer = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    torch.save({f"fc.{name}": tensor for name, tensor in layer.state_dict().items()}, directory / "model.pt")
    (directory / "index_to_name.json").write_text('{"0": "no", "1": "yes"}')
    output = run(
        f"""
        import json
        import ts.torch_handler.base_handler as foreign
        from pathlib import Path
        import handlers
        from handlers.torchserve_compat import names as torchserve_names
        from handlers.context import Context

        torchserve_names.install()
        directory = Path({str(directory)!r})
        files = {{"modelFile": "model.py", "serializedFile": "model.pt", "handler": "handler.py"}}
        manifest = {{"model": files}}
        entry = handlers.load("handler.py", directory, manifest)
        context = Context("mine", str(directory), manifest)
        entry.initialize(context)
        context.begin(["a", "b"], [{{"explain": "False"}}] * 2, [{{}}] * 2)
        print(json.dumps(entry([{{"body": [1.0, 2.0]}}, {{"data": [0.0, 0.0]}}], context)))
        from handlers.base import BaseHandler
        assert isinstance(entry.instance, BaseHandler) and not isinstance(entry.instance, foreign.BaseHandler)
        try:
            entry([{{"body": [1.0]}}], context)
        except handlers.PredictionException as error:
            print(error.message, error.error_code)
        """,
        foreign_ts,
    )
    answers, error = output.splitlines()
    assert json.loads(answers) == [{"no": 0.5, "yes": 0.5}] * 2
    assert error == "Two numbers, please 422"


@pytest.mark.slow
def test_every_name_is_resolved(run: Any, foreign_ts: Path) -> None:
    output = run(
        """
        import importlib
        from handlers.torchserve_compat import names as torchserve_names
        torchserve_names.install()
        for module, names in torchserve_names.NAMES.items():
            for name, target in names.items():
                actual = getattr(importlib.import_module(target.partition(":")[0]), target.partition(":")[2])
                scope = {}
                exec(f"from {module} import {name}", scope)
                assert scope[name] is actual, (module, name)
                print(module, name)
        """,
        foreign_ts,
    )
    assert len(output.splitlines()) == sum(len(names) for names in NAMES.values())


def test_modules_can_be_imported_in_every_way(run: Any) -> None:
    assert (
        run(
            """
        from handlers.torchserve_compat import names as torchserve_names
        torchserve_names.install()
        import ts.torch_handler.base_handler
        from ts.torch_handler import vision_handler
        from ts.torch_handler.image_classifier import *
        from ts import context
        import ts
        print(ts.__version__, ts.torch_handler.base_handler.BaseHandler.__name__,
              vision_handler.VisionHandler.__name__, ImageClassifier.__name__, context.Context.__name__)
        """
        )
        == "0.12.0 BaseHandler VisionHandler ImageClassifier Context"
    )


def test_missing_names_raise_import_errors_with_alternatives(run: Any, foreign_ts: Path) -> None:
    output = run(
        """
        from handlers.torchserve_compat import names as torchserve_names
        torchserve_names.install()
        for line in (
            "import ts.nowhere",
            "from ts import nowhere",
            "from ts.utils.timeit_decorator import nothing",
            "import ts.version.x",
            "from ts.launcher import start; start()",
            "from ts.llm_launcher import get_model_config; get_model_config(1)",
        ):
            try:
                exec(line)
            except ImportError as error:
                print(error)
        import ts.utils.util
        print(hasattr(ts, "nothing"), hasattr(ts.utils.util, "__wrapped__"), hasattr(ts, "launcher"))
        print(ts.metrics.unit.__name__, ts.torch_handler.base_handler.logger.name)
        try:
            from ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers
            assert "__wrapped__" not in dir(initialize_rpc_workers)
            initialize_rpc_workers()
        except ImportError as error:
            print(error)
        """,
        foreign_ts,
    ).splitlines()
    assert output[0].startswith(
        "Torchrelay has no module ts.nowhere. Of TorchServe's it has ts, ts.arg_parser,"
    )
    assert output[1] == output[0]
    assert output[2] == "Torchrelay's ts.utils.timeit_decorator has no nothing. It has timeit."
    assert "ts.version.x" in output[3]
    assert output[4].startswith(
        "Torchrelay's ts.launcher has no start. Start the server with `torchrelay start`"
    )
    assert output[5].startswith(
        "Torchrelay's ts.llm_launcher has no get_model_config. Run `torchrelay llm-launcher`"
    )
    assert output[6:8] == ["False False True", "ts.metrics.unit ts.torch_handler.base_handler"]
    assert "pt_pippy has no initialize_rpc_workers. It has get_pipeline_driver. PiPPy is disc" in output[8]


RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "torchserve_names.json").read_text()
)


def test_every_public_name_has_a_counterpart_or_an_alternative() -> None:
    missing = [
        f"{module}:{name}"
        for module, names in RECORDED.items()
        for name in names
        if name not in NAMES.get(module, {})
        and name != "logger"
        and f"{module}.{name}" not in RECORDED  # a module itself
        and module not in REPLACEMENT_HINTS
        and f"{module}:{name}" not in REPLACEMENT_HINTS
    ]
    assert missing == []


@pytest.mark.parametrize("module", [m for m in RECORDED if m in NAMES and not m.startswith("ts.metrics")])
def test_counterparts_have_torchserves_parameters(module: str) -> None:
    for name, expected in RECORDED[module].items():
        if name not in NAMES[module] or expected in (None, "imported"):
            continue
        target, _, attribute = NAMES[module][name].partition(":")
        actual = getattr(importlib.import_module(target), attribute)
        if isinstance(expected, list):
            assert parameters(actual)[: len(expected)] == expected, name
            continue
        instance = (
            actual("m", "/m", None) if name == "Context" else actual
        )  # its attributes exist on instances only
        for member, expected_parameters in expected.items():
            assert hasattr(instance, member), f"{name} lacks {member}"
            if (
                expected_parameters is not None and member != "get_insights"
            ):  # called with positional arguments, and with target=
                assert (
                    parameters(getattr(actual, member))[: len(expected_parameters)] == expected_parameters
                ), f"{name}.{member}"


def parameters(function: Any) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    signature_parameters = inspect.signature(function).parameters.values()
    return [
        stars.get(parameter.kind, "") + parameter.name
        for parameter in signature_parameters
        if parameter.name != "self"
    ]


def test_install_is_idempotent(run: Any) -> None:
    assert (
        run(
            """
        import sys
        from handlers.torchserve_compat import names as torchserve_names
        before = len(sys.meta_path)
        torchserve_names.install()
        import ts.context
        torchserve_names.install()
        print(len(sys.meta_path) - before, "ts.context" in sys.modules)
        """
        )
        == "1 True"
    )


def test_custom_envelopes_run(run: Any) -> None:
    assert (
        run(
            """
        from handlers.torchserve_compat import names as torchserve_names
        torchserve_names.install()
        from ts.torch_handler.request_envelope.base import BaseEnvelope

        class Body(BaseEnvelope):
            def parse_input(self, data):
                return [row["body"] for row in data]

            def format_output(self, data):
                return [{"answer": value} for value in data]

        envelope = Body(lambda data, context: data and [value * 2 for value in data])
        responses = envelope.handle([{"body": 2}, {"body": 3}], "context")
        print(responses, envelope.context, envelope.handle(None, None))
        """
        )
        == "[{'answer': 4}, {'answer': 6}] context None"
    )


def test_import_class_finds_classes_or_raises(run: Any) -> None:
    assert run(
        """
        from handlers.torchserve_compat import names as torchserve_names
        torchserve_names.install()
        from ts.handler_utils.utils import import_class
        print(import_class("json.JSONDecoder").__name__, import_class("JSONEncoder", "json").__name__)
        for name in ("", "JSONDecoder", "json.Nothing"):
            try:
                import_class(name)
            except ImportError as error:
                print(error)
        """
    ).splitlines() == [
        "JSONDecoder JSONEncoder",
        "'' names no class: write it as package.module.Class.",
        "'JSONDecoder' names no class: write it as package.module.Class.",
        "There is no class Nothing in the module json.",
    ]
