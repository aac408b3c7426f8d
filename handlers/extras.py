"""The extras of the distribution ``torchrelay`` that install optional packages."""

from __future__ import annotations

import importlib.util

# The import name of a package -> the extra that installs it.
_EXTRAS = {
    "PIL": "server",
    "accelerate": "server",
    "captum": "server",
    "deepspeed": "deepspeed",
    "gcsfs": "gcs",
    "grpc": "server",
    "httptools": "load-test",
    "huggingface_hub": "hf",
    "llguidance": "llm",
    "mii": "mii",
    "mlflow": "mlflow",
    "model_signing": "signing",
    "nicegui": "console",
    "onnx": "export",
    "onnxruntime": "onnx",
    "onnxscript": "export",
    "pandas": "batch",
    "peft": "llm",
    "psutil": "server",
    "psycopg": "postgres",
    "pyarrow": "parquet",
    "ray": "server",
    "s3fs": "s3",
    "torch": "server",
    "transformers": "server",
}
_ALTERNATIVES = {"onnx": " (or 'torchrelay[gpu]' beside NVIDIA GPUs; never both)"}


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def find_package(module: str | None) -> str | None:
    """Return the package of ``module`` if an extra installs it, else None."""
    package = (module or "").partition(".")[0]
    return package if package in _EXTRAS else None


def install_command(package: str) -> str:
    """Return the ``pip`` command that installs ``package``."""
    extra = _EXTRAS[package]
    return f"pip install 'torchrelay[{extra}]'{_ALTERNATIVES.get(extra, '')}"
