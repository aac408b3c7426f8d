"""The variants of an archive's model, timed side by side in one process: ``python -m handlers.variants`` reads a job.

A variant is the archive's directory with another model-config.yaml, or with a graph in place of the class, loaded as a
server would load it: what is timed is the handler's ``inference``, and what is compared is what that gives.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils import _pytree as pytree

import handlers
from handlers import weights
from handlers.accuracy import Difference, Tolerance, difference, tensors
from handlers.base import BaseHandler
from handlers.context import Context, Row
from handlers.errors import HandlerLoadError, PredictionException
from handlers.optimisation import quantize_graph

MANIFEST = "MAR-INF/MANIFEST.json"
PLAIN = "plain"
# Each name -> what its model-config.yaml has under optimize:, and the graph's file that takes the class's place.
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    PLAIN: ({}, ""),
    "bfloat16": ({"dtype": "bfloat16"}, ""),
    "int8": ({"quantize": "int8"}, ""),
    "compile": ({"compile": True}, ""),
    "compile-bfloat16": ({"compile": True, "dtype": "bfloat16"}, ""),
    "channels-last": ({"channels_last": True}, ""),
    "onnx": ({}, "model.onnx"),
    "onnx-int8": ({"quantize": "int8"}, "model.onnx"),
    "torchscript": ({}, "model.pt"),
    "export": ({}, "model.pt2"),
    "aotinductor": ({}, "model.pt2"),
}
_INPUTS = "accuracy-samples.pt"  # in a winner's archive
_ROUND_S = 0.1  # of calls, for each variant and size in a round
_WORTH = 1.03  # a winner is so much faster than the plain model, or the plain one stays


@dataclass(frozen=True)
class Job:
    """What to try: the archive unpacked, its manifest and configuration, files of sample requests, and how."""

    directory: Path
    work: Path  # empty; each variant gets a directory in it
    manifest: dict[str, Any]
    config: dict[str, Any]
    handler: str
    samples: list[Path]
    batch_size: int
    tolerance: Tolerance
    variants: Sequence[str]
    rounds: int = 7


@dataclass
class Variant:
    """One that was loaded, with its rows prepared; ``seconds`` are those of each call, by batch size."""

    name: str
    directory: Path
    manifest: dict[str, Any]
    config: dict[str, Any]
    handler: BaseHandler
    prepared: dict[int, Any]
    output: Any
    found: Difference
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def median(self, size: int) -> float:
        return statistics.median(self.seconds[size])


Say = Callable[[str], None]


def tried(job: Job, say: Say) -> dict[str, Any]:
    """Every variant's figures, why others have none, and the directory of the winner, None where the plain model is.

    Raises HandlerLoadError where the plain model cannot be tried at all.
    """
    rows = _rows(job.samples)
    sizes = sorted({1, job.batch_size})
    say(PLAIN)
    plain = _loaded(job, PLAIN, rows, sizes, None)
    variants, failed = [plain], {}
    for name in job.variants:
        if name == PLAIN:
            continue
        say(name)
        try:
            variants.append(_loaded(job, name, rows, sizes, plain))
        except MemoryError:
            raise
        except Exception as error:  # a variant may fail in as many ways as there are models
            failed[name] = _short(error)
    for number in range(job.rounds):
        say(f"round {number + 1} of {job.rounds}")
        for variant in variants:  # one after another in each round: what disturbs the machine disturbs all of them
            for size in sizes:
                variant.seconds.setdefault(size, []).extend(_timed(variant, size))
    within = [variant for variant in variants if variant.found.within]
    best = min(within, key=lambda variant: variant.median(sizes[-1]))
    if plain.median(sizes[-1]) < _WORTH * best.median(sizes[-1]):
        best = plain
    if best is not plain and "accuracy" not in job.config and not VARIANTS[best.name][1]:
        _gate(job, plain, best)
    return {
        "variants": [_figures(variant, sizes) for variant in variants],
        "failed": failed,
        "samples": len(rows),
        "threads": torch.get_num_threads(),
        "best": best.name,
        "directory": None if best is plain else str(best.directory),
    }


# Loading


def _loaded(job: Job, name: str, rows: list[Row], sizes: list[int], plain: Variant | None) -> Variant:
    optimize, graph = VARIANTS[name]
    directory = job.work / name
    shutil.copytree(job.directory, directory, copy_function=_linked, ignore=shutil.ignore_patterns("__pycache__"))
    # The tolerance is looked at here, for all variants alike: what the archive asks for must not end one as it loads.
    config = {key: value for key, value in job.config.items() if key not in ("optimize", "pt2")}
    manifest = {**job.manifest, "model": dict(job.manifest.get("model") or {})}
    if graph:
        assert plain is not None
        for key in ("modelFile", "serializedFile"):
            if manifest["model"].get(key):
                (directory / manifest["model"].pop(key)).unlink(missing_ok=True)
        _make_graph(job, plain, directory / graph, name)
        manifest["model"]["serializedFile"] = graph
        if graph.endswith(".pt2"):
            config["trusted"] = True  # it was made here, of what was trusted to run here
    elif optimize:
        config["optimize"] = optimize
    handler = _handler(job, directory, manifest, {k: v for k, v in config.items() if k != "accuracy"})
    stubborn = type(handler.model) is type(plain.handler.model) if graph and plain else handler.optimisation is None
    if stubborn and (graph or optimize):
        raise HandlerLoadError("the handler loads its model by itself, so nothing can be done to it")
    _write(directory, manifest, config)
    prepared, output = {}, None
    for size in sizes:
        batch = [rows[index % len(rows)] for index in range(size)]
        with _called(handler, size):
            prepared[size] = handler.preprocess(batch)
            output = handler.inference(prepared[size])
            answers = handler.postprocess(output)
        if len(answers) != size:
            raise HandlerLoadError(f"{name}: {len(answers)} answers to {size} rows.")
    output = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
    found = _difference(plain.output if plain is not None else output, output, job.tolerance)
    return Variant(name, directory, manifest, config, handler, prepared, output, found)


def _handler(job: Job, directory: Path, manifest: dict[str, Any], config: dict[str, Any]) -> BaseHandler:
    entry = handlers.load(job.handler, directory, manifest)
    if not isinstance(entry.instance, BaseHandler):
        raise HandlerLoadError(
            f"{job.handler}: only a handler that extends handlers.base.BaseHandler can be optimised, because its model "
            "is loaded by us."
        )
    os.chdir(directory)  # as in a replica
    name = manifest["model"].get("modelName") or directory.name
    context = Context(name, str(directory), manifest, batch_size=job.batch_size, model_yaml_config=config)
    entry.initialize(context)
    return entry.instance


@contextlib.contextmanager
def _called(handler: BaseHandler, size: int) -> Iterator[None]:
    """As in a batch of so many requests, without headers."""
    handler.context.begin([f"sample {i}" for i in range(size)], [{}] * size, [{"body": {}}] * size, None)
    yield


def _rows(files: Sequence[Path]) -> list[Row]:
    """The rows of sample requests: JSON is parsed, text is text, anything else bytes."""
    made = []
    for file in files:
        held = file.read_bytes()
        if file.suffix == ".json":
            made.append(Row({"body": json.loads(held)}))
        else:
            made.append(Row({"body": held.decode() if file.suffix == ".txt" else bytearray(held)}))
    return made


def _linked(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


def _write(directory: Path, manifest: dict[str, Any], config: dict[str, Any]) -> None:
    """The variant's own manifest and model-config.yaml; what they replace may be linked to the archive's."""
    name = manifest["model"].get("configFile") or "model-config.yaml"
    if config:
        manifest["model"]["configFile"] = name
    for file, text in ((name, yaml.safe_dump(config, sort_keys=False)), (MANIFEST, json.dumps(manifest, indent=2))):
        path = directory / file
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _gate(job: Job, plain: Variant, best: Variant) -> None:
    """Let the winner's archive ask for the tolerance that it was held to, on what the model was given here."""
    calls = _calls(plain)
    if len(calls) != 1:
        return
    args, kwargs = calls[0]
    inputs = args[0] if len(args) == 1 and not kwargs else None if args else dict(kwargs)
    held = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    if not held or not all(isinstance(value, torch.Tensor) and value.dim() for value in held):
        return  # inputs that no file of samples has
    (best.directory / _INPUTS).unlink(missing_ok=True)  # it may be linked to the archive's
    torch.save(pytree.tree_map(torch.clone, inputs), best.directory / _INPUTS)
    best.config["accuracy"] = {"samples": _INPUTS} | {k: v for k, v in vars(job.tolerance).items() if v is not None}
    _write(best.directory, best.manifest, best.config)


# Graphs


def _make_graph(job: Job, plain: Variant, file: Path, name: str) -> None:
    """The plain model as a graph in ``file``. That of ONNX is exported once, and with int8 quantized."""
    if not file.name.endswith(".onnx"):
        return _GRAPHS[name](plain.handler.model, *_example(plain), file)
    exported = job.work / "exported" / file.name
    if not exported.is_file():
        exported.parent.mkdir()
        _onnx(plain.handler.model, *_example(plain), exported)
    if name == "onnx-int8":
        quantize_graph(exported, file)
    else:
        shutil.copytree(exported.parent, file.parent, dirs_exist_ok=True)  # no links: ONNX refuses them as hostile


Args, Kwargs = tuple[Any, ...], dict[str, Any]


def _example(plain: Variant) -> tuple[Args, Kwargs]:
    """What the handler's inference calls the model with, at least two rows of it."""
    model = plain.handler.model
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise HandlerLoadError(f"a {type(model).__name__} is a graph already")
    calls = _calls(plain)
    if len(calls) != 1:
        raise HandlerLoadError(f"inference calls the model {len(calls)} times, and a graph stands for one call")
    with torch.no_grad():
        return pytree.tree_map(_twice, calls[0])


def _onnx(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    shapes = _free(args, kwargs)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter about itself
        torch.onnx.export(
            model, args, str(file), kwargs=kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False, optimize=True
        )


def _torchscript(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    """Not frozen: it keeps its gradients, and the number format of its parameters is known."""
    example = {"example_inputs": args}
    if kwargs:
        example = {"example_kwarg_inputs": dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and tracing warns of each constant
        torch.jit.trace(model, **example, strict=False, check_trace=False).save(str(file))


def _export(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    torch.export.save(_program(model, args, kwargs), file)


def _aotinductor(model: torch.nn.Module, args: Args, kwargs: Kwargs, file: Path) -> None:
    program = _program(model, args, kwargs)
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    looks_up = any(isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) for module in model.modules())
    said = {} if floats is None or looks_up else {weights.FLOATS: str(floats).removeprefix("torch.")}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the compiler about itself
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(file), inductor_configs={"aot_inductor.metadata": said}
        )


_GRAPHS: dict[str, Callable[[torch.nn.Module, Args, Kwargs, Path], None]] = {
    "torchscript": _torchscript,
    "export": _export,
    "aotinductor": _aotinductor,
}


def _program(model: torch.nn.Module, args: Args, kwargs: Kwargs) -> torch.export.ExportedProgram:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, kwargs, dynamic_shapes=_free(args, kwargs))


def _free(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """Every dimension as free as the model leaves it, by forward's order and names, as the exporters want it."""

    def free(value: Any) -> Any:
        return dict.fromkeys(range(value.dim()), torch.export.Dim.AUTO) if isinstance(value, torch.Tensor) else None

    return (*(free(value) for value in args), *(free(value) for value in kwargs.values()))


def _calls(variant: Variant) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the handler's inference calls its model with, for the largest batch."""
    calls: list[tuple[Any, Any]] = []

    def see(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))

    hook = variant.handler.model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        rows = max(variant.prepared)
        with _called(variant.handler, rows):
            variant.handler.inference(variant.prepared[rows])
    finally:
        hook.remove()
    return calls


def _twice(value: Any) -> Any:
    """At least two rows: a dimension of one would be taken for a constant. A normal tensor, no inference one."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.cat([value, value]) if value.dim() and len(value) == 1 else value.clone()


# Figures


def _difference(plain: Any, optimised: Any, tolerance: Tolerance) -> Difference:
    if tensors(plain):
        return difference(plain, optimised, tolerance)
    same = plain == optimised  # an inference that gives words or numbers of Python
    return Difference(0.0 if same else math.inf, 1.0 if same else 0.0, "" if same else "the answers are not the same")


def _timed(variant: Variant, size: int) -> list[float]:
    """Seconds of each call of a round: a median of calls forgets the one in which the machine stood still."""
    calls: list[float] = []
    with _called(variant.handler, size):
        until = (now := time.perf_counter()) + _ROUND_S
        while now < until:
            started = now
            variant.handler.inference(variant.prepared[size])
            now = time.perf_counter()
            calls.append(now - started)
    return calls


def _figures(variant: Variant, sizes: list[int]) -> dict[str, Any]:
    finite = math.isfinite(variant.found.largest)
    return {
        "name": variant.name,
        "ms": {size: round(variant.median(size) * 1000, 3) for size in sizes},
        "mib": round(_weights(variant) / 2**20, 2),
        "largest": variant.found.largest if finite else None,
        "cosine": variant.found.cosine,
        "outside": variant.found.outside,
    }


def _weights(variant: Variant) -> int:
    """Bytes of the model's weights: its tensors, or its graph's files."""
    model = variant.handler.model
    if isinstance(model, torch.nn.Module):
        held = [t for t in pytree.tree_leaves(dict(model.state_dict())) if isinstance(t, torch.Tensor)]
        return sum({(t.data_ptr() if not t.is_quantized else id(t)): t.nbytes for t in held}.values())
    return sum(file.stat().st_size for file in variant.directory.glob(f"{VARIANTS[variant.name][1]}*"))


def _short(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _job(said: Mapping[str, Any]) -> Job:
    return Job(
        directory=Path(said["directory"]),
        work=Path(said["work"]),
        manifest=said["manifest"],
        config=said["config"],
        handler=said["handler"],
        samples=[Path(file) for file in said["samples"]],
        batch_size=said["batch_size"],
        tolerance=Tolerance.of(said["tolerance"]),
        variants=said["variants"],
        rounds=said["rounds"],
    )


def main() -> None:
    """A job as JSON on stdin; on stdout a line of JSON for each step, ``{"doing": ...}``, and last the result or
    ``{"error": ...}``. What the libraries print goes to stderr."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**line: Any) -> None:
        print(json.dumps(line), file=lines, flush=True)

    said = json.load(sys.stdin)
    if said.get("threads"):
        torch.set_num_threads(said["threads"])
    try:
        say(**tried(_job(said), lambda doing: say(doing=doing)))
    except (HandlerLoadError, PredictionException, ValueError, OSError) as error:
        say(error=str(error))


if __name__ == "__main__":
    main()
