"""``torchrelay optimize``: time variants of an archive's model, and write the fastest as a new version."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from serve_app.cli import progress
from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token
from serve_app.cli.store_copy import add_to_store
from serve_app.cli.terminal import console, fail
from serve_app.cli.variant_search import (
    VARIANTS,
    VariantSearchError,
    find_archive,
    find_samples,
    manifest_document,
    next_version,
    parse_tolerance,
    parse_variants,
    read_archive,
    run_variant_search,
)
from serve_app.errors import RelayError
from serve_app.model_store.cache import pack
from serve_app.settings import ModelStoreSettings


def optimize(
    model: Annotated[
        str, typer.Argument(metavar="ARCHIVE_OR_MODEL", help="A .mar, or a model of the running server.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the new archive.")] = Path("."),
    version: Annotated[str | None, typer.Option(help="The new version; by default the next one.")] = None,
    register: Annotated[
        bool, typer.Option("--register", help="Register the new version with the server.")
    ] = False,
    sample: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A sample request; by default the archive's own samples."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="By default the model's own, or 8.")] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            help="The relative tolerance; by default that under accuracy: in the model-config.yaml."
        ),
    ] = None,
    atol: Annotated[float | None, typer.Option(help="The absolute tolerance.")] = None,
    cosine: Annotated[float | None, typer.Option(help="The minimum cosine of a row.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="accuracy or f1: compare variants by it, on the samples of --labels.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Lines of {input, label} as .jsonl, or JSON with the samples' labels."
        ),
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="The allowed loss of the metric; by default 0.01.")
    ] = None,
    variants: Annotated[str, typer.Option("--try", metavar="A,B,…", help="The variants to try.")] = ",".join(
        VARIANTS
    ),
    rounds: Annotated[
        int, typer.Option(min=1, help="The number of timings of each variant, interleaved.")
    ] = 7,
    threads: Annotated[
        int | None, typer.Option(min=1, help="The threads of PyTorch and ONNX Runtime.")
    ] = None,
    model_store: Annotated[Path, typer.Option(help="The folder of the server's archives.")] = Path(
        "model_store"
    ),
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Time an archive's model in other number formats, compiled and as a graph; write the fastest variant."""
    names = parse_variants(variants)
    if (metric is None) != (labels is None):
        fail("--metric and --labels go together; pass both.")
    if labels is not None and not labels.is_file():
        fail(f"There is no file {labels}.")
    if not output.is_dir():
        fail(f"{output} is not a folder; create it, or choose another one with --output.")
    path, served = find_archive(model, model_store, CliClient(management, token))
    with tempfile.TemporaryDirectory(prefix="torchrelay-optimize-") as temporary:
        work = Path(temporary)
        try:
            archive, config = read_archive(path, served, work)
        except RelayError as error:
            fail(str(error))
        manifest = archive.manifest
        new_version = version or next_version(
            manifest.version, {version["modelVersion"] for version in served}
        )
        target = output / f"{manifest.model_name}-{new_version}.mar"
        if target.exists():
            fail(f"{target} exists already; choose another version with --version, or folder with --output.")
        (work / "variants").mkdir()
        job = {
            "directory": str(archive.directory),
            "work": str(work / "variants"),
            "manifest": manifest_document(manifest, new_version),
            "config": dict(config.raw),
            "handler": manifest.handler,
            "samples": find_samples(archive.directory, config, sample or [], "--sample"),
            "batch_size": batch_size or config.batch_size or 8,
            "metric": {"metric": metric, "max_drop": max_drop} if metric else {},
            "labels": str(labels.resolve()) if labels else None,
            "tolerance": parse_tolerance(config, rtol, atol, cosine),
            "variants": names,
            "rounds": rounds,
            "threads": threads,
        }
        try:
            results = run_variant_search(job)
        except VariantSearchError as error:
            fail(str(error))
        console.print(table(f"{manifest.model_name} {manifest.version}", results))
        for name, reason in results["failed"].items():
            console.print(f"  {name}: {escape(reason)}", highlight=False, soft_wrap=True)
        if results["directory"] is None:
            console.print(
                "Nothing within the tolerance is faster than the plain model: no archive is written."
            )
            return
        pack(Path(results["directory"]), target, ModelStoreSettings())
        trusts_graph = any(
            Path(results["directory"]).glob("*.pt2")
        )  # it was made here, of code that ran here
    console.print(
        f"{target}: {manifest.model_name} {new_version}, {results['best']}", highlight=False, soft_wrap=True
    )
    if register:
        with CliClient(management, token) as client:
            url = add_to_store(str(target.resolve()), model_store)
            message = progress.register(
                client, console, url, initial_workers=1, trusted=trusts_graph or None, synchronous=True
            )
            console.print(message)
    else:
        option = " --trusted" if trusts_graph else ""
        console.print(
            f"  torchrelay models register {target.resolve()}{option}", highlight=False, soft_wrap=True
        )


def table(title: str, results: dict[str, Any]) -> Table:
    """Return a table of the variants; times are medians of the rounds, × is the speed-up over plain."""
    sizes = list(results["variants"][0]["ms"])
    caption = f"{results['samples']} samples, {results['threads']} threads"
    made = Table(
        title=title, caption=caption, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    made.add_column("variant", no_wrap=True)
    for size in sizes:
        made.add_column(f"batch {size}\nms", justify="right", no_wrap=True)
        made.add_column("\n×", justify="right", no_wrap=True)
    for name in ("weights\nMiB", "off by\nat most", "lowest\ncosine"):
        made.add_column(name, justify="right", no_wrap=True)
    has_metric = any(row.get("metric") is not None for row in results["variants"])
    if has_metric:
        made.add_column("metric", justify="right", no_wrap=True)
    made.add_column("ok")
    plain = results["variants"][0]["ms"]
    for row in results["variants"]:
        cells = [f"[bold]{row['name']}" if row["name"] == results["best"] else row["name"]]
        for size in sizes:
            cells += [f"{row['ms'][size]:.2f}", f"{plain[size] / row['ms'][size]:.2f}"]
        cells += [f"{row['mib']:.1f}"]
        cells += ["not finite" if row["largest"] is None else f"{row['largest']:.2g}", f"{row['cosine']:.5f}"]
        cells += [f"{row['metric']:.4f}"] if has_metric else []
        made.add_row(*cells, "[red]no" if row["outside"] else "[green]yes")
    return made
