"""The base class of handlers, which loads the archive's model and runs its stages."""

from __future__ import annotations

import contextlib
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

from handlers import tensor_batch
from handlers.builtin.labels import load_label_mapping
from handlers.errors import PredictionException
from handlers.explain import attributions
from handlers.loading import device, optional_deps, weights
from handlers.micro_batching import MicroBatching
from handlers.optimize import compile
from handlers.optimize.apply import OptimizationOptions, warmup_batch_sizes
from handlers.optimize.tolerance_gate import ToleranceGate, run_model, take_rows
from handlers.row_errors import RowErrors
from handlers.row_parsing import (
    parse_row,
    parse_tensor_row,
    read_explanation_fields,
    read_explanation_input,
    to_tensor,
)
from handlers.torchserve_compat.timer import timed
from handlers.tracing import stage_spans

logger = logging.getLogger(__name__)
# Formats for which sending an array saves time; see allow_array_outputs.
_ARRAY_DTYPES = frozenset((torch.float32, torch.float64, torch.float16))


class BaseHandler(ABC):  # noqa: B024  (as TorchServe has it)
    """A handler for a model of tensors.

    Each row's ``data`` or ``body`` is a list of numbers, and so is each value that it returns. A subclass
    overrides the stages that differ. It can fail one row, by ``reject`` or by returning an exception in the
    row's place; the batch's other rows continue.
    """

    input_type = ""  # the media type of a row, such as image/*, for forms; empty: unknown
    optimization: OptimizationOptions | None = None  # from model-config.yaml, once it is applied
    # A model, its parameters' float dtype, and whether it has an embedding.
    _parameter_info: tuple[Any, torch.dtype | None, bool] = (None, None, False)
    explanation_options = attributions.ExplanationOptions()  # from model-config.yaml
    _array_outputs = False  # whether numeric outputs may be numpy arrays
    explained_row: Any = None  # the row of get_insights; the first of several with the same options

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
        """Load the model that the manifest names, and its labels from ``index_to_name.json``.

        The model is moved to the device, and compiled if configured.
        """
        properties = context.system_properties
        self.context = context
        self.model_yaml_config = getattr(context, "model_yaml_config", None) or {}
        self.manifest = context.manifest
        self.explanation_options = attributions.ExplanationOptions.from_config(self.model_yaml_config)
        self.device = device.select_device(properties.get("gpu_id"))
        self.map_location = self.device.type

        optional_deps.register_backends()
        model_dir = properties.get("model_dir")
        model = (self.manifest or {}).get("model") or {}
        serialized_file = model.get("serializedFile")
        self.model_pt_path = os.path.join(model_dir, serialized_file) if serialized_file else None
        if model.get("modelFile"):
            self.model = self._load_pickled_model(model_dir, model["modelFile"], self.model_pt_path)
        elif self.model_pt_path is not None and self.model_pt_path.endswith(".pt"):
            self.model = self._load_torchscript_model(self.model_pt_path)
        elif (
            self.model_pt_path is not None
            and self.model_pt_path.endswith(".so")
            and self._use_torch_export_aot_compile()
        ):
            self.model = self._load_torch_export_aot_compile(self.model_pt_path)
        else:
            file = Path(self.model_pt_path) if self.model_pt_path else None
            self.model = weights.load(file, self.device, self._is_trusted(), self.model_yaml_config)
        if isinstance(self.model, torch.nn.Module):
            self.model.to(self.device)
            self.model.eval()
        self.model = compile.compile_model(self.model, self.model_yaml_config.get("pt2"))
        self._apply_optimization(Path(model_dir))
        self.mapping = load_label_mapping(os.path.join(model_dir, "index_to_name.json"))
        self._enable_micro_batching()
        self.initialized = True

    def _apply_optimization(self, directory: Path) -> None:
        """Apply ``optimize:`` of model-config.yaml, and check the outputs if ``accuracy:`` is set."""
        options = OptimizationOptions.from_config(self.model_yaml_config)
        if options is None:
            return
        self.optimization = options
        assert self.device is not None
        gate = ToleranceGate.from_config(self.model_yaml_config, directory, self.device, self._input_dtype)
        parameters = _inspect_parameters(self.model)
        if gate is not None:
            gate.record_reference(self.model)
        elif options.is_lossy:
            logger.warning(
                "optimize: %s changes outputs, and model-config.yaml has no accuracy: to limit by how much",
                options,
            )
        file = Path(self.model_pt_path) if self.model_pt_path else None
        self.model = options.apply(self.model, self.device, file)
        self._parameter_info = (self.model, *parameters)  # the optimized model takes the same input formats
        if gate is None:
            return
        difference = gate.check(self.model, options)
        logger.info(
            "optimize: %s is off by %.3g at most, cosine %.5f",
            options,
            difference.max_difference,
            difference.min_cosine,
        )
        if options.compile is not None:
            for size in warmup_batch_sizes(self.context.system_properties.get("batch_size") or 1):
                run_model(self.model, take_rows(gate.inputs, size))

    def _enable_micro_batching(self) -> None:
        """Replace ``handle`` by MicroBatching if model-config.yaml configures it.

        A ``handle`` that the author has replaced stays.
        """
        options = self.model_yaml_config.get("micro_batching")
        if options is not None and type(self).handle is BaseHandler.handle and "handle" not in vars(self):
            self.handle = MicroBatching.from_config(self, options)  # type: ignore[method-assign]

    def allow_array_outputs(self) -> None:
        """Allow numpy arrays in the place of nested lists in numeric outputs from now on.

        It is for a caller that serializes arrays as lists, which takes less time than to make the lists.
        Where an author's own ``handle`` or ``postprocess`` reads the outputs first, they stay lists.
        """
        stages = self.handle, self.postprocess
        self._array_outputs = all(stage.__module__.partition(".")[0] == "handlers" for stage in stages)

    def _to_values(self, tensor: torch.Tensor) -> Any:
        """Return one value for each row of a tensor: nested lists, or one array where arrays are allowed."""
        if (
            not self._array_outputs
            or not isinstance(tensor, torch.Tensor)
            or tensor.dtype not in _ARRAY_DTYPES
        ):
            return tensor.tolist()
        return tensor.numpy(force=True)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        return weights.load_torchscript(Path(model_pt_path), self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        file = Path(model_pt_path) if model_pt_path else None
        return weights.load_eager(Path(model_dir) / model_file, file, self._is_trusted())

    def _is_trusted(self) -> bool:
        """Return whether the weights may run code as they are read."""
        return (getattr(self, "model_yaml_config", None) or {}).get("trusted") is True

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Callable[..., Any]:
        """Return a model that torch.export and AOTInductor compiled to a shared library."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the library runs on the current device
        model: Callable[..., Any] = torch._export.aot_load(model_so_path, str(self.map_location))
        return model

    def _use_torch_export_aot_compile(self) -> bool:
        """Return whether model-config.yaml has ``pt2: {export: {aot_compile: true}}``."""
        pt2 = (getattr(self, "model_yaml_config", None) or {}).get("pt2")
        export = pt2.get("export") if isinstance(pt2, Mapping) else None
        return isinstance(export, Mapping) and export.get("aot_compile") is True

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        """Return one value or one exception for each row of ``data``."""
        started = time.perf_counter()
        self.context = context
        row_errors = RowErrors(len(data))
        with row_errors.activate():
            try:
                output: list[Any] = row_errors.merge_into(self._dispatch(data))
            except PredictionException:
                if not row_errors.is_complete:
                    raise
                output = row_errors.to_list()
        metrics = getattr(context, "metrics", None)
        if metrics is not None:
            metrics.add_time("HandlerTime", round((time.perf_counter() - started) * 1000, 2), None, "ms")
        return output

    def _dispatch(self, data: list[Any]) -> list[Any]:
        if self._is_describe():
            return [self.describe_handle() for _ in data]
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            return self._infer_with_profiler(data)[0]
        if _is_profiler_enabled():
            return self._run_stages(data, torch.profiler.record_function)
        return self._run_stages(data, stage_spans() or _no_span)

    @property
    def takes_tensors(self) -> bool:
        """Return whether rows of named arrays, with a batch axis, are run unchanged.

        It is False where the author overrides ``handle`` or a stage.
        """
        stages = ("handle", "preprocess", "inference", "postprocess")
        return all(getattr(type(self), stage) is getattr(BaseHandler, stage) for stage in stages)

    @property
    def declared_signature(self) -> Mapping[str, Any]:
        """Return ``signature`` of model-config.yaml; an author may have another value under this key."""
        signature = self.model_yaml_config.get("signature")
        return signature if isinstance(signature, Mapping) else {}

    def _run_stages(self, data: list[Any], span: Callable[[str], Any]) -> list[Any]:
        if tensor_batch.is_tensor_batch(data) and self.takes_tensors and not self._is_explain():
            with span("inference"):
                return tensor_batch.run(data, self._infer_arrays)
        with span("preprocess"):
            prepared = self.preprocess(data)
        if self._is_explain():
            with span("explain"):
                return self.explain_handle(prepared, data)
        with span("inference"):
            output = self.inference(prepared)
        with span("postprocess"):
            values: list[Any] = self.postprocess(output)
        return values

    def _infer_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the model's outputs by name for its inputs by name.

        Inputs are passed in the order of ``signature:``, else in the order of ``arrays``.
        """
        signature = self.declared_signature
        input_names = [port["name"] for port in signature.get("inputs", ())] or list(arrays)
        if text := next((name for name in input_names if arrays[name].dtype == np.object_), None):
            raise PredictionException(f"The input {text} is BYTES, and this model takes numbers.", 400)
        inputs = [torch.from_numpy(arrays[name]) for name in input_names]
        first, *others = [tensor.to(self.device, self._input_dtype(tensor)) for tensor in inputs]
        output = self.inference(first, *others)
        if isinstance(output, Mapping):
            return dict(output)
        outputs = list(output) if isinstance(output, (list, tuple)) else [output]
        names = [port["name"] for port in signature.get("outputs", ())]
        names += [f"output-{place}" for place in range(len(names), len(outputs))]
        return dict(zip(names, outputs))

    def _infer_with_profiler(self, data: list[Any]) -> tuple[list[Any], torch.profiler.profile]:
        """Return the output, and the profile.

        ``profiler_args`` are torch.profiler.profile's arguments. By default, the profile is written as a
        Chrome trace to ``pytorch_profiler/<model>`` of the temporary directory.
        """
        arguments = {"record_shapes": True, **self.profiler_args}
        if "on_trace_ready" not in arguments:
            directory = os.path.join(
                tempfile.gettempdir(), "pytorch_profiler", getattr(self.context, "model_name", "")
            )
            logger.info("The profiler's trace is written to %s", directory)
            arguments["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(directory)
        with torch.profiler.profile(**arguments) as profile:
            output = self._run_stages(data, torch.profiler.record_function)
        logger.info(profile.key_averages().table(sort_by="cpu_time_total", row_limit=10))
        return output, profile

    @timed
    def preprocess(self, data: list[Any]) -> torch.Tensor:
        """Return one tensor, with a row for each row of ``data``, in the number format of the model's
        parameters.
        """
        if isinstance(data, torch.Tensor):
            return data.to(self.device)
        try:
            tensor = to_tensor([parse_row(row) for row in data])
        except ValueError:  # a row is not a list of numbers, or rows differ in length
            tensor = self._stack_rows(data, parse_tensor_row)
        return tensor.to(self.device, self._input_dtype(tensor))

    @timed
    def inference(self, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for ``data``, computed without gradients."""
        with torch.inference_mode():
            return self.model(data.to(self.device) if hasattr(data, "to") else data, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return one value for each row of the model's output."""
        values: list[Any] = self._to_values(data)
        return values

    def reject(self, index: int, error: Exception) -> None:
        """Fail row ``index`` with ``error``; outside of ``handle``, raise it.

        Values that the stages return for the row are discarded. The row keeps its place in the batch, so that
        every stage still gets the same number of rows.
        """
        RowErrors.reject(index, error)

    def _stack_rows(self, data: Sequence[Any], convert: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return the values of ``_map_rows`` as one tensor."""
        return torch.stack(self._map_rows(data, convert))

    def _map_rows(self, data: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
        """Return ``convert`` of each row; a row for which it raises PredictionException is rejected.

        A rejected row is replaced by the value of a valid one. Where all rows are rejected, the first error
        is raised.
        """
        values: list[Any] = []
        errors = {}
        for index, row in enumerate(data):
            try:
                values.append(convert(row))
            except PredictionException as error:
                self.reject(index, error)
                errors[index] = error
                values.append(None)
        if not errors:
            return values
        valid = next((index for index in range(len(values)) if index not in errors), None)
        if valid is None:
            raise errors[0]
        return [values[valid] if index in errors else value for index, value in enumerate(values)]

    def _input_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the format in which the model takes ``tensor``.

        JSON writes 1.0 as 1, so integers become the model's floats, unless the model looks them up in an
        embedding.
        """
        model, floats, has_embedding = self._parameter_info
        if model is not self.model:  # inspected once, not for each batch
            model, floats, has_embedding = self._parameter_info = (
                self.model,
                *_inspect_parameters(self.model),
            )
        if floats is None or (has_embedding and not tensor.is_floating_point()):
            return tensor.dtype
        return floats

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        """Return the insights into each row; its ``target`` field selects the output, 0 by default."""
        default = self.explanation_options.target
        inputs = [read_explanation_input(row, default) for row in raw_data]
        fields = [read_explanation_fields(row) for row in raw_data]
        if isinstance(data_preprocess, torch.Tensor) and (
            any(target != inputs[0][1] for _, target in inputs) or any(row != fields[0] for row in fields)
        ):
            rows = [data_preprocess[index : index + 1] for index in range(len(raw_data))]
            return self._insights_by_row(rows, raw_data)
        self.explained_row = raw_data[0]
        return self.get_insights(data_preprocess, *inputs[0])

    def _insights_by_row(self, inputs: Sequence[Any], raw_data: Sequence[Any]) -> list[Any]:
        """Return each row's insights, computed separately; PredictionException rejects only its row."""
        insights: list[Any] = []
        for index, (row, raw) in enumerate(zip(inputs, raw_data)):
            self.explained_row = raw
            try:
                insights += self.get_insights(
                    row, *read_explanation_input(raw, self.explanation_options.target)
                )
            except PredictionException as error:
                self.reject(index, error)
                insights.append(None)
        return insights

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any) -> list[Any]:
        """Return an explanation for each row of ``tensor_data``; a handler that can explain overrides it."""
        raise PredictionException(
            f"{type(self).__name__} cannot be explained: its handler does not define get_insights.", 501
        )

    def _is_explain(self) -> bool:
        self.explain = self._is_flag_set("explain")
        return self.explain

    def _is_describe(self) -> bool:
        return self._is_flag_set("describe")

    def _is_flag_set(self, header: str) -> bool:
        """Return whether the batch has this request header; batches never mix kinds, so its first row
        decides.
        """
        return bool(self.context) and self.context.get_request_header(0, header) == "True"

    def describe_handle(self) -> Any:
        """Return the model's description for ``customized=true``; a subclass may override this."""
        return None

    def get_device(self) -> torch.device | None:
        return self.device


def _is_profiler_enabled() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


def _no_span(stage: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _inspect_parameters(model: Any) -> tuple[torch.dtype | None, bool]:
    """Return the dtype of the model's parameters, and whether it looks integers up in an embedding."""
    if not isinstance(model, torch.nn.Module):
        return getattr(model, "input_dtype", None), False
    # All TorchScript modules have the same class; original_name is the class that was compiled.
    names = {getattr(module, "original_name", type(module).__name__) for module in model.modules()}
    floats = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return floats, not names.isdisjoint(("Embedding", "EmbeddingBag"))
