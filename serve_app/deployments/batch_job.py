"""A batch prediction on Ray Data: tasks read blocks, actors predict them, tasks write the results."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray.exceptions import RayError
from ray.util.annotations import RayDeprecationWarning

from serve_app.batch_prediction.blocks import BatchInputError, Format, InputBlock, read_block
from serve_app.batch_prediction.predictor import BlockPredictor
from serve_app.batch_prediction.results import ResultFolder
from serve_app.deployments.ray_internals.local_node import LocalNode
from serve_app.domain.model import ModelSpec
from serve_app.errors import RelayError
from serve_app.model_store.atomic_dir import temporary_dir
from serve_app.model_store.cache import unpack
from serve_app.net import private_files
from serve_app.runtime.package_envs import PackageEnvs
from serve_app.runtime.secret_env import hide_secrets
from serve_app.settings import Settings

_IO_CPUS = 0.25  # of a task that reads or writes
_MAX_RESTARTS = 2  # of a process that predicts; a row that crashes it ends the job then


class BatchJobFailed(Exception):
    """An error of the whole job; blocks that are done stay."""


@dataclass(frozen=True)
class BatchJob:
    """A model, the options of the file systems, and the place of the results."""

    spec: ModelSpec
    directory: Path  # of the unpacked archive, on this machine
    archive: Path  # the packed one, for other machines of a cluster
    settings: Settings
    column: str | None
    output: str
    format: Format
    input_options: Mapping[str, Any]
    output_options: Mapping[str, Any]
    concurrency: int


@dataclass(frozen=True)
class BlockReport:
    """A block whose results are written."""

    rows: int
    errors: int


def run_batch_job(job: BatchJob, blocks: Sequence[InputBlock]) -> Iterator[BlockReport]:
    """Predict ``blocks`` and yield a report of each, in any order.

    It runs on the cluster of RAY_ADDRESS, else on this machine alone. Raises BatchJobFailed.
    """
    address = os.environ.get("RAY_ADDRESS")
    node = _start_node() if address is None else None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        cluster = node.address if node is not None else address
        ray.init(cluster, log_to_driver=False, logging_level=logging.ERROR)
        yield from _report_blocks(job, blocks, is_remote=node is None)
    except RayError as error:
        raise BatchJobFailed(str(error).strip()) from error
    finally:
        ray.shutdown()
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=True)


def _start_node() -> LocalNode:
    folder = private_files.get_ray_directory()
    try:
        return LocalNode(temp_dir=str(folder / "ray") if folder is not None else None)
    except Exception as error:  # Ray raises no narrower one
        raise BatchJobFailed(f"Ray did not start on this machine: {error}") from error


def _report_blocks(job: BatchJob, blocks: Sequence[InputBlock], is_remote: bool) -> Iterator[BlockReport]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    packed = ray.put(job.archive.read_bytes()) if is_remote else None
    actor_options = {"num_cpus": job.spec.num_cpus, "num_gpus": job.spec.num_gpus or None}
    # Ray 2.60 deprecates every way to limit restarts, and has no other one yet.
    warnings.filterwarnings("ignore", "`ray_remote_args_fn` is deprecated", RayDeprecationWarning)
    items = [{"block": pickle.dumps(block)} for block in blocks]
    results = (
        ray.data.from_items(items, override_num_blocks=len(items))
        .map(_read_rows, fn_args=(job.column, dict(job.input_options)), num_cpus=_IO_CPUS)
        .map(
            BlockPredictorActor,
            fn_constructor_args=(job.spec, str(job.directory), job.settings, packed),
            compute=ray.data.ActorPoolStrategy(size=job.concurrency),
            ray_remote_args_fn=_restart_options,
            **{name: value for name, value in actor_options.items() if value is not None},
        )
        .map(_write_results, fn_args=(job.output, job.format, dict(job.output_options)), num_cpus=_IO_CPUS)
    )
    for report in results.iter_rows():
        if report["failure"]:
            raise BatchJobFailed(report["failure"])
        yield BlockReport(report["rows"], report["errors"])


def _restart_options() -> dict[str, int]:
    return {"max_restarts": _MAX_RESTARTS, "max_task_retries": _MAX_RESTARTS}


def _read_rows(item: dict[str, Any], column: str | None, options: dict[str, Any]) -> dict[str, Any]:
    try:
        rows = read_block(pickle.loads(item["block"]), column, options)
    except BatchInputError as error:
        return {"block": item["block"], "rows": b"", "failure": str(error)}
    return {"block": item["block"], "rows": pickle.dumps(rows), "failure": ""}


class BlockPredictorActor:
    """The model in a process of Ray's; its archive is unpacked where the driver's directory is missing.

    A failed start is the result of each block: an exception of this constructor would lose its traceback.
    """

    def __init__(
        self, spec: ModelSpec, directory: str, settings: Settings, packed: ray.ObjectRef | None
    ) -> None:
        private_files.restrict_umask()
        self._failure = ""
        try:
            self._start(spec, Path(directory), settings, packed)
        except RelayError as error:
            self._failure = f"{error}\n{getattr(error, 'detail', '')}".strip()

    def _start(self, spec: ModelSpec, folder: Path, settings: Settings, packed: ray.ObjectRef | None) -> None:
        if packed is not None and not folder.is_dir():
            folder = self._unpack(spec, ray.get(packed), settings)
        if spec.requirements:
            environments = PackageEnvs(settings.state_dir / "environments", settings.runtime)
            environments.activate(spec.name, folder, spec.requirements, spec.digest)
        hide_secrets(settings)
        self._predictor = BlockPredictor(spec, folder, settings, 0 if ray.get_gpu_ids() else None)

    def _unpack(self, spec: ModelSpec, content: bytes, settings: Settings) -> Path:
        self._unpacked = temporary_dir(private_files.get_runtime_directory())  # as long as this process
        folder = self._unpacked.__enter__()
        archive = folder / Path(spec.url).name
        archive.write_bytes(content)
        return unpack(archive, folder / "model", settings.store)

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        failure = item["failure"] or self._failure
        results = [] if failure else self._predictor.predict(pickle.loads(item["rows"]))
        return {"block": item["block"], "results": pickle.dumps(results), "failure": failure}


def _write_results(
    item: dict[str, Any], output: str, format: Format, options: dict[str, Any]
) -> dict[str, Any]:
    block: InputBlock = pickle.loads(item["block"])
    if item["failure"]:
        return {"rows": 0, "errors": 0, "failure": item["failure"]}
    results = pickle.loads(item["results"])
    ResultFolder(output, format, options).write_part(block.index, block.file, results)
    errors = sum(bool(result.reason) for result in results)
    return {"rows": block.rows, "errors": errors, "failure": ""}
