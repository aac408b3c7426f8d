"""Tests of optional dependencies beside PyTorch, and of the small functions that archives import."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import handlers
from handlers.base import BaseHandler
from handlers.context import Context
from handlers.loading import optional_deps
from handlers.optimize import compile
from handlers.torchserve_compat import hub
from handlers.torchserve_compat.deprecation import deprecated
from handlers.torchserve_compat.model_config import get_yaml_config

pytestmark = pytest.mark.integration


ROOT = Path(__file__).parents[2]
MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""


@pytest.mark.nightly
def test_intels_extension_is_enabled_by_the_environment(archive: Any) -> None:
    directory = archive(model=MODEL, intel_extension_for_pytorch="def optimize(model):\n    return [model]")
    code = f"""
    import sys
    sys.path.insert(0, {str(directory)!r})
    from handlers.base import BaseHandler
    from handlers.context import Context
    manifest = {{"model": {{"modelFile": "model.py"}}}}
    for config in ({{}}, {{"pt2": {{"compile": {{"enable": True, "backend": "eager"}}}}}}):
        handler = BaseHandler()
        handler.initialize(Context("m", {str(directory)!r}, manifest, model_yaml_config=config))
        print(type(handler.model).__name__)
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"TS_IPEX_ENABLE": "true", "PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert output == ["list", "OptimizedModule"]
    assert optional_deps.IPEX_AVAILABLE is False, "only in that process"


def test_backends_register_themselves(archive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = archive(model=MODEL, torch_tensorrt="import builtins\nbuiltins.registered_tensorrt = True")
    monkeypatch.syspath_prepend(str(directory))
    BaseHandler().initialize(Context("m", str(directory), {"model": {"modelFile": "model.py"}}))
    import builtins

    assert builtins.registered_tensorrt
    del builtins.registered_tensorrt


def test_backends_are_checked_by_name(caplog: pytest.LogCaptureFixture) -> None:
    assert compile.check_valid_pt2_backend("inductor") and compile.PT2Backend.INDUCTOR == "inductor"
    assert compile.PT2Backend("hpu_backend") is compile.PT2Backend.HPU_BACKEND
    assert not compile.check_valid_pt2_backend("nothing") and "nothing" in caplog.text


@pytest.mark.parametrize(
    ("pt2", "expected"),
    [
        ({"export": {"aot_compile": True}}, True),
        ({"export": {"aot_compile": "yes"}}, False),
        ({"compile": {"enable": True}}, False),
        ("inductor", False),
        (None, False),
    ],
)
def test_aot_compiled_weights_are_recognized(pt2: Any, expected: bool) -> None:
    handler = BaseHandler()
    assert not handler._use_torch_export_aot_compile()
    handler.model_yaml_config = {"pt2": pt2}
    assert handler._use_torch_export_aot_compile() is expected


def test_compiled_code_is_loaded_and_run(tmp_path: Path, begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace PyTorch's loader, because compiling takes half a minute."""
    monkeypatch.setattr(
        torch._export, "aot_load", lambda file, device: lambda data: data * len(file[-8:] + device)
    )
    manifest = {"model": {"serializedFile": "model.so"}}
    entry = handlers.load("base_handler", tmp_path, manifest)
    config = {"pt2": {"export": {"aot_compile": True}}}
    entry.initialize(Context("m", str(tmp_path), manifest, model_yaml_config=config))
    assert entry([{"body": [1.0]}, {"body": [2.0]}], begin(entry.instance.context, 2)) == [[11.0], [22.0]]


def test_deprecated_functions_warn() -> None:
    @deprecated("1.2", "elsewhere", DeprecationWarning)
    def old(value: int) -> int:
        return value + 1

    with pytest.warns(DeprecationWarning, match=r"old is deprecated in 1\.2 and moved to elsewhere"):
        assert old(1) == 2


def test_yaml_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "model-config.yaml").write_text("handler: {depth: 2}")
    assert get_yaml_config(tmp_path / "model-config.yaml") == {"handler": {"depth": 2}}


def test_downloads_need_the_hubs_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"needs huggingface_hub, .*requirements"):
        hub.download_model("a/b")


def test_downloads_request_weights_and_tokenizer(archive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def snapshot_download(**arguments):\n    return arguments"
    monkeypatch.syspath_prepend(str(archive(huggingface_hub=source)))
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    arguments: Any = hub.download_model("a/b", "v1", "/cache", use_auth_token=False)
    assert (arguments["repo_id"], arguments["revision"], arguments["cache_dir"], arguments["token"]) == (
        "a/b",
        "v1",
        "/cache",
        False,
    )
    assert {"*.safetensors", "*.json"} <= set(arguments["allow_patterns"]) and "*.msgpack" not in arguments[
        "allow_patterns"
    ]
