"""Creation of workflow archives with the layout and manifest of torch-workflow-archiver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serve_app.errors import InvalidWorkflow
from serve_app.model_store import archiver, workflow_archive
from serve_app.model_store.archiver import ArchiverError, WrittenArchive

ARCHIVER = "0.2.15"  # the version in the manifests


@dataclass(frozen=True)
class WorkflowArchiveRecipe:
    """The contents of a workflow archive: torch-workflow-archiver's options by name."""

    workflow_name: str
    spec_file: str
    handler: str | None = None  # the file of its functions
    export_path: str = "."
    extra_files: str | None = None  # with commas between them
    force: bool = False


def make(recipe: WorkflowArchiveRecipe) -> WrittenArchive:
    """Write the archive of a recipe. Raises ArchiverError, and leaves no partial archive."""
    path, warnings = archiver.output_path(
        "workflow", recipe.workflow_name, ".war", recipe.export_path, recipe.force
    )
    files = {file.name: file for file in _files(recipe)}
    _check(recipe, files)
    archiver.write_zip(path, files, {workflow_archive.MANIFEST: manifest(recipe)})
    return WrittenArchive(path, tuple(files), tuple(warnings))


def manifest(recipe: WorkflowArchiveRecipe) -> str:
    """Return the text of WAR-INF/MANIFEST.json."""
    workflow = {"workflowName": recipe.workflow_name, "specFile": os.path.basename(recipe.spec_file)}
    if recipe.handler:
        workflow["handler"] = os.path.basename(recipe.handler)
    return archiver.manifest_text(ARCHIVER, workflow=workflow)


def _files(recipe: WorkflowArchiveRecipe) -> Iterator[Path]:
    named = (("--spec-file", recipe.spec_file), ("--handler", recipe.handler or ""))
    extra = (("--extra-files", part.strip()) for part in (recipe.extra_files or "").split(","))
    for option, name in (*named, *extra):
        if name:
            path = Path(name)
            if not path.is_file():
                what = "a directory; name a file" if path.is_dir() else "missing"
                raise ArchiverError(f"{option} {name} is {what}")
            yield path


def _check(recipe: WorkflowArchiveRecipe, files: dict[str, Path]) -> None:
    """Raise ArchiverError for a workflow that a server would refuse."""
    spec = Path(recipe.spec_file)
    try:
        graph = workflow_archive.build_graph(
            recipe.workflow_name, workflow_archive.parse(spec.read_bytes(), str(spec)), str(spec)
        )[0]
        workflow_archive.check_handler(
            files.get(Path(recipe.handler).name) if recipe.handler else None, graph, str(spec)
        )
    except InvalidWorkflow as error:
        raise ArchiverError(str(error)) from None
