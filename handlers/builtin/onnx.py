"""The built-in handler ``onnx``: any ONNX graph with JSON inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from handlers import tensor_batch
from handlers.base import BaseHandler
from handlers.errors import HandlerLoadError, PredictionException
from handlers.explain import attributions
from handlers.onnx_model import GraphPort, OnnxModel, shape_matches
from handlers.row_parsing import parse_row
from handlers.torchserve_compat.timer import timed


class OnnxHandler(BaseHandler):
    """A handler whose rows are the graph's inputs without the batch axis.

    A row is a list of numbers, or ``{input's name: list}``. Its value is the output as nested lists, or
    ``{output's name: lists}`` if there are several. Rows of the same shape run together; if an axis may have
    any length, rows of each length do.

    A row of named arrays is the graph's input with its batch axis, and its value is the graph's output.
    """

    model: OnnxModel
    takes_tensors = True

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        if not isinstance(self.model, OnnxModel):
            raise HandlerLoadError(
                f"{self.model_pt_path}: the handler onnx serves an .onnx file and this is none. Archive one "
                "with --serialized-file, or name another handler (base_handler)."
            )
        for port in self.model.inputs if self.model_yaml_config.get("tensors") is not True else ():
            if not port.shape or (isinstance(port.shape[0], int) and port.shape[0] != 1):
                raise HandlerLoadError(
                    f"{self.model_pt_path}: the input {port} has no batch axis in front, so the handler "
                    "onnx cannot tell its rows apart. Export the graph with a dynamic first axis, or write "
                    "a handler that calls self.model as the graph wants it."
                )
        self.model.check_signature(self.declared_signature.get("inputs") or ())

    @property
    def signature(self) -> dict[str, Any]:
        """The graph's inputs and outputs, in the form of the Open Inference Protocol."""
        ports_by_side = {"inputs": self.model.inputs, "outputs": self.model.outputs}
        return {
            side: [_format_port(port, self.model.row_by_row) for port in ports]
            for side, ports in ports_by_side.items()
        }

    def _run_stages(self, data: list[Any], span: Callable[[str], Any]) -> list[Any]:
        if tensor_batch.is_tensor_batch(data) and not self._is_explain():
            fixed = any(not port.shape or type(port.shape[0]) is int for port in self.model.inputs)
            with span("inference"):
                return tensor_batch.run(
                    data, self._infer_arrays, separately=fixed and not self.model.row_by_row
                )
        return super()._run_stages(data, span)

    def _infer_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        output = self.model({name: _decode_texts(array) for name, array in arrays.items()})
        return output if isinstance(output, dict) else {self.model.outputs[0].name: output}

    @timed
    def preprocess(self, data: list[Any]) -> list[dict[str, np.ndarray]]:
        """Return the inputs of each row by name, each with a batch axis of length 1."""
        return self._map_rows(data, self._parse_row)

    @timed
    def inference(self, data: list[dict[str, np.ndarray]]) -> list[dict[str, Any]]:
        """Return the outputs of each row by name."""
        indices_by_shape: dict[tuple[Any, ...], list[int]] = {}
        for index, row in enumerate(data):
            indices_by_shape.setdefault(tuple(array.shape for array in row.values()), []).append(index)
        outputs_by_row: list[dict[str, Any]] = [{}] * len(data)
        for indices in indices_by_shape.values():
            batch = {
                name: np.concatenate([data[index][name] for index in indices]) for name in data[indices[0]]
            }
            output = self.model(batch)
            named = output if isinstance(output, dict) else {self.model.outputs[0].name: output}
            for name, values in named.items():
                if np.ndim(values) == 0 or len(values) != len(indices):
                    raise ValueError(
                        f"{self.model_pt_path}: the output {name} of {len(indices)} rows has the shape "
                        f"{list(np.shape(values))}, so none of it is a row's own. Write a handler for this "
                        "graph."
                    )
            for place, index in enumerate(indices):
                outputs_by_row[index] = {name: values[place] for name, values in named.items()}
        return outputs_by_row

    @timed
    def postprocess(self, data: list[dict[str, Any]]) -> list[Any]:
        values = [{name: _to_list(value) for name, value in row.items()} for row in data]
        return values if len(self.model.outputs) > 1 else [next(iter(row.values())) for row in values]

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        return self._insights_by_row(data_preprocess, raw_data)

    def get_insights(self, tensor_data: dict[str, np.ndarray], raw_data: Any, target: Any = 0) -> list[Any]:
        """Return the attribution of each number of the row to number ``target`` of the graph's first output.

        It is nested as the row is. Of several inputs, each is explained while the others stay unchanged.
        """
        options = self.explanation_options.for_row(self.explained_row, target)
        attributions_by_input = {
            name: self._attribute(name, tensor_data, options)[0].tolist()
            for name, array in tensor_data.items()
            if array.dtype.kind in "iuf"
        }
        return [
            attributions_by_input
            if len(self.model.inputs) > 1
            else next(iter(attributions_by_input.values()), [])
        ]

    def _attribute(
        self, name: str, row: dict[str, np.ndarray], options: attributions.ExplanationOptions
    ) -> torch.Tensor:
        def forward(values: torch.Tensor) -> Any:
            rows = {other: np.repeat(array, len(values), 0) for other, array in row.items()}
            output = self.model({**rows, name: values})
            return next(iter(output.values())) if isinstance(output, dict) else output

        return attributions.attribute(forward, torch.from_numpy(row[name]), options)

    def describe_handle(self) -> Any:
        """Return the graph's inputs and outputs, with their number formats and shapes."""
        ports_by_side = {"inputs": self.model.inputs, "outputs": self.model.outputs}
        return {
            key: [{**port._asdict(), "shape": list(port.shape)} for port in ports]
            for key, ports in ports_by_side.items()
        }

    def _parse_row(self, row: Any) -> dict[str, np.ndarray]:
        try:
            value = parse_row(row)
        except ValueError as error:
            raise PredictionException(
                f"The input is not JSON: {error}. The model takes {self.model}.", 400
            ) from error
        if not isinstance(value, Mapping):
            if isinstance(row, Mapping) and not {"data", "body"} & set(
                row
            ):  # a form with a field for each input
                value = {name: parse_row({"data": field}) for name, field in row.items()}
            else:
                value = {self.model.inputs[0].name: value}
        self.model.check_names(value)
        arrays = {port.name: self.model.convert(port, value[port.name])[None] for port in self.model.inputs}
        for port in self.model.inputs:
            if not shape_matches(arrays[port.name].shape, port.shape):
                raise PredictionException(
                    f"The input does not fit the model: a row's {port.name} has the shape "
                    f"{list(arrays[port.name].shape[1:])}. The model takes {self.model}, the first axis for "
                    "the rows.",
                    400,
                )
        return arrays


# ONNX Runtime's names of number formats -> the protocol's.
_DATATYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
    **{f"{kind}{bits}": f"{kind}{bits}".upper() for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}


def _format_port(port: GraphPort, has_any_batch: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"name": port.name, "datatype": _DATATYPES.get(port.dtype, "BYTES")}
    if port.shape:  # without axes, it is a scalar or unknown to the graph
        shape = [axis if type(axis) is int else -1 for axis in port.shape]
        document["shape"] = [-1, *shape[1:]] if has_any_batch else shape
    return document


def _decode_texts(array: np.ndarray) -> np.ndarray:
    """Return bytes decoded as text, which ONNX Runtime requires."""
    if array.dtype != np.object_:
        return array
    try:
        texts = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise PredictionException(
            f"The input does not fit the model: its text is no UTF-8 ({error}).", 400
        ) from error
    return np.array(texts, np.object_).reshape(array.shape)


def _to_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value
