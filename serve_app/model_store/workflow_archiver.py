"""Creation of workflow archives with the layout and manifest of torch-workflow-archiver."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from serve_app.errors import InvalidWorkflow
from serve_app.model_store import workflow_archive
from serve_app.model_store.archiver import ArchiverError, WrittenArchive

ARCHIVER = "0.2.15"  # the version in the manifests

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")


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
    if not _NAME.fullmatch(recipe.workflow_name):
        raise ArchiverError(
            "Workflow name contains special characters.\n"
            r"The allowed regular expression filter for workflow name is: ^[A-Za-z0-9][A-Za-z0-9_\-.]*$"
        )
    export = Path(recipe.export_path)
    if not export.is_dir():
        raise ArchiverError(
            f"Given export-path {recipe.export_path} is not a directory. "
            "Point to a valid export-path directory."
        )
    path = export.resolve() / f"{recipe.workflow_name}.war"
    warnings = []
    if path.exists():
        if not recipe.force:
            raise ArchiverError(
                f"{path} already exists.\nPlease specify --force/-f option to overwrite the workflow archive "
                "output file.\nSee -h/--help for more details."
            )
        warnings.append(f"Overwriting {path} ...")
    files = {file.name: file for file in _files(recipe)}
    _check(recipe, files)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            for name, file in files.items():
                archive.write(file, name)
            archive.writestr(workflow_archive.MANIFEST, manifest(recipe))
        partial.replace(path)
    except OSError as error:
        raise ArchiverError(f"{error.filename or path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    return WrittenArchive(path, len(files), tuple(warnings))


def manifest(recipe: WorkflowArchiveRecipe) -> str:
    """Return the text of WAR-INF/MANIFEST.json."""
    workflow = {"workflowName": recipe.workflow_name, "specFile": os.path.basename(recipe.spec_file)}
    if recipe.handler:
        workflow["handler"] = os.path.basename(recipe.handler)
    created = datetime.now().strftime("%d/%m/%Y %H:%M:%S")
    return json.dumps({"createdOn": created, "workflow": workflow, "archiverVersion": ARCHIVER}, indent=2)


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
