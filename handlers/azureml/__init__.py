"""The variables of Azure ML's scripts, and the modules that those with ``@rawhttp`` import."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

ENTRY_SCRIPT, APP_ROOT = "AZUREML_ENTRY_SCRIPT", "AML_APP_ROOT"
DEFAULT_SCRIPT, DEFAULT_ROOT = "score.py", "/var/azureml-app"
PACKAGES = ("azureml_inference_server_http.api", "azureml.contrib.services")
_MODULES = ("aml_request", "aml_response")


def install() -> None:
    """Make these packages importable in this process, unless they are installed."""
    for package in PACKAGES:
        try:
            importlib.import_module(f"{package}.{_MODULES[0]}")
        except ImportError:
            _add_package(package)
            for name in _MODULES:
                sys.modules[f"{package}.{name}"] = importlib.import_module(f"{__name__}.{name}")


def _add_package(name: str) -> None:
    """Add a package and its parents, as far as they are not installed."""
    try:
        importlib.import_module(name)
    except ImportError:
        if parent := name.rpartition(".")[0]:
            _add_package(parent)
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
