"""``torchrelay tune``: the configuration of a model with the highest goodput under a latency limit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from serve_app.cli.api_client import (
    INFERENCE,
    MANAGEMENT,
    CliClient,
    Inference,
    ManagementUrl,
    Token,
    key_file,
)
from serve_app.cli.terminal import console, fail
from serve_app.cli.variant_search import (
    VariantSearchError,
    find_archive,
    find_samples,
    manifest_document,
    next_version,
    parse_tolerance,
    parse_variants,
    promising_variants,
    read_archive,
    run_variant_search,
)
from serve_app.client import Client
from serve_app.errors import RelayError
from serve_app.load_test.candidate import AXES, PLAIN, Candidate, SearchSpace
from serve_app.load_test.candidate_deployments import (
    CandidateDeployments,
    TuningError,
    check_access,
    configure_directory,
    read_config,
    remove_leftovers,
    write_archive,
)
from serve_app.load_test.trial_load import GenerationLoad, PredictionLoad, SampleRequests, TrialLoad
from serve_app.load_test.trials import TrialStore
from serve_app.load_test.tuner import TrafficMonitor, Tuner, check_traffic
from serve_app.load_test.tuning_report import TuningResult, write_output
from serve_app.load_test.tuning_search import SearchBudget, SearchOutcome
from serve_app.model_store.archive import Archive, ModelConfig, handler_module

NO_CONFIGURATION = 3  # the exit code where no configuration meets the limit
_STATE, _VARIANTS, _CONFIG = "tune-state.json", "variants", "model-config.yaml"
_DEFAULT_MINUTES = 10.0
_SHOWN_DELAY = 100  # a description has this maxBatchDelay where none is set
_GENERATION_HANDLERS = ("llm",)
_DEFAULT_TRY = "plain,bfloat16,int8,compile,channels-last,onnx,onnx-int8"


def tune(
    model: Annotated[
        str, typer.Argument(metavar="ARCHIVE_OR_MODEL", help="A .mar, or a model of the running server.")
    ],
    p99: Annotated[
        str, typer.Option("--p99", metavar="TIME", help="The limit of the 99th percentile, as 100ms or 0.5s.")
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A sample request; by default the archive's own samples."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of the report; by default tune-MODEL.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="The budget in minutes; 10 without --trials.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="The budget in trials.")] = None,
    seconds: Annotated[float, typer.Option(min=0.2, max=600, help="The seconds of a load.")] = 2.0,
    variants: Annotated[
        str, typer.Option("--try", metavar="A,B,…", help="The variants to try.")
    ] = _DEFAULT_TRY,
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="The most workers; by default this machine's cores.")
    ] = None,
    max_batch_size: Annotated[int, typer.Option(min=1, help="The largest batch size.")] = 64,
    rtol: Annotated[
        float | None, typer.Option(help="The relative tolerance, as of torchrelay optimize.")
    ] = None,
    atol: Annotated[float | None, typer.Option(help="The absolute tolerance.")] = None,
    cosine: Annotated[float | None, typer.Option(help="The minimum cosine of a row.")] = None,
    version: Annotated[
        str | None, typer.Option(help="The served version; by default the default one.")
    ] = None,
    allow_traffic: Annotated[
        bool, typer.Option("--allow-traffic", help="Tune although clients send requests to the model.")
    ] = False,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Weights and a folder's own code may run as they load.")
    ] = False,
    model_store: Annotated[Path, typer.Option(help="The folder of the server's archives.")] = Path(
        "model_store"
    ),
    inference: Inference = INFERENCE,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Search the configuration with the most requests per second within a p99; write a report and the file.

    An interrupted run goes on with the same command. Exits with 3 where no configuration meets the limit.
    """
    options = TuneOptions(
        model=model,
        limit=parse_duration(p99),
        data=data or [],
        output=output,
        budget=SearchBudget(_budget_seconds(minutes, trials), trials),
        seconds=seconds,
        variants=parse_variants(variants),
        max_workers=max_workers or os.cpu_count() or 1,
        max_batch_size=max_batch_size,
        tolerance=(rtol, atol, cosine),
        version=version,
        allow_traffic=allow_traffic,
        trusted=trusted,
        model_store=model_store,
        inference=inference.rstrip("/"),
        management=management,
        token=token,
    )
    if not model_store.is_dir():
        fail(
            f"There is no model store {model_store}. Pass the folder of the server's archives, --model-store."
        )
    try:
        with tempfile.TemporaryDirectory(prefix="torchrelay-tune-") as temporary, _terminable():
            result = _tune(options, Path(temporary))
    except (TuningError, RelayError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        console.print("Interrupted; the candidates are removed. The same command goes on.")
        raise typer.Exit(130) from None
    if not result.outcome.meets_limit:
        raise typer.Exit(NO_CONFIGURATION)


@dataclass(frozen=True)
class TuneOptions:
    """The parsed options of the command; ``limit`` and ``seconds`` are seconds."""

    model: str
    limit: float
    data: list[Path]
    output: Path | None
    budget: SearchBudget
    seconds: float
    variants: list[str]
    max_workers: int
    max_batch_size: int
    tolerance: tuple[float | None, float | None, float | None]
    version: str | None
    allow_traffic: bool
    trusted: bool
    model_store: Path
    inference: str
    management: str
    token: str

    def key(self, model: TunedModel, samples: SampleRequests) -> dict[str, Any]:
        """Return the values on which trials depend, by the names that messages have."""
        return {
            "model": model.digest,
            "current configuration": {"name": model.archive.manifest.model_name, **model.baseline.document()},
            "samples": hashlib.sha256(b"\0".join(samples.bodies)).hexdigest(),
            "server": self.inference,
            "p99": self.limit,
            "seconds": self.seconds,
            "try": sorted(self.variants),
            "max-workers": self.max_workers,
            "max-batch-size": self.max_batch_size,
            "tolerance": list(self.tolerance),
        }


@dataclass(frozen=True)
class TunedModel:
    """A model to tune: its unpacked archive, its configuration, and its versions on the server."""

    archive: Archive
    config: ModelConfig
    served: list[dict[str, Any]]
    digest: str

    @property
    def is_generation(self) -> bool:
        return handler_module(self.archive.manifest.handler) in _GENERATION_HANDLERS

    @property
    def baseline(self) -> Candidate:
        """Return the current configuration."""
        config = self.config
        candidate = Candidate(
            PLAIN, config.min_workers or 1, config.threads, config.batch_size or 1, config.max_batch_delay
        )
        if not self.served:
            return candidate
        version = self.served[0]
        delay = version["maxBatchDelay"]
        if delay == _SHOWN_DELAY and config.max_batch_delay != _SHOWN_DELAY:
            delay = None
        workers = max(1, version["minWorkers"])
        return replace(
            candidate, workers=workers, batch_size=version["batchSize"], max_batch_delay=delay or None
        )


def _read_model(
    name: str, store: Path, client: CliClient, version: str | None, temporary: Path
) -> TunedModel:
    """Unpack and check an archive, or that of a served model. Raises RelayError; exits for unknown names."""
    path, served = find_archive(name, store, client, version)
    archive, config = read_archive(path, served, temporary)
    return TunedModel(archive, config, served, _digest(path))


def _digest(archive: Path) -> str:
    """Return a digest of an archive, or of a model folder's names, sizes and times."""
    if archive.is_file():
        with archive.open("rb") as file:
            found = hashlib.sha256()
            while block := file.read(1 << 20):
                found.update(block)
            return found.hexdigest()
    stats = [(str(f.relative_to(archive)), f.stat()) for f in sorted(archive.rglob("*")) if f.is_file()]
    return hashlib.sha256(repr([(n, s.st_size, s.st_mtime_ns) for n, s in stats]).encode()).hexdigest()


def _tune(options: TuneOptions, temporary: Path) -> TuningResult:
    """Check everything without a side effect, then search and write the output."""
    describing = CliClient(options.management, options.token)
    model = _read_model(options.model, options.model_store, describing, options.version, temporary)
    files = [Path(f) for f in find_samples(model.archive.directory, model.config, options.data, "--data")]
    samples = SampleRequests.read(files)
    load = _create_load(options, model, samples)
    name = model.archive.manifest.model_name
    folder = options.output or Path(f"tune-{name}")
    if folder.exists() and not folder.is_dir():
        fail(f"{folder} is a file; choose a folder with --output.")
    with CliClient(options.management, options.token, options.inference, timeout=600) as client:
        check_access(client, name)
        if leftovers := remove_leftovers(client, options.model_store):
            console.print(f"Removed what an interrupted run left: {', '.join(leftovers)}", markup=False)
        traffic = _monitor(client, model, options.allow_traffic)
        store = _open_store(folder, options.key(model, samples))
        directories = _make_variants(options, model, store, folder, files)
        space = SearchSpace(
            cores=os.cpu_count() or 1,
            variants=tuple(directories),
            max_workers=options.max_workers,
            max_batch_size=options.max_batch_size,
            limit=options.limit,
            axes=_axes(model.is_generation),
        )
        parameters = {"task": model.config.task, "trusted": options.trusted or None}
        deployments = CandidateDeployments(
            client, options.model_store, name, store.run, directories, parameters
        )
        with _BudgetProgress() as show, deployments:
            tuner = Tuner(store, deployments, load, options.limit, show, traffic)
            outcome = tuner.run(space, model.baseline, options.budget)
    facts = _facts(options, model, outcome)
    result = TuningResult(name, options.limit, outcome, facts, store.variants, model.is_generation)
    _write(result, model, directories, folder)
    return result


def parse_duration(text: str) -> float:
    """Return the seconds of a duration with its unit; exit where it is invalid."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)(ms|s)", text.strip())
    seconds = float(match[1]) / (1000 if match[2] == "ms" else 1) if match else 0.0
    if not 0 < seconds <= 600:
        fail(f"--p99 is {text!r}; write a duration above 0 and up to 600s, such as 100ms or 0.5s.")
    return seconds


def _monitor(client: Client, model: TunedModel, allow_traffic: bool) -> TrafficMonitor | None:
    """Check that the server responds, and that the served model has no live traffic."""
    if not model.served:
        client.models()
        return None
    if allow_traffic:
        console.print(
            "Live traffic is not checked. Candidates take cores of the same machine: clients of the model "
            "may wait longer, and the figures include their requests.",
            style="yellow",
        )
        return None
    return check_traffic(client, model.archive.manifest.model_name)


def _open_store(folder: Path, key: Mapping[str, Any]) -> TrialStore:
    folder.mkdir(parents=True, exist_ok=True)
    store, reason = TrialStore.open(folder / _STATE, key)
    if reason:
        console.print(f"The trials in {folder} are not used: {reason}. Starting anew.", markup=False)
        shutil.rmtree(folder / _VARIANTS, ignore_errors=True)
    elif store.trials:
        console.print(f"Going on after {len(store.trials)} finished trials in {folder}.", markup=False)
    store.save()
    return store


def _make_variants(
    options: TuneOptions, model: TunedModel, store: TrialStore, folder: Path, files: list[Path]
) -> dict[str, Path]:
    """Return the directories of the variants to try, the plain model first.

    A model whose handler cannot be optimized has the plain one only.
    """
    names = options.variants
    others = [name for name in names if name != PLAIN]
    if model.is_generation or not others:
        return {PLAIN: model.archive.directory}
    work = folder.resolve() / _VARIANTS
    if store.variants is None or not work.is_dir():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        job = {
            "directory": str(model.archive.directory),
            "work": str(work),
            "manifest": manifest_document(model.archive.manifest, model.archive.manifest.version),
            "config": dict(model.config.raw),
            "handler": model.archive.manifest.handler,
            "samples": [str(file.resolve()) for file in files],
            "batch_size": max(8, model.baseline.batch_size),
            "tolerance": parse_tolerance(model.config, *options.tolerance),
            "variants": names,
            "rounds": 2,
            "threads": model.baseline.thread_count,
        }
        try:
            store.variants = run_variant_search(job)
        except VariantSearchError as error:
            reason = str(error).strip().splitlines()[0][:300]
            console.print(f"Only the plain model is tuned: {reason}", markup=False, soft_wrap=True)
            store.variants = {"variants": [], "failed": dict.fromkeys(others, reason)}
        store.save()
    return {PLAIN: model.archive.directory} | {
        name: work / name for name in promising_variants(store.variants)
    }


def _axes(is_generation: bool) -> tuple[str, ...]:
    """Return the axes of the search: the engine of text generation makes its own batches."""
    return tuple(axis for axis in AXES if axis in ("workers", "threads")) if is_generation else AXES


def _create_load(options: TuneOptions, model: TunedModel, samples: SampleRequests) -> TrialLoad[Any]:
    headers = _headers(options.management, options.token)
    if model.is_generation:
        bodies = GenerationLoad.parse(samples)
        return GenerationLoad(options.inference, bodies, options.limit, options.seconds, headers)
    return PredictionLoad(options.inference, samples, options.limit, options.seconds, headers)


def _headers(management: str, token: str) -> Callable[[], Mapping[str, str]]:
    """Return a function of the header with the current key of the inference port."""

    def read() -> Mapping[str, str]:
        key, file = token, key_file(management)
        if not key and file is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                key = json.loads(file.read_text())["inference"]["key"]
        return {"Authorization": f"Bearer {key}"} if key else {}

    return read


def _budget_seconds(minutes: float | None, trials: int | None) -> float | None:
    if minutes is None:
        return None if trials is not None else _DEFAULT_MINUTES * 60
    return minutes * 60


class _BudgetProgress:
    """A progress bar over the budget; entering returns its update."""

    def __enter__(self) -> Callable[[str, float], None]:
        columns = (SpinnerColumn(), BarColumn(20), TaskProgressColumn(), TimeElapsedColumn())
        self._bars = Progress(
            *columns, TextColumn("{task.description}", markup=False), console=console, transient=True
        )
        bar = self._bars.add_task("Starting", total=1.0)
        self._bars.start()
        return lambda text, fraction: self._bars.update(bar, description=text, completed=fraction)

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, as at Ctrl-C, so that candidates are removed."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _facts(options: TuneOptions, model: TunedModel, outcome: SearchOutcome) -> dict[str, str]:
    kind = "time to first token" if model.is_generation else "latency"
    lag = max((s.lag for t in outcome.trials for s in t.steps), default=0.0)
    return {
        "model": f"{model.archive.manifest.model_name} {model.archive.manifest.version}",
        "digest": model.digest,
        "limit": f"p99 of the {kind} up to {options.limit * 1000:g} ms",
        "load": f"open loop, Poisson arrivals, {options.seconds:g} s or more for each rate; latencies count "
        "from the scheduled arrival",
        "generator's own delay": f"at most {lag * 1000:.1f} ms (p99 of a load)",
        "server": options.inference,
        "cores": str(os.cpu_count()),
        "trials": str(len(outcome.trials)),
        "measured seconds": f"{sum(t.seconds for t in outcome.trials):.0f}",
    }


def _write(result: TuningResult, model: TunedModel, directories: dict[str, Path], folder: Path) -> None:
    """Write the output and print where it is."""
    chosen, manifest = result.outcome.chosen, model.archive.manifest
    write_output(result, folder)
    console.print(escape(result.summary), highlight=False, soft_wrap=True)
    console.print(f"  report         {folder / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    if not result.outcome.meets_limit:
        (folder / _CONFIG).unlink(missing_ok=True)  # of an earlier run
        return
    directory = directories[chosen.variant]
    target = folder / _CONFIG
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        part = Path(temporary) / "archive"
        shutil.copytree(directory, part, symlinks=True)
        configure_directory(part, chosen)
        target.write_text(_comment(result) + yaml.safe_dump(read_config(part), sort_keys=False), "utf-8")
    console.print(f"  configuration  {target}", highlight=False, markup=False, soft_wrap=True)
    if chosen.variant != PLAIN:
        new = next_version(manifest.version, {v["modelVersion"] for v in model.served})
        archive = folder / f"{manifest.model_name}-{new}.mar"
        archive.unlink(missing_ok=True)
        write_archive(directory, chosen, archive, new)
        trust = " --trusted" if any(directory.glob("*.pt2")) else ""
        console.print(f"  archive        {archive}", highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"  torchrelay models register {archive.resolve()}{trust}", highlight=False, soft_wrap=True
        )


def _comment(result: TuningResult) -> str:
    return "".join(f"# {line}\n" for line in result.summary.splitlines())
