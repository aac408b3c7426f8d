"""The handler that others extend: load the archive's model, then preprocess, inference, postprocess."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from handlers import compilation, device, explanations, extensions, tensor_rows, weights
from handlers.accuracy import Gate, call, rows
from handlers.errors import PredictionException
from handlers.labels import load_label_mapping
from handlers.micro_batching import MicroBatching
from handlers.optimisation import Optimisation, buckets
from handlers.rejections import Rejections
from handlers.timer import timed

logger = logging.getLogger(__name__)
_NUMPY = frozenset((torch.float32, torch.float64, torch.float16))  # the formats that leave_arrays is worth it for


class BaseHandler(ABC):  # noqa: B024  (as TorchServe has it)
    """Serves a model of tensors: each row's ``data`` or ``body`` is a list of numbers, each answer one too.

    A subclass overrides the stages that differ. It may answer one row with an error, by ``reject``
    or by returning an exception in the row's place; the batch's other rows go on.
    """

    optimisation: Optimisation | None = None  # what model-config.yaml asked for, where it was heeded
    _inspected: tuple[Any, torch.dtype | None, bool] = (None, None, False)  # a model, its floats, whether it embeds
    question = explanations.Question()  # what model-config.yaml says of explanations
    _arrays = False  # whether answers of numbers may be numpy arrays
    asked: Any = None  # the row that get_insights is asked for, the first of several that ask alike

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: torch.device | None = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: dict[str, Any] | None = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.profiler_args: dict[str, Any] = {}
        self.model_yaml_config: dict[str, Any] = {}

    def initialize(self, context: Any) -> None:
        """Load the model that the manifest names onto the device, compiled if asked, and ``index_to_name.json``."""
        properties = context.system_properties
        self.context = context
        self.model_yaml_config = getattr(context, "model_yaml_config", None) or {}
        self.manifest = context.manifest
        self.question = explanations.Question.read(self.model_yaml_config)
        self.device = device.choose(properties.get("gpu_id"))
        self.map_location = self.device.type

        extensions.register_backends()
        model_dir = properties.get("model_dir")
        model = (self.manifest or {}).get("model") or {}
        serialized_file = model.get("serializedFile")
        self.model_pt_path = os.path.join(model_dir, serialized_file) if serialized_file else None
        if model.get("modelFile"):
            self.model = self._load_pickled_model(model_dir, model["modelFile"], self.model_pt_path)
        elif self.model_pt_path is not None and self.model_pt_path.endswith(".pt"):
            self.model = self._load_torchscript_model(self.model_pt_path)
        elif serialized_file and serialized_file.endswith(".so") and self._use_torch_export_aot_compile():
            self.model = self._load_torch_export_aot_compile(self.model_pt_path)
        else:
            file = Path(self.model_pt_path) if self.model_pt_path else None
            self.model = weights.load(file, self.device, self._trusted())
        if isinstance(self.model, torch.nn.Module):
            self.model.to(self.device)
            self.model.eval()
        self.model = compilation.compiled(self.model, self.model_yaml_config.get("pt2"))
        self._optimise(Path(model_dir))
        self.mapping = load_label_mapping(os.path.join(model_dir, "index_to_name.json"))
        self._micro_batch()
        self.initialized = True

    def _optimise(self, directory: Path) -> None:
        """What ``optimize:`` of model-config.yaml asks for, once ``accuracy:`` has seen that the answers stay."""
        asked = Optimisation.read(self.model_yaml_config)
        if asked is None:
            return
        self.optimisation = asked
        assert self.device is not None
        gate = Gate.read(self.model_yaml_config, directory, self.device, self._input_dtype)
        wants = _inspect(self.model)
        if gate is not None:
            gate.learn(self.model)
        elif asked.lossy:
            logger.warning("optimize: %s changes answers, and no accuracy: in model-config.yaml says how far", asked)
        file = Path(self.model_pt_path) if self.model_pt_path else None
        self.model = asked.applied(self.model, self.device, file)
        self._inspected = (self.model, *wants)  # it takes what it took
        if gate is None:
            return
        found = gate.check(self.model, asked)
        logger.info("optimize: %s is off by %.3g at most, cosine %.5f", asked, found.largest, found.cosine)
        if asked.compile is not None:
            for size in buckets(self.context.system_properties.get("batch_size") or 1):
                call(self.model, rows(gate.inputs, size))

    def _micro_batch(self) -> None:
        """Let ``handle`` cut up its batches where model-config.yaml asks for it and the author has not done it."""
        options = self.model_yaml_config.get("micro_batching")
        if options is not None and type(self).handle is BaseHandler.handle and "handle" not in vars(self):
            self.handle = MicroBatching.of(self, options)  # type: ignore[method-assign]

    def leave_arrays(self) -> None:
        """From here on an answer of numbers may be a numpy array in the place of nested lists.

        For a caller that writes arrays as their lists, which takes less time than to make the lists. Where an author's
        own ``handle`` or ``postprocess`` reads the answers first, they stay lists.
        """
        readers = self.handle, self.postprocess
        self._arrays = all(reader.__module__.partition(".")[0] == "handlers" for reader in readers)

    def _numbers(self, rows: torch.Tensor) -> Any:
        """One answer for each row of a tensor: nested lists, or one array where ``leave_arrays`` allows it."""
        if not self._arrays or not isinstance(rows, torch.Tensor) or rows.dtype not in _NUMPY:
            return rows.tolist()
        return rows.numpy(force=True)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        return weights.torchscript(Path(model_pt_path), self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        file = Path(model_pt_path) if model_pt_path else None
        return weights.eager(Path(model_dir) / model_file, file, self._trusted())

    def _trusted(self) -> bool:
        """Whether the weights may run code as they are read."""
        return (getattr(self, "model_yaml_config", None) or {}).get("trusted") is True

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Callable[..., Any]:
        """A model that torch.export and AOTInductor compiled to a shared library."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the library asks for no device
        return torch._export.aot_load(model_so_path, str(self.map_location))

    def _use_torch_export_aot_compile(self) -> bool:
        """Whether model-config.yaml says ``pt2: {export: {aot_compile: true}}``."""
        pt2 = (getattr(self, "model_yaml_config", None) or {}).get("pt2")
        export = pt2.get("export") if isinstance(pt2, Mapping) else None
        return isinstance(export, Mapping) and export.get("aot_compile") is True

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        """One answer or one exception for each row of ``data``."""
        started = time.perf_counter()
        self.context = context
        rejections = Rejections(len(data))
        with rejections.taken():
            try:
                output = rejections.over(self._answer(data))
            except PredictionException:
                if not rejections.complete:
                    raise
                output = rejections.alone()
        metrics = getattr(context, "metrics", None)
        if metrics is not None:
            metrics.add_time("HandlerTime", round((time.perf_counter() - started) * 1000, 2), None, "ms")
        return output

    def _answer(self, data: list[Any]) -> list[Any]:
        if self._is_describe():
            return [self.describe_handle() for _ in data]
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            return self._infer_with_profiler(data)[0]
        return self._run(data, torch.profiler.record_function if _profiled() else _unmarked)

    @property
    def takes_tensors(self) -> bool:
        """Whether rows of named arrays, batch axis and all, are run as they are: not where a stage is the author's."""
        stages = ("preprocess", "inference", "postprocess")
        return all(getattr(type(self), stage) is getattr(BaseHandler, stage) for stage in stages)

    def _run(self, data: list[Any], mark: Callable[[str], Any]) -> list[Any]:
        if tensor_rows.are(data) and self.takes_tensors and not self._is_explain():
            with mark("inference"):
                return tensor_rows.run(data, self._of_arrays)
        with mark("preprocess"):
            prepared = self.preprocess(data)
        if self._is_explain():
            with mark("explain"):
                return self.explain_handle(prepared, data)
        with mark("inference"):
            output = self.inference(prepared)
        with mark("postprocess"):
            return self.postprocess(output)

    def _of_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """The model's outputs by name, for inputs by name: in the order of ``signature:``, else as they came."""
        signature = self.model_yaml_config.get("signature") or {}
        named = [port["name"] for port in signature.get("inputs", ())] or list(arrays)
        if text := next((name for name in named if arrays[name].dtype == np.object_), None):
            raise PredictionException(f"The input {text} is BYTES, and this model takes numbers.", 400)
        inputs = [torch.from_numpy(arrays[name]) for name in named]
        first, *others = [tensor.to(self.device, self._input_dtype(tensor)) for tensor in inputs]
        output = self.inference(first, *others)
        if isinstance(output, Mapping):
            return dict(output)
        several = list(output) if isinstance(output, (list, tuple)) else [output]
        names = [port["name"] for port in signature.get("outputs", ())]
        names += [f"output-{place}" for place in range(len(names), len(several))]
        return dict(zip(names, several))

    def _infer_with_profiler(self, data: list[Any]) -> tuple[list[Any], torch.profiler.profile]:
        """The output, and the profile; ``profiler_args`` are torch.profiler.profile's, by default a Chrome trace
        in ``pytorch_profiler/<model>`` of the temporary directory."""
        arguments = {"record_shapes": True, **self.profiler_args}
        if "on_trace_ready" not in arguments:
            directory = os.path.join(tempfile.gettempdir(), "pytorch_profiler", getattr(self.context, "model_name", ""))
            logger.info("The profiler's trace goes to %s", directory)
            arguments["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(directory)
        with torch.profiler.profile(**arguments) as profile:
            output = self._run(data, torch.profiler.record_function)
        logger.info(profile.key_averages().table(sort_by="cpu_time_total", row_limit=10))
        return output, profile

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor:
        """One tensor, a row of it for each row of ``data``, in the number format of the model's parameters."""
        if isinstance(data, torch.Tensor):
            return data.to(self.device)
        try:
            tensor = _tensor([row_value(row) for row in data])
        except ValueError:  # some row is no list of numbers, or not as long as its neighbours
            tensor = self._stack(data, _one_row)
        return tensor.to(self.device, self._input_dtype(tensor))

    @timed
    def inference(self, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the model makes of ``data``, without gradients."""
        with torch.inference_mode():
            return self.model(data.to(self.device) if hasattr(data, "to") else data, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """One answer for each row of the model's output."""
        return self._numbers(data)

    def reject(self, index: int, error: Exception) -> None:
        """Answer row ``index`` with ``error``, whatever the stages make of the row; outside of ``handle`` it is raised.

        The row keeps its place in the batch, so that every stage still sees as many rows as came.
        """
        Rejections.reject(index, error)

    def _stack(self, data: Sequence[Any], make: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """``_each`` as one tensor."""
        return torch.stack(self._each(data, make))

    def _each(self, data: Sequence[Any], make: Callable[[Any], Any]) -> list[Any]:
        """``make`` of each row; a row for which it raises PredictionException is rejected.

        A sound row's stands in for the rejected ones. Where there is none, the first error is raised.
        """
        made: list[Any] = []
        errors = {}
        for index, row in enumerate(data):
            try:
                made.append(make(row))
            except PredictionException as error:
                self.reject(index, error)
                errors[index] = error
                made.append(None)
        if not errors:
            return made
        sound = next((index for index in range(len(made)) if index not in errors), None)
        if sound is None:
            raise errors[0]
        return [made[sound] if index in errors else value for index, value in enumerate(made)]

    def _input_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """JSON writes 1.0 as 1, so integers become the model's floats, unless it looks them up in an embedding."""
        model, floats, looks_up = self._inspected
        if model is not self.model:  # walked through once, not for each batch
            model, floats, looks_up = self._inspected = (self.model, *_inspect(self.model))
        if floats is None or (looks_up and not tensor.is_floating_point()):
            return tensor.dtype
        return floats

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        """The insights into each row; its ``target`` field says into which output, 0 by default."""
        default = self.question.target
        asked = [_asked_of(row, default) for row in raw_data]
        how = [_how(row) for row in raw_data]
        if isinstance(data_preprocess, torch.Tensor) and (
            any(target != asked[0][1] for _, target in asked) or any(one != how[0] for one in how)
        ):
            rows = [data_preprocess[index : index + 1] for index in range(len(raw_data))]
            return self._insights_by_row(rows, raw_data)
        self.asked = raw_data[0]
        return self.get_insights(data_preprocess, *asked[0])

    def _insights_by_row(self, inputs: Sequence[Any], raw_data: Sequence[Any]) -> list[Any]:
        """Each row's insights by themselves; a row for which PredictionException is raised is rejected."""
        insights: list[Any] = []
        for index, (row, raw) in enumerate(zip(inputs, raw_data)):
            self.asked = raw
            try:
                insights += self.get_insights(row, *_asked_of(raw, self.question.target))
            except PredictionException as error:
                self.reject(index, error)
                insights.append(None)
        return insights

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any) -> list[Any]:
        """An explanation for each row of ``tensor_data``; a handler that can explain overrides this."""
        raise PredictionException(f"{type(self).__name__} explains nothing: its handler defines no get_insights.", 501)

    def _is_explain(self) -> bool:
        self.explain = self._asked("explain")
        return self.explain

    def _is_describe(self) -> bool:
        return self._asked("describe")

    def _asked(self, kind: str) -> bool:
        """A batch never mixes kinds of call, so its first row speaks for all."""
        return bool(self.context) and self.context.get_request_header(0, kind) == "True"

    def describe_handle(self) -> Any:
        """What this model says of itself to whoever describes it; a subclass may say something."""
        return None

    def get_device(self) -> torch.device | None:
        return self.device


def _profiled() -> bool:
    return torch.autograd.profiler._is_profiler_enabled


def _unmarked(stage: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def row_value(row: Any) -> Any:
    """What a row holds; text and bytes are read as JSON."""
    if isinstance(row, Mapping):
        row = row["data"] if row.get("data") is not None else row.get("body")
    return json.loads(row) if isinstance(row, (str, bytes, bytearray)) else row


def _tensor(values: list[Any]) -> torch.Tensor:
    array = np.asarray(values)  # several times faster than torch.as_tensor on nested lists
    if array.dtype.kind not in "biuf":
        raise ValueError("not all of it are numbers")
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)


def _one_row(row: Any) -> torch.Tensor:
    try:
        return _tensor([row_value(row)])[0]
    except ValueError as error:
        raise PredictionException(f"The input is not a JSON list of numbers: {error}", 400) from error


def _inspect(model: Any) -> tuple[torch.dtype | None, bool]:
    """The number format of the model's parameters, and whether it looks integers up in an embedding."""
    if not isinstance(model, torch.nn.Module):
        return getattr(model, "floats", None), False
    # A TorchScript module is of one class whatever it was; its original_name remembers.
    names = {getattr(module, "original_name", type(module).__name__) for module in model.modules()}
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return floats, not names.isdisjoint(("Embedding", "EmbeddingBag"))


def _asked_of(row: Any, default: Any) -> tuple[Any, Any]:
    """What a row that is to be explained holds, and the output that it asks about."""
    if not isinstance(row, Mapping):
        return row, default
    return row.get("data") or row.get("body"), _target(row.get("target"), default)


def _how(row: Any) -> list[Any]:
    """How a row asks to be explained, as it came."""
    return [row.get(key) for key in ("method", "steps", "internal_batch_size")] if isinstance(row, Mapping) else []


def _target(value: Any, default: Any) -> Any:
    """A form sends its fields as text; what is no number stays as the author's get_insights knows it."""
    if value is None or value == "" or value == b"":
        return default
    try:
        return int(value) if isinstance(value, (str, bytes, bytearray)) else value
    except ValueError:
        return value
