"""What may be installed beside PyTorch, and the small things that archives import."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import handlers
from handlers import compilation, extensions, hub
from handlers.base import BaseHandler
from handlers.context import Context
from handlers.deprecation import deprecated
from handlers.model_config import get_yaml_config

ROOT = Path(__file__).parents[2]
MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""


def test_the_extension_for_intel_optimizes_where_the_environment_says_so(archive: Any) -> None:
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
    printed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"TS_IPEX_ENABLE": "true", "PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert printed == ["list", "OptimizedModule"]
    assert extensions.IPEX_AVAILABLE is False, "and only there"


def test_backends_register_themselves(archive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = archive(model=MODEL, torch_tensorrt="import builtins\nbuiltins.registered_tensorrt = True")
    monkeypatch.syspath_prepend(str(directory))
    BaseHandler().initialize(Context("m", str(directory), {"model": {"modelFile": "model.py"}}))
    import builtins

    assert builtins.registered_tensorrt
    del builtins.registered_tensorrt


def test_backends_by_name(caplog: pytest.LogCaptureFixture) -> None:
    assert compilation.check_valid_pt2_backend("inductor") and compilation.PT2Backend.INDUCTOR == "inductor"
    assert compilation.PT2Backend("hpu_backend") is compilation.PT2Backend.HPU_BACKEND
    assert not compilation.check_valid_pt2_backend("nothing") and "nothing" in caplog.text


@pytest.mark.parametrize(
    ("pt2", "asked"),
    [
        ({"export": {"aot_compile": True}}, True),
        ({"export": {"aot_compile": "yes"}}, False),
        ({"compile": {"enable": True}}, False),
        ("inductor", False),
        (None, False),
    ],
)
def test_whether_the_weights_are_compiled_code(pt2: Any, asked: bool) -> None:
    handler = BaseHandler()
    assert not handler._use_torch_export_aot_compile()
    handler.model_yaml_config = {"pt2": pt2}
    assert handler._use_torch_export_aot_compile() is asked


def test_compiled_code_is_loaded_and_run(tmp_path: Path, begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes half a minute, so what PyTorch's loader would give stands in for it."""
    monkeypatch.setattr(torch._export, "aot_load", lambda file, device: lambda data: data * len(file[-8:] + device))
    manifest = {"model": {"serializedFile": "model.so"}}
    entry = handlers.load("base_handler", tmp_path, manifest)
    config = {"pt2": {"export": {"aot_compile": True}}}
    entry.initialize(Context("m", str(tmp_path), manifest, model_yaml_config=config))
    assert entry([{"body": [1.0]}, {"body": [2.0]}], begin(entry.instance.context, 2)) == [[11.0], [22.0]]


def test_deprecated() -> None:
    @deprecated("1.2", "elsewhere", DeprecationWarning)
    def old(value: int) -> int:
        return value + 1

    with pytest.warns(DeprecationWarning, match=r"old is deprecated in 1\.2 and moved to elsewhere"):
        assert old(1) == 2


def test_yaml(tmp_path: Path) -> None:
    (tmp_path / "model-config.yaml").write_text("handler: {depth: 2}")
    assert get_yaml_config(tmp_path / "model-config.yaml") == {"handler": {"depth": 2}}


def test_downloading_needs_the_hubs_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="needs huggingface_hub, .*requirements"):
        hub.download_model("a/b")


def test_what_is_downloaded(archive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def snapshot_download(**asked):\n    return asked"
    monkeypatch.syspath_prepend(str(archive(huggingface_hub=source)))
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    asked: Any = hub.download_model("a/b", "v1", "/cache", use_auth_token=False)
    assert (asked["repo_id"], asked["revision"], asked["cache_dir"], asked["token"]) == ("a/b", "v1", "/cache", False)
    assert {"*.safetensors", "*.json"} <= set(asked["allow_patterns"]) and "*.msgpack" not in asked["allow_patterns"]
