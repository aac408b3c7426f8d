"""``torchrelay new``: a project with a model class, its configuration, a sample, a test and a Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.terminal import console, fail

_TEMPLATE = Path(__file__).parents[1] / "project_template"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_PLACEHOLDER = re.compile(r"\bNAME\b")


def new(
    name: Annotated[str, typer.Argument(help="The project's folder, whose name is that of the model.")],
) -> None:
    """Create a project: model.py, model-config.yaml, a sample, a test, a Dockerfile and a README."""
    folder = Path(name)
    if not _NAME.fullmatch(folder.name):
        fail(
            f"{name} cannot be a model's name: use letters, digits, '_', '-' and '.', and begin with no sign."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} exists already; name another folder, or remove it.")
    try:
        create_project(folder)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    console.print(f"{folder} has a model class, its test and its Dockerfile. Next:\n", highlight=False)
    for command in (
        f"cd {folder}",
        "pip install pytest && python -m pytest",
        f"torchrelay serve model.py --name {folder.name} --reload",
    ):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


def create_project(folder: Path) -> None:
    """Write the template's files into ``folder``, with its name in place of NAME."""
    for source in sorted(_TEMPLATE.rglob("*")):
        if not source.is_file() or "__pycache__" in source.parts:
            continue
        target = folder / source.relative_to(_TEMPLATE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_PLACEHOLDER.sub(folder.name, source.read_text()))
