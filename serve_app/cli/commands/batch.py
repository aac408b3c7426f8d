"""``torchrelay batch``: predict the rows of files with an archive's model, on Ray Data."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from handlers import extras
from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token
from serve_app.cli.app_config import read_config
from serve_app.cli.errors import StartError, require_server
from serve_app.cli.terminal import console, fail
from serve_app.cli.variant_search import find_archive
from serve_app.domain.model import ModelSpec, Registration
from serve_app.errors import RelayError
from serve_app.settings import Settings

_EXTRA_PACKAGES = ("pandas", "pyarrow")  # what Ray Data needs beside the extra `server`
_BATCH_SIZE = 8
_BLOCK_ROWS = 1000


def batch(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A .mar, a URL, or a model of the running server.")
    ],
    source: Annotated[
        str,
        typer.Argument(metavar="INPUT", help="A .jsonl or .parquet file, a folder or pattern; s3://… too."),
    ],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="The folder of the results; s3://… too.")],
    column: Annotated[
        str | None, typer.Option(help="The column that is a row's input; by default the whole row as JSON.")
    ] = None,
    output_format: Annotated[
        str | None, typer.Option("--format", help="jsonl or parquet; by default that of the input.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="By default the model's own, or 8.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Processes that have the model.")] = 1,
    num_gpus: Annotated[
        float | None, typer.Option(min=0.0, help="GPUs of each; by default num_gpus of the archive.")
    ] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Rows of a file of results, which a continued job does not repeat.")
    ] = _BLOCK_ROWS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard the results in OUTPUT.")] = False,
    config: Annotated[Path | None, typer.Option(help="The app.yaml with the settings of stores.")] = None,
    model_store: Annotated[Path | None, typer.Option(help="The folder of the server's archives.")] = None,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Predict all rows of INPUT and write a result or an error for each; the same command continues a job."""
    _require_packages()
    from serve_app.batch_prediction.blocks import BatchInputError, Format, open_input, split_blocks
    from serve_app.batch_prediction.results import BatchOutputError, ResultFolder
    from serve_app.deployments.batch_job import BatchJob, BatchJobFailed, run_batch_job

    if output_format not in (None, "jsonl", "parquet"):
        fail(f"--format {output_format}: write jsonl or parquet")
    _, settings = read_config(config)
    input_options, output_options = (_store_options(path, settings) for path in (source, output))
    with tempfile.TemporaryDirectory(prefix="torchrelay-batch-") as temporary:
        try:
            found = open_input(source, input_options)
            blocks = list(split_blocks(found, block_size, input_options))
            result_format = cast(Format, output_format or found.format)
            folder = ResultFolder(output, result_format, output_options)
            spec, directory, archive = _open_model(
                model, Path(temporary), settings, model_store, CliClient(management, token)
            )
            spec = _adapt(spec, batch_size, num_gpus, block_size)
            document = {
                "model": f"{spec.name} {spec.version} {spec.digest}",
                "input": [list(pair) for pair in zip(found.files, found.identity)],
                "column": column,
                "block_size": block_size,
                "format": result_format,
            }
            done = folder.open(document, overwrite)
        except (BatchInputError, BatchOutputError, RelayError) as error:
            fail(str(error))
        job = BatchJob(
            spec,
            directory,
            archive,
            settings,
            column,
            output,
            result_format,
            input_options,
            output_options,
            concurrency,
        )
        pending = [block for block in blocks if block.index not in done]
        total = sum(block.rows for block in blocks)
        rows, errors = total - sum(block.rows for block in pending), 0
        if rows:
            console.print(f"{rows:,} of {total:,} rows are done already.", highlight=False)
        try:
            with _progress() as bars:
                bar = bars.add_task("rows", total=total, completed=rows, errors="")
                for report in run_batch_job(job, pending) if pending else ():
                    rows, errors = rows + report.rows, errors + report.errors
                    bars.update(bar, completed=rows, errors=f"{errors:,} errors" if errors else "")
        except BatchJobFailed as error:
            fail(f"{error}\n{rows:,} of {total:,} rows are done; the same command continues.")
        except KeyboardInterrupt:
            console.print(
                f"{rows:,} of {total:,} rows are done; the same command continues.", highlight=False
            )
            raise typer.Exit(130) from None
    console.print(f"{output}: {rows:,} rows, {errors:,} errors in this run", highlight=False, soft_wrap=True)


def _require_packages() -> None:
    """Exit where the extras `server` and `batch` are not installed."""
    try:
        require_server()
    except StartError as error:
        fail(str(error))
    if missing := [package for package in _EXTRA_PACKAGES if not extras.is_installed(package)]:
        command = extras.install_command(_EXTRA_PACKAGES[0])
        fail(f"Ray Data needs {', '.join(missing)}, not installed in this environment: {command}")


def _store_options(path: str, settings: Settings) -> dict[str, Any]:
    """Return ``store.storage_options`` of the scheme; exit where its file system is not installed."""
    from serve_app.model_store import object_stores

    scheme = path.partition("://")[0] if "://" in path else ""
    if scheme in object_stores.EXTRAS and not object_stores.is_installed(scheme):
        fail(f"{path}: its file system is missing: pip install 'torchrelay[{object_stores.EXTRAS[scheme]}]'")
    return dict(settings.store.storage_options.get(scheme, {}))


def _open_model(
    model: str, work: Path, settings: Settings, store: Path | None, client: CliClient
) -> tuple[ModelSpec, Path, Path]:
    """Return the spec of a model, its unpacked directory and its packed archive. Raises RelayError."""
    from serve_app.control.archive_ingestion import build_spec
    from serve_app.model_store.archive import Archive
    from serve_app.model_store.cache import ArchiveCache
    from serve_app.model_store.model_check import check_model
    from serve_app.model_store.sources import fetch, file_path

    served: list[dict[str, Any]] = []
    if "://" in model:
        (work / "download").mkdir()
        path = fetch(model, settings.store, settings.model_store, work / "download", by_operator=True)
    else:
        path, served = find_archive(model, store or settings.model_store, client)
    cached = ArchiveCache(work / "cache", settings.store).store(path.resolve(), path.name)
    archive = Archive.read(cached.directory, path.name, settings.store.default_service_handler)
    archive = dataclasses.replace(archive, digest=cached.digest, uri=cached.uri, size=cached.size)
    task = None
    if served:  # the registration may have overridden the archive
        archive = archive.with_names(model_name=served[0]["modelName"], version=served[0]["modelVersion"])
        task = served[0].get("task")
    # The model runs on its user's own machine, who trusts the archive's configuration.
    config = check_model(archive, task, archive.config.trusted is True)
    packed = file_path(cached.uri)
    assert packed is not None
    spec = build_spec(Registration(packed.name), archive, config, settings, at_startup=False)
    return spec, cached.directory, packed


def _adapt(spec: ModelSpec, batch_size: int | None, num_gpus: float | None, rows: int) -> ModelSpec:
    """Return the spec with the options of the command; exit where the model needs a server."""
    if spec.sequence_batching:
        fail(f"{spec.name}: sequenceBatching: rows of a file belong to no sequence; serve the model instead")
    if spec.ranks > 1:
        fail(f"{spec.name}: tensor_parallel and pipeline_parallel need a server; serve the model instead")
    size = batch_size or (spec.batch_size if spec.batch_size > 1 else _BATCH_SIZE)
    return spec.with_(
        batch_size=size,
        max_batch_delay=None,
        job_queue_size=max(rows, size),
        use_job_ticket=False,
        num_gpus=spec.num_gpus if num_gpus is None else num_gpus,
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[errors]}", style="red"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
