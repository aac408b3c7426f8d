"""``torchrelay optimize``: an archive's model in other forms, timed side by side, and the best one as a new version."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.cli import progress
from serve_app.cli.talk import MANAGEMENT, ManagementUrl, Talk, Token, console, errors
from serve_app.errors import RelayError
from serve_app.settings import StoreSettings
from serve_app.store.archive import pack, unpack
from serve_app.store.manifest import HUGGING_FACE, Manifest, ModelConfig, check

VARIANTS = (
    "plain", "bfloat16", "int8", "compile", "compile-bfloat16", "channels-last", "onnx", "onnx-int8", "torchscript",
    "export", "aotinductor",
)  # fmt: skip


def optimize(
    model: Annotated[str, typer.Argument(metavar="ARCHIVE_OR_MODEL", help="A .mar, or a model of the running server.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the new archive goes.")] = Path("."),
    version: Annotated[Optional[str], typer.Option(help="The new version; one more, without a word.")] = None,  # noqa: UP045
    register: Annotated[bool, typer.Option("--register", help="Register the new version with the server.")] = False,
    sample: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(metavar="FILE", help="A request to try it with; the archive's own samples, without one."),
    ] = None,
    batch_size: Annotated[Optional[int], typer.Option(min=1, help="The model's own, or 8.")] = None,  # noqa: UP045
    rtol: Annotated[Optional[float], typer.Option(help="As under accuracy: in its model-config.yaml.")] = None,  # noqa: UP045
    atol: Annotated[Optional[float], typer.Option(help="The same.")] = None,  # noqa: UP045
    cosine: Annotated[Optional[float], typer.Option(help="The lowest cosine of a row.")] = None,  # noqa: UP045
    variants: Annotated[str, typer.Option("--try", metavar="A,B,…", help="Of them.")] = ",".join(VARIANTS),
    rounds: Annotated[int, typer.Option(min=1, help="How often each is timed, one after another.")] = 7,
    threads: Annotated[Optional[int], typer.Option(min=1, help="Of PyTorch and ONNX Runtime.")] = None,  # noqa: UP045
    model_store: Annotated[Path, typer.Option(help="Where archives of the server's models lie.")] = Path("model_store"),
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Try an archive's model in other number formats, compiled and as an ONNX graph; write the best as a new one."""
    wanted = [name.strip() for name in variants.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in VARIANTS]:
        _refuse(f"There is no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}.")
    if not output.is_dir():
        _refuse(f"{output} is no folder; make it, or name another one with --output.")
    archive, served = _archive(model, model_store, management, token)
    settings = StoreSettings()
    with tempfile.TemporaryDirectory(prefix="torchrelay-optimize-") as temporary:
        work = Path(temporary)
        try:
            directory = archive.resolve() if archive.is_dir() else unpack(archive, work / "archive", settings)
            manifest = Manifest.read(directory, archive.name)
            if served:  # a registration may have said other than the archive
                manifest = replace(manifest, model_name=served[0]["modelName"], version=served[0]["modelVersion"])
            config = check(directory, manifest, served[0].get("task") if served else None)
        except RelayError as error:
            _refuse(str(error))
        if served and manifest.handler == HUGGING_FACE and "task" not in served[0]:
            _refuse(f"{model} was registered with a handler of its own. Name its archive, {archive}, instead.")
        new = version or _next(manifest.version, {one["modelVersion"] for one in served})
        target = output / f"{manifest.model_name}-{new}.mar"
        if target.exists():
            _refuse(f"{target} is there already; name another version with --version, or another folder with --output.")
        (work / "variants").mkdir()
        job = {
            "directory": str(directory),
            "work": str(work / "variants"),
            "manifest": _raw(manifest, new),
            "config": dict(config.raw),
            "handler": manifest.handler,
            "samples": _samples(directory, config, sample or []),
            "batch_size": batch_size or config.batch_size or 8,
            "tolerance": _tolerance(config, rtol, atol, cosine),
            "variants": wanted,
            "rounds": rounds,
            "threads": threads,
        }
        tried = _run(job)
        console.print(table(f"{manifest.model_name} {manifest.version}", tried))
        for name, why in tried["failed"].items():
            console.print(f"  {name}: {escape(why)}", highlight=False, soft_wrap=True)
        if tried["directory"] is None:
            console.print("Nothing within the tolerance is faster than the plain model: no archive is written.")
            return
        pack(Path(tried["directory"]), target, settings)
    console.print(f"{target}: {manifest.model_name} {new}, {tried['best']}", highlight=False, soft_wrap=True)
    if register:
        with Talk(management, token) as client:
            url = target.resolve().as_uri()
            console.print(progress.registered(client, console, url, initial_workers=1, synchronous=True))
    else:
        console.print(f"  torchrelay models register {target.resolve().as_uri()}", highlight=False, soft_wrap=True)


def table(title: str, tried: dict[str, Any]) -> Table:
    """The variants' figures; times are medians of the rounds, and the ratio is to the plain model."""
    sizes = list(tried["variants"][0]["ms"])
    caption = f"{tried['samples']} samples, {tried['threads']} threads"
    made = Table(title=title, caption=caption, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    made.add_column("variant", no_wrap=True)
    for size in sizes:
        made.add_column(f"batch {size}\nms", justify="right", no_wrap=True)
        made.add_column("\n×", justify="right", no_wrap=True)
    for name in ("weights\nMiB", "off by\nat most", "lowest\ncosine"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("ok")
    plain = tried["variants"][0]["ms"]
    for row in tried["variants"]:
        cells = [f"[bold]{row['name']}" if row["name"] == tried["best"] else row["name"]]
        for size in sizes:
            cells += [f"{row['ms'][size]:.2f}", f"{plain[size] / row['ms'][size]:.2f}"]
        cells += [f"{row['mib']:.1f}"]
        cells += ["not finite" if row["largest"] is None else f"{row['largest']:.2g}", f"{row['cosine']:.5f}"]
        made.add_row(*cells, "[red]no" if row["outside"] else "[green]yes")
    return made


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """What ``handlers.variants`` makes of a job, in a process of its own: torch and the author's code stay there."""
    with tempfile.TemporaryFile("w+") as said, Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console,
        transient=True,
    ) as bars:  # fmt: skip
        bar = bars.add_task("Loading the model", total=None)
        command = [sys.executable, "-m", "handlers.variants"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process:
            try:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(job))
                process.stdin.close()
                last: dict[str, Any] = {}
                for last in _lines(process.stdout):
                    if "doing" in last:
                        bars.update(bar, description=f"Trying {last['doing']}")
            except BaseException:
                process.kill()
                raise
        said.seek(0)
        tail = "".join(said.readlines()[-20:])
    if "variants" in last:
        return last
    _refuse(last.get("error") or f"It ended with code {process.returncode}:\n{tail}")


def _lines(stream: Any) -> Iterator[dict[str, Any]]:
    for line in stream:
        yield json.loads(line)


def _archive(model: str, store: Path, management: str, token: str) -> tuple[Path, list[dict[str, Any]]]:
    """The path that was given; or that of the archive of the server's model of that name, and its versions there."""
    path = Path(model)
    if path.exists():
        return path, []
    if path.suffix or len(path.parts) > 1:
        _refuse(f"There is no archive {model}.")
    with Talk(management, token) as client:
        served = client.describe(model)
    url = served[0]["modelUrl"]
    for place in (Path(url.removeprefix("file://")), store / url):
        if place.exists():
            return place, served
    _refuse(f"The archive of {model} is {url}, which is not in {store}. Name the folder with --model-store.")


def _raw(manifest: Manifest, version: str) -> dict[str, Any]:
    """The new version's manifest: all that the archive's says, and what the server reads into it."""
    raw = json.loads(json.dumps(dict(manifest.raw)))
    model = raw.setdefault("model", {})
    model |= {"modelName": manifest.model_name, "modelVersion": version, "handler": manifest.handler}
    if manifest.config_file:
        model["configFile"] = manifest.config_file
    return raw


def _samples(directory: Path, config: ModelConfig, given: list[Path]) -> list[str]:
    if lost := [file for file in given if not file.is_file()]:
        _refuse(f"There is no sample {lost[0]}.")
    own = [directory / name for name in config.samples or ()]
    if config.samples is None and (folder := directory / "samples").is_dir():
        own = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    if not (files := given or own):
        _refuse(
            "The archive has no sample requests to try it with. Give some with --sample FILE, or pack them under "
            "samples: of its model-config.yaml."
        )
    return [str(file.resolve()) for file in files]


def _tolerance(config: ModelConfig, rtol: float | None, atol: float | None, cosine: float | None) -> dict[str, Any]:
    given = {"rtol": rtol, "atol": atol, "cosine": cosine}
    if any(value is not None for value in given.values()):
        return given
    own = config.raw.get("accuracy")
    return {key: own.get(key) for key in given} if isinstance(own, dict) else {}


def _next(version: str, taken: Container[str] = ()) -> str:
    """One more, until it is not taken: 1.0 -> 1.1, 2 -> 3, and what ends in no number gets one."""
    found = re.fullmatch(r"(.*?)(\d+)", version)
    new = f"{found[1]}{int(found[2]) + 1}" if found else f"{version}.1"
    return _next(new, taken) if new in taken else new


def _refuse(why: str) -> NoReturn:
    errors.print(escape(why), style="red", highlight=False, soft_wrap=True)
    raise typer.Exit(1)
