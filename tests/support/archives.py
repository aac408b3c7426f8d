"""Model archives, and the source of small handlers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import yaml


def make_archive(
    folder: Path,
    name: str,
    handler: str,
    version: str = "1.0",
    files: dict[str, str | bytes] | None = None,
    config: dict[str, Any] | None = None,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """Create ``name-version.mar`` in ``folder``, whose handler.py is ``handler``.

    ``manifest`` has further keys of the manifest's model.
    """
    model = {"modelName": name, "modelVersion": version, "handler": "handler.py", **(manifest or {})}
    contents: dict[str, str | bytes] = {"handler.py": handler, **(files or {})}
    if config is not None:
        model["configFile"] = "model-config.yaml"
        contents["model-config.yaml"] = yaml.safe_dump(config)
    contents["MAR-INF/MANIFEST.json"] = json.dumps(
        {"runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    )
    path = folder / f"{name}-{version}.mar"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in contents.items():
            archive.writestr(file, content)
    return path


def archive_language_model(folder: Path, name: str, model: Path, **engine: Any) -> Path:
    """Create ``name-1.0.mar`` in ``folder`` of a model's folder, for the handler llm with these options."""
    files: dict[str, str | bytes] = {file.name: file.read_bytes() for file in model.iterdir()}
    return make_archive(folder, name, "", "1.0", files, {"engine": engine}, {"handler": "llm"})


ECHO = """
def handle(data, context):
    if data is None:
        return None
    return [row.get("body") or row.get("data") for row in data]
"""


def says(word: str) -> str:
    """Return the source of a handler that answers with ``word``."""
    return f"""
def handle(data, context):
    return None if data is None else [{word!r}] * len(data)
"""
