"""A search for the fastest variant of an archive's model, in one process.

``python -m handlers.optimize.search`` reads a job from its standard input. A variant is the archive's
directory with another model-config.yaml, or with a graph in place of the class, loaded as a server loads it.
The search times the handler's ``inference`` and compares its outputs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils import _pytree as pytree

import handlers
from handlers.base import BaseHandler
from handlers.context import Context, Row
from handlers.errors import HandlerLoadError, PredictionException
from handlers.optimize import graph_export
from handlers.optimize.graph_optimization import optimize_graph
from handlers.optimize.labelled_samples import LabelledSamples, read_labelled_samples
from handlers.optimize.task_metric import TaskMetric, predicted_label
from handlers.optimize.tolerance_gate import OutputDifference, Tolerance, compare_outputs, output_tensors

MANIFEST = "MAR-INF/MANIFEST.json"
PLAIN = "plain"
# The name of a variant -> optimize: of its model-config.yaml, and the file of the graph that replaces the
# class.
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    PLAIN: ({}, ""),
    "bfloat16": ({"dtype": "bfloat16"}, ""),
    "int8": ({"quantize": "int8"}, ""),
    "compile": ({"compile": True}, ""),
    "compile-bfloat16": ({"compile": True, "dtype": "bfloat16"}, ""),
    "channels-last": ({"channels_last": True}, ""),
    "onnx": ({}, "model.onnx"),
    "onnx-int8": ({"quantize": "int8"}, "model.onnx"),
    "onnx-fp16": ({"dtype": "float16"}, "model.onnx"),
    "onnx-fused": ({"fuse": True}, "model.onnx"),
    "onnx-fused-fp16": ({"fuse": True, "dtype": "float16"}, "model.onnx"),
    "torchscript": ({}, "model.pt"),
    "export": ({}, "model.pt2"),
    "aotinductor": ({}, "model.pt2"),
}
_SAMPLES_FILE = "accuracy-samples.pt"  # in the archive of a variant
_ROUND_S = 0.1  # duration of the calls per variant and batch size in a round
_MIN_SPEEDUP = 1.03  # a variant that is less faster than the plain model does not replace it


@dataclass(frozen=True)
class SearchJob:
    """The input of a search: an unpacked archive, its configuration, sample requests and options."""

    directory: Path
    work: Path  # an empty directory; each variant gets a directory in it
    manifest: dict[str, Any]
    config: dict[str, Any]
    handler: str
    samples: list[Path]
    batch_size: int
    tolerance: Tolerance
    variants: Sequence[str]
    rounds: int = 7
    metric: TaskMetric | None = None
    labels: Path | None = None  # of the metric


@dataclass
class LoadedVariant:
    """A loaded variant with its preprocessed rows; ``seconds`` holds the time of each call by batch size."""

    name: str
    directory: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    handler: BaseHandler
    inputs: dict[int, Any]
    output: Any
    difference: OutputDifference
    score: float | None = None  # the metric of the task
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def median(self, size: int) -> float:
        return statistics.median(self.seconds[size])


def run_search(job: SearchJob, report_progress: Callable[[str], None]) -> dict[str, Any]:
    """Load and time all variants, and return their figures, the failed ones and the directory of the best.

    The directory is None where the plain model is the best. Raises HandlerLoadError where the plain model
    fails.
    """
    rows = _read_rows(job.samples)
    labelled = None
    if job.metric is not None and job.labels is not None:
        labelled = read_labelled_samples(job.labels, job.samples, rows)
    sizes = sorted({1, job.batch_size})
    report_progress(PLAIN)
    plain = _load_variant(job, PLAIN, rows, sizes, None, labelled)
    variants, failed = [plain], {}
    for name in job.variants:
        if name == PLAIN:
            continue
        report_progress(name)
        try:
            variants.append(_load_variant(job, name, rows, sizes, plain, labelled))
        except MemoryError:
            raise
        except Exception as error:  # models raise all kinds of errors
            failed[name] = _first_line(error)
    for number in range(job.rounds):
        report_progress(f"round {number + 1} of {job.rounds}")
        # Each round runs every variant, so that a disturbance of the machine affects all of them.
        for variant in variants:
            for size in sizes:
                variant.seconds.setdefault(size, []).extend(_time_calls(variant, size))
    accurate = [variant for variant in variants if variant.difference.is_within_tolerance]
    best = min(accurate, key=lambda variant: variant.median(sizes[-1]))
    if plain.median(sizes[-1]) < _MIN_SPEEDUP * best.median(sizes[-1]):
        best = plain
    for variant in accurate:
        if variant is not plain and "accuracy" not in job.config and not VARIANTS[variant.name][1]:
            _add_tolerance_gate(job, plain, variant)
    return {
        "variants": [_figures(variant, sizes) for variant in variants],
        "failed": failed,
        "samples": len(rows),
        "threads": torch.get_num_threads(),
        "best": best.name,
        "directory": None if best is plain else str(best.directory),
    }


# Loading


def _load_variant(
    job: SearchJob,
    name: str,
    rows: list[Row],
    sizes: list[int],
    plain: LoadedVariant | None,
    labelled: LabelledSamples | None = None,
) -> LoadedVariant:
    optimize, graph = VARIANTS[name]
    directory = job.work / name
    shutil.copytree(
        job.directory, directory, copy_function=_link_or_copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    # The search checks the tolerance of all variants alike: the archive's own gate must not fail their
    # loading.
    config = {key: value for key, value in job.config.items() if key not in ("optimize", "pt2")}
    manifest = {**job.manifest, "model": dict(job.manifest.get("model") or {})}
    if graph:
        assert plain is not None
        for key in ("modelFile", "serializedFile"):
            if manifest["model"].get(key):
                (directory / manifest["model"].pop(key)).unlink(missing_ok=True)
        _write_graph(job, plain, directory / graph, name)
        manifest["model"]["serializedFile"] = graph
        if graph.endswith(".pt2"):
            config["trusted"] = True  # the graph was exported here, from code that is trusted to run here
    elif optimize:
        config["optimize"] = optimize
    handler = _load_handler(job, directory, manifest, {k: v for k, v in config.items() if k != "accuracy"})
    is_unchanged = (
        type(handler.model) is type(plain.handler.model) if graph and plain else handler.optimization is None
    )
    if is_unchanged and (graph or optimize):
        raise HandlerLoadError("the handler loads its model by itself, so nothing can be done to it")
    _write_configuration(directory, manifest, config)
    inputs, output = {}, None
    for size in sizes:
        batch = [rows[index % len(rows)] for index in range(size)]
        with _batch_context(handler, size):
            inputs[size] = handler.preprocess(batch)
            output = handler.inference(inputs[size])
            answers = handler.postprocess(output)
        if len(answers) != size:
            raise HandlerLoadError(f"{name}: {len(answers)} answers to {size} rows.")
    output = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
    difference = _compare(plain.output if plain is not None else output, output, job.tolerance)
    score = None
    if job.metric is not None and labelled is not None:
        score = _evaluate(job.metric, handler, labelled, sizes[-1])
        if plain is not None and plain.score is not None and difference.is_within_tolerance:
            difference = replace(difference, violation=job.metric.find_violation(plain.score, score))
    return LoadedVariant(name, directory, manifest, config, handler, inputs, output, difference, score)


def _evaluate(metric: TaskMetric, handler: BaseHandler, samples: LabelledSamples, size: int) -> float:
    """Return the metric of the handler's answers to the labelled samples, in batches of ``size``."""
    predicted: list[Any] = []
    for start in range(0, len(samples.rows), size):
        batch = list(samples.rows[start : start + size])
        with _batch_context(handler, len(batch)):
            answers = handler.postprocess(handler.inference(handler.preprocess(batch)))
        predicted += map(predicted_label, answers)
    return metric.evaluate(predicted, samples.labels)


def _load_handler(
    job: SearchJob, directory: Path, manifest: dict[str, Any], config: dict[str, Any]
) -> BaseHandler:
    entry = handlers.load(job.handler, directory, manifest)
    if not isinstance(entry.instance, BaseHandler):
        raise HandlerLoadError(
            f"{job.handler}: only a handler that extends handlers.base.BaseHandler can be optimised, because "
            "its "
            "model is loaded by us."
        )
    os.chdir(directory)  # as in a replica
    name = manifest["model"].get("modelName") or directory.name
    context = Context(name, str(directory), manifest, batch_size=job.batch_size, model_yaml_config=config)
    entry.initialize(context)
    return entry.instance


@contextlib.contextmanager
def _batch_context(handler: BaseHandler, size: int) -> Iterator[None]:
    """Give the handler the context of a batch of ``size`` requests without headers."""
    handler.context.begin([f"sample {i}" for i in range(size)], [{}] * size, [{"body": {}}] * size, None)
    yield


def _read_rows(files: Sequence[Path]) -> list[Row]:
    """Return the rows of sample requests: parsed .json, the text of .txt, the bytes of other files."""
    rows = []
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".json":
            rows.append(Row({"body": json.loads(content)}))
        else:
            rows.append(Row({"body": content.decode() if file.suffix == ".txt" else bytearray(content)}))
    return rows


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


def _write_configuration(directory: Path, manifest: dict[str, Any], config: dict[str, Any]) -> None:
    """Write the variant's manifest and model-config.yaml as new files: the old ones may be hard links."""
    name = manifest["model"].get("configFile") or "model-config.yaml"
    if config:
        manifest["model"]["configFile"] = name
    for file, text in (
        (name, yaml.safe_dump(config, sort_keys=False)),
        (MANIFEST, json.dumps(manifest, indent=2)),
    ):
        path = directory / file
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _add_tolerance_gate(job: SearchJob, plain: LoadedVariant, variant: LoadedVariant) -> None:
    """Add ``accuracy:`` to a variant: the job's tolerance, and the model's inputs of this search."""
    calls = _record_calls(plain)
    limits = {key: value for key, value in vars(job.tolerance).items() if value is not None}
    if len(calls) != 1 or not limits:  # a metric alone needs labels, which the model's inputs do not have
        return
    args, kwargs = calls[0]
    inputs = args[0] if len(args) == 1 and not kwargs else None if args else dict(kwargs)
    tensors = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    if not tensors or not all(isinstance(value, torch.Tensor) and value.dim() for value in tensors):
        return  # a file of samples cannot hold such inputs
    (variant.directory / _SAMPLES_FILE).unlink(missing_ok=True)  # it may be a hard link to the archive's
    torch.save(pytree.tree_map(torch.clone, inputs), variant.directory / _SAMPLES_FILE)
    variant.config["accuracy"] = {"samples": _SAMPLES_FILE} | limits
    _write_configuration(variant.directory, variant.manifest, variant.config)


def _write_graph(job: SearchJob, plain: LoadedVariant, file: Path, name: str) -> None:
    """Export the plain model as a graph to ``file``; the ONNX graph is exported once and shared."""
    model, calls = plain.handler.model, _record_calls(plain)
    if not file.name.endswith(".onnx"):
        return graph_export.EXPORTERS[name](model, *graph_export.example_inputs(model, calls), file)
    options = VARIANTS[name][0]
    fuse = bool(options.get("fuse"))
    exported = job.work / ("exported-fusable" if fuse else "exported") / file.name
    if not exported.is_file():
        exported.parent.mkdir(exist_ok=True)
        export = graph_export.export_fusable_onnx if fuse else graph_export.export_onnx
        export(model, *graph_export.example_inputs(model, calls), exported)
    if options:
        number_format = options.get("quantize") or options.get("dtype")
        config = getattr(model, "config", None)
        optimize_graph(exported, file, fuse=fuse, number_format=number_format, config=config)
    else:  # copied, because ONNX rejects linked files as unsafe
        shutil.copytree(exported.parent, file.parent, dirs_exist_ok=True)
    return None


def _record_calls(variant: LoadedVariant) -> list[tuple[graph_export.Args, graph_export.Kwargs]]:
    """Return the arguments of the model's calls by the handler's inference, for the largest batch."""
    if not isinstance(variant.handler.model, torch.nn.Module):
        return []
    calls: list[tuple[graph_export.Args, graph_export.Kwargs]] = []

    def record(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))

    hook = variant.handler.model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        rows = max(variant.inputs)
        with _batch_context(variant.handler, rows):
            variant.handler.inference(variant.inputs[rows])
    finally:
        hook.remove()
    return calls


# Figures


def _compare(plain: Any, optimized: Any, tolerance: Tolerance) -> OutputDifference:
    if output_tensors(plain):
        return compare_outputs(plain, optimized, tolerance)
    equal = plain == optimized  # the handler's inference returns Python values
    return OutputDifference(
        0.0 if equal else math.inf, 1.0 if equal else 0.0, "" if equal else "the answers are not the same"
    )


def _time_calls(variant: LoadedVariant, size: int) -> list[float]:
    """Return the seconds of each call of a round: their median ignores a call that the machine delayed."""
    calls: list[float] = []
    with _batch_context(variant.handler, size):
        end = (now := time.perf_counter()) + _ROUND_S
        while now < end:
            started = now
            variant.handler.inference(variant.inputs[size])
            now = time.perf_counter()
            calls.append(now - started)
    return calls


def _figures(variant: LoadedVariant, sizes: list[int]) -> dict[str, Any]:
    difference = variant.difference
    return {
        "name": variant.name,
        "ms": {size: round(variant.median(size) * 1000, 3) for size in sizes},
        "mib": round(_weight_bytes(variant) / 2**20, 2),
        "largest": difference.max_difference if math.isfinite(difference.max_difference) else None,
        "cosine": difference.min_cosine,
        "metric": variant.score,
        "outside": difference.violation,
    }


def _weight_bytes(variant: LoadedVariant) -> int:
    """Return the size of the model's weights: of its tensors, or of its graph's files."""
    model = variant.handler.model
    if isinstance(model, torch.nn.Module):
        tensors = [t for t in pytree.tree_leaves(dict(model.state_dict())) if isinstance(t, torch.Tensor)]
        return sum({(t.data_ptr() if not t.is_quantized else id(t)): t.nbytes for t in tensors}.values())
    return sum(file.stat().st_size for file in variant.directory.glob(f"{VARIANTS[variant.name][1]}*"))


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _parse_job(document: Mapping[str, Any]) -> SearchJob:
    metric = TaskMetric.from_config(document.get("metric") or {})
    return SearchJob(
        metric=metric,
        labels=Path(document["labels"]) if document.get("labels") else None,
        directory=Path(document["directory"]),
        work=Path(document["work"]),
        manifest=document["manifest"],
        config=document["config"],
        handler=document["handler"],
        samples=[Path(file) for file in document["samples"]],
        batch_size=document["batch_size"],
        tolerance=Tolerance.from_config({**document["tolerance"], "metric": metric and metric.name}),
        variants=document["variants"],
        rounds=document["rounds"],
    )


def main() -> None:
    """Run the JSON job of the standard input.

    Each line of the standard output is JSON: ``{"doing": ...}`` per step, and last the result or
    ``{"error": ...}``. The libraries' output goes to the standard error.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write_line(**line: Any) -> None:
        print(json.dumps(line), file=output, flush=True)

    document = json.load(sys.stdin)
    if document.get("threads"):
        torch.set_num_threads(document["threads"])
    try:
        write_line(**run_search(_parse_job(document), lambda doing: write_line(doing=doing)))
    except (HandlerLoadError, PredictionException, ValueError, OSError) as error:
        write_line(error=str(error))


if __name__ == "__main__":
    main()
