"""The file model-config.yaml of an archive."""

from __future__ import annotations

import os
from typing import Any

import yaml


def get_yaml_config(yaml_file_path: str | os.PathLike[str]) -> Any:
    """Return the parsed YAML file."""
    with open(yaml_file_path, encoding="utf-8") as file:
        return yaml.safe_load(file)
