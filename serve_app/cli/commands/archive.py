"""``torchrelay archive``: torch-model-archiver's options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from serve_app.store.archiver import ArchiverError, Format, Recipe, Runtime, make


def file_option(*names: str, help: str) -> Any:
    return typer.Option(*names, metavar="FILE", help=help)


def archive(
    model_name: Annotated[str, typer.Option(help="The archive's name too: MODEL_NAME.mar.")],
    version: Annotated[str, typer.Option("-v", "--version", help="The model's version.")],
    handler: Annotated[str, typer.Option(help="A built-in handler, or a file: handler.py or handler.py:function.")],
    serialized_file: Annotated[Optional[str], file_option(help="Weights, TorchScript or ONNX.")] = None,  # noqa: UP045
    model_file: Annotated[Optional[str], file_option(help="The model's class, for eager weights.")] = None,  # noqa: UP045
    extra_files: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="A,B,…", help="Files, folders and patterns; of folders, what is in them."),
    ] = None,
    runtime: Annotated[Runtime, typer.Option()] = "python",
    export_path: Annotated[str, typer.Option(metavar="DIR", help="Where it goes; here, without a word.")] = ".",
    archive_format: Annotated[
        Format, typer.Option(help="A .mar, one that is not compressed, a .tar.gz, or a plain folder.")
    ] = "default",
    force: Annotated[bool, typer.Option("-f", "--force", help="Write over an archive of that name.")] = False,
    requirements_file: Annotated[
        Optional[str], file_option("-r", "--requirements-file", help="Python packages of its own.")  # noqa: UP045
    ] = None,
    config_file: Annotated[
        Optional[str], file_option("-c", "--config-file", help="Its model-config.yaml.")  # noqa: UP045
    ] = None,
) -> None:
    """Make a model archive, with the options of torch-model-archiver."""
    recipe = Recipe(
        model_name=model_name,
        version=version,
        handler=handler,
        serialized_file=serialized_file,
        model_file=model_file,
        extra_files=extra_files,
        runtime=runtime,
        export_path=export_path,
        archive_format=archive_format,
        force=force,
        requirements_file=requirements_file,
        config_file=config_file,
    )
    try:
        made = make(recipe)
    except ArchiverError as error:
        print(f"ERROR - {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for warning in made.warnings:
        print(f"WARNING - {warning}", file=sys.stderr)
    print(f"{shown_path(made.path)}: {model_name} {version}, {made.files} files and the manifest")


def shown_path(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
