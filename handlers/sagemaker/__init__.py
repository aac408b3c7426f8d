"""The modules of the package ``sagemaker_inference`` that scripts import, where it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys

PACKAGE = "sagemaker_inference"
_MODULES = ("content_types", "decoder", "encoder", "errors")


def install() -> None:
    """Make ``import sagemaker_inference`` import these modules in this process, unless it is installed."""
    if PACKAGE in sys.modules or importlib.util.find_spec(PACKAGE) is not None:
        return
    sys.modules[PACKAGE] = sys.modules[__name__]
    for name in _MODULES:
        sys.modules[f"{PACKAGE}.{name}"] = importlib.import_module(f"{__name__}.{name}")
