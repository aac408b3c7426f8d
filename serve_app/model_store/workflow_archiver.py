"""Making a workflow archive: the layout and the manifest of torch-workflow-archiver, checked before it is written."""

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
from serve_app.store import war
from serve_app.store.archiver import Archive, ArchiverError

ARCHIVER = "0.2.15"  # whose manifests these are

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")


@dataclass(frozen=True)
class WarRecipe:
    """What goes into a workflow archive: torch-workflow-archiver's options by their names."""

    workflow_name: str
    spec_file: str
    handler: str | None = None  # the file of its functions
    export_path: str = "."
    extra_files: str | None = None  # with commas between them
    force: bool = False


def make(recipe: WarRecipe) -> Archive:
    """The archive of a recipe. Raises ArchiverError, and leaves no half of one behind."""
    if not _NAME.fullmatch(recipe.workflow_name):
        raise ArchiverError(
            "Workflow name contains special characters.\n"
            r"The allowed regular expression filter for workflow name is: ^[A-Za-z0-9][A-Za-z0-9_\-.]*$"
        )
    export = Path(recipe.export_path)
    if not export.is_dir():
        raise ArchiverError(
            f"Given export-path {recipe.export_path} is not a directory. Point to a valid export-path directory."
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
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
            for name, file in files.items():
                archive.write(file, name)
            archive.writestr(war.MANIFEST, manifest(recipe))
        whole.replace(path)
    except OSError as error:
        raise ArchiverError(f"{error.filename or path}: {error.strerror}") from None
    finally:
        whole.unlink(missing_ok=True)
    return Archive(path, len(files), tuple(warnings))


def manifest(recipe: WarRecipe) -> str:
    """The text of WAR-INF/MANIFEST.json."""
    said = {"workflowName": recipe.workflow_name, "specFile": os.path.basename(recipe.spec_file)}
    if recipe.handler:
        said["handler"] = os.path.basename(recipe.handler)
    created = datetime.now().strftime("%d/%m/%Y %H:%M:%S")
    return json.dumps({"createdOn": created, "workflow": said, "archiverVersion": ARCHIVER}, indent=2)


def _files(recipe: WarRecipe) -> Iterator[Path]:
    named = (("--spec-file", recipe.spec_file), ("--handler", recipe.handler or ""))
    extra = (("--extra-files", part.strip()) for part in (recipe.extra_files or "").split(","))
    for option, name in (*named, *extra):
        if name:
            path = Path(name)
            if not path.is_file():
                what = "a directory; name a file" if path.is_dir() else "not there"
                raise ArchiverError(f"{option} {name} is {what}")
            yield path


def _check(recipe: WarRecipe, files: dict[str, Path]) -> None:
    """Whatever a server would refuse is refused here."""
    spec = Path(recipe.spec_file)
    try:
        found = war.graph_of(recipe.workflow_name, war.parse(spec.read_bytes(), str(spec)), str(spec))[0]
        war.check_handler(files.get(Path(recipe.handler).name) if recipe.handler else None, found, str(spec))
    except InvalidWorkflow as error:
        raise ArchiverError(str(error)) from None
