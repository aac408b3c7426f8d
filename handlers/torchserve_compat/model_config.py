"""The file model-config.yaml of an archive."""

from __future__ import annotations

import os
from typing import Any

from handlers import untrusted_files


def get_yaml_config(yaml_file_path: str | os.PathLike[str]) -> Any:
    """Return the parsed YAML file. Raises ValueError where it is not YAML."""
    with open(yaml_file_path, encoding="utf-8") as file:
        return untrusted_files.load_yaml(file.read())
