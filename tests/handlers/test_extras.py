"""Tests of the extras that error messages name."""

from __future__ import annotations

import sys
from importlib.metadata import distribution, metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from handlers import extras
from handlers.errors import HandlerLoadError
from handlers.loading import weights

# Packages whose distribution has another name.
DISTRIBUTIONS = {"PIL": "pillow", "grpc": "grpcio", "mii": "deepspeed-mii", "mlflow": "mlflow-skinny"}


@pytest.mark.parametrize("package", extras._EXTRAS)
def test_each_extra_requires_the_package_that_it_installs(package: str) -> None:
    extra = extras._EXTRAS[package]
    assert extra in (metadata("torchrelay").get_all("Provides-Extra") or ())
    required = map(Requirement, distribution("torchrelay").requires or ())
    marked = [found for found in required if found.marker and found.marker.evaluate({"extra": extra})]
    names = {canonicalize_name(found.name) for found in marked}
    assert canonicalize_name(DISTRIBUTIONS.get(package, package)) in names


def test_a_graph_without_onnx_runtime_fails_with_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "handlers.onnx_model", raising=False)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(HandlerLoadError, match=r"pip install 'torchrelay\[onnx\]' \(or 'torchrelay\[gpu\]'"):
        weights.load(tmp_path / "model.onnx", torch.device("cpu"))
