"""``torchrelay archive``: make model archives, with torch-model-archiver's options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from handlers import extras
from serve_app.model_store import signatures
from serve_app.model_store.archiver import (
    ArchiveRecipe,
    ArchiverError,
    Format,
    Runtime,
    WrittenArchive,
    make,
)
from serve_app.model_store.class_archive import ClassFile, class_recipe

_MAX_NAMES = 10  # of an archive's files that are printed


def file_option(*names: str, help: str) -> Any:
    return typer.Option(*names, metavar="FILE", help=help)


def archive(
    model: Annotated[
        str | None,
        typer.Argument(help="A file with a model class: model.py or model.py:ClassName."),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(help="The model's name; the archive is MODEL_NAME.mar. By default the stem of MODEL."),
    ] = None,
    version: Annotated[
        str | None, typer.Option("-v", "--version", help="The model's version; 1.0 for a MODEL.")
    ] = None,
    handler: Annotated[
        str | None,
        typer.Option(help="A built-in handler, or a file: handler.py or handler.py:function."),
    ] = None,
    serialized_file: Annotated[str | None, file_option(help="Weights, TorchScript or ONNX.")] = None,
    model_file: Annotated[str | None, file_option(help="The model's class, for eager weights.")] = None,
    extra_files: Annotated[
        str | None,
        typer.Option(metavar="A,B,…", help="Files, contents of folders, and patterns."),
    ] = None,
    runtime: Annotated[
        Runtime, typer.Option(help="As torch-model-archiver has it: python, python3 or LSP.")
    ] = "python",
    export_path: Annotated[
        str, typer.Option(metavar="DIR", help="The folder of the archive; by default the working directory.")
    ] = ".",
    archive_format: Annotated[
        Format, typer.Option(help="A .mar, an uncompressed .mar, a .tar.gz, or a plain folder.")
    ] = "default",
    force: Annotated[bool, typer.Option("-f", "--force", help="Overwrite an archive of that name.")] = False,
    requirements_file: Annotated[
        str | None, file_option("-r", "--requirements-file", help="Python packages of the model.")
    ] = None,
    config_file: Annotated[
        str | None, file_option("-c", "--config-file", help="Its model-config.yaml.")
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="An elliptic curve key in PEM; the signature is ARCHIVE.sig."),
    ] = None,
) -> None:
    """Make the archive of a model class, or one with the options of torch-model-archiver."""
    if model is None:
        options = {"--model-name": model_name, "--version": version, "--handler": handler}
        for option in [option for option, value in options.items() if value is None]:
            raise typer.BadParameter(
                "it is missing; name it, or a file with a model class", param_hint=option
            )
    elif handler is not None or model_file is not None:
        raise typer.BadParameter("the model class is the handler; leave out --handler and --model-file")
    recipe = ArchiveRecipe(
        model_name=model_name or Path((model or "").partition(":")[0]).stem,
        version=version or "1.0",
        handler=handler or "",
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
    with archiver_errors():
        made = make(recipe) if model is None else _make_of_class(model, recipe)
        print_archive(made, f"{recipe.model_name} {recipe.version}")
        if sign is not None:
            print(f"{_sign(made.path, sign).name}: its signature")


def _make_of_class(model: str, recipe: ArchiveRecipe) -> WrittenArchive:
    """Write the archive of a model class. Raises ArchiverError."""
    file = ClassFile.parse(model)
    description = file.inspect()
    with class_recipe(file, recipe, description) as complete:
        return make(complete)


def _sign(archive: Path, key: Path) -> Path:
    """Write the signature of an archive and return its path. Raises ArchiverError."""
    if not extras.is_installed("model_signing"):
        raise ArchiverError(f"--sign needs a package: {extras.install_command('model_signing')}")
    try:
        return signatures.sign(archive, key)
    except (ImportError, OSError, ValueError, TypeError) as error:  # TypeError: an encrypted key
        signature = archive.with_name(archive.name + signatures.SUFFIX)
        signature.unlink(missing_ok=True)
        raise ArchiverError(f"--sign {key}: {error}; name an unencrypted EC key in PEM") from None


@contextmanager
def archiver_errors() -> Iterator[None]:
    """Print an error of an archiver as torch-model-archiver does, and exit with 1."""
    try:
        yield
    except ArchiverError as error:
        print(f"ERROR - {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def print_archive(archive: WrittenArchive, contents: str) -> None:
    """Print what was written, and the warnings."""
    for warning in archive.warnings:
        print(f"WARNING - {warning}", file=sys.stderr)
    folder, path = Path.cwd(), archive.path
    shown = path.relative_to(folder) if path.is_relative_to(folder) else path
    names = list(archive.files[:_MAX_NAMES])
    if more := len(archive.files) - len(names):
        names.append(f"{more:,} more")
    print(f"{shown}: {contents}, with {', '.join(names)}")
