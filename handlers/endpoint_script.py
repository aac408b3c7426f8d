"""The file and the class of a custom handler of Inference Endpoints, which variables may rename."""

from __future__ import annotations

import os
from collections.abc import Mapping

FILE, CLASS = "HF_DEFAULT_PIPELINE_NAME", "HF_MODULE_NAME"
_DEFAULT_FILE, _DEFAULT_CLASS = "handler.py", "EndpointHandler"


def file_name(environment: Mapping[str, str] = os.environ) -> str:
    return environment.get(FILE) or _DEFAULT_FILE


def class_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the class, which the variable names after the module: ``handler.EndpointHandler``."""
    return (environment.get(CLASS) or _DEFAULT_CLASS).rpartition(".")[2]
