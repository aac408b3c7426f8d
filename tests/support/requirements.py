"""Conditions under which a test is skipped: a program, package or device that is missing here."""

from __future__ import annotations

import importlib.util
import shutil

import pytest


def needs_program(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}")


def needs_no_package(name: str) -> pytest.MarkDecorator:
    """Return the mark of a test of the error where a package is missing."""
    installed = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(installed, reason=f"needs an environment without {name}")


def require_onnx_on_gpu() -> None:
    """Skip the running test where ONNX Runtime is the package for CPUs."""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
