"""Serves any ONNX graph as it is: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from handlers import explanations, tensor_rows
from handlers.base import BaseHandler, row_value
from handlers.errors import HandlerLoadError, PredictionException
from handlers.onnx import OnnxModel, Port, fits
from handlers.timer import timed


class OnnxHandler(BaseHandler):
    """Each row is what the graph takes without its batch axis: a list of numbers, or ``{input's name: list}``.

    The answer is the row's output as nested lists, or with several outputs ``{output's name: lists}``. Rows of one
    shape run together; where an axis may have any length, rows of each length do.

    A row of named arrays is what the graph takes, batch axis and all, and so is its answer what the graph gives.
    """

    model: OnnxModel
    takes_tensors = True

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        if not isinstance(self.model, OnnxModel):
            raise HandlerLoadError(
                f"{self.model_pt_path}: the handler onnx serves an .onnx file and this is none. Archive one with "
                "--serialized-file, or name another handler (base_handler)."
            )
        for port in self.model.inputs if self.model_yaml_config.get("tensors") is not True else ():
            if not port.shape or (isinstance(port.shape[0], int) and port.shape[0] != 1):
                raise HandlerLoadError(
                    f"{self.model_pt_path}: the input {port} has no batch axis in front, so the handler onnx cannot "
                    "tell its rows apart. Export the graph with a dynamic first axis, or write a handler that calls "
                    "self.model as the graph wants it."
                )
        self.model.check_signature((self.model_yaml_config.get("signature") or {}).get("inputs") or ())

    @property
    def signature(self) -> dict[str, Any]:
        """What the graph takes and gives, as the Open Inference Protocol says it."""
        said = {"inputs": self.model.inputs, "outputs": self.model.outputs}
        return {side: [_port(port, self.model.row_by_row) for port in ports] for side, ports in said.items()}

    def _run(self, data: list[Any], mark: Callable[[str], Any]) -> list[Any]:
        if tensor_rows.are(data) and not self._is_explain():
            fixed = any(not port.shape or type(port.shape[0]) is int for port in self.model.inputs)
            with mark("inference"):
                return tensor_rows.run(data, self._of_arrays, apart=fixed and not self.model.row_by_row)
        return super()._run(data, mark)

    def _of_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        output = self.model({name: _texts(array) for name, array in arrays.items()})
        return output if isinstance(output, dict) else {self.model.outputs[0].name: output}

    @timed
    def preprocess(self, data: list[Any]) -> list[dict[str, np.ndarray]]:  # type: ignore[override]
        """The inputs of each row by name, a batch of one each."""
        return self._each(data, self._row)

    @timed
    def inference(self, data: list[dict[str, np.ndarray]]) -> list[dict[str, Any]]:  # type: ignore[override]
        """The outputs of each row by name."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for index, row in enumerate(data):
            alike.setdefault(tuple(array.shape for array in row.values()), []).append(index)
        answers: list[dict[str, Any]] = [{}] * len(data)
        for indices in alike.values():
            batch = {name: np.concatenate([data[index][name] for index in indices]) for name in data[indices[0]]}
            output = self.model(batch)
            named = output if isinstance(output, dict) else {self.model.outputs[0].name: output}
            for name, values in named.items():
                if np.ndim(values) == 0 or len(values) != len(indices):
                    raise ValueError(
                        f"{self.model_pt_path}: the output {name} of {len(indices)} rows has the shape "
                        f"{list(np.shape(values))}, so none of it is a row's own. Write a handler for this graph."
                    )
            for place, index in enumerate(indices):
                answers[index] = {name: values[place] for name, values in named.items()}
        return answers

    @timed
    def postprocess(self, data: list[dict[str, Any]]) -> list[Any]:
        made = [{name: _plain(value) for name, value in row.items()} for row in data]
        return made if len(self.model.outputs) > 1 else [next(iter(row.values())) for row in made]

    def explain_handle(self, data_preprocess: Any, raw_data: list[Any]) -> list[Any]:
        return self._insights_by_row(data_preprocess, raw_data)

    def get_insights(self, tensor_data: dict[str, np.ndarray], raw_data: Any, target: Any = 0) -> list[Any]:
        """What each number of the row had to do with number ``target`` of the graph's first output; nested as the row.

        Of several inputs each is explained with the others as they are.
        """
        question = self.question.of(self.asked, target)
        found = {
            name: self._attributed(name, tensor_data, question)[0].tolist()
            for name, array in tensor_data.items()
            if array.dtype.kind in "iuf"
        }
        return [found if len(self.model.inputs) > 1 else next(iter(found.values()), [])]

    def _attributed(self, name: str, row: dict[str, np.ndarray], question: explanations.Question) -> torch.Tensor:
        def forward(values: torch.Tensor) -> Any:
            rows = {other: np.repeat(array, len(values), 0) for other, array in row.items()}
            said = self.model({**rows, name: values})
            return next(iter(said.values())) if isinstance(said, dict) else said

        return explanations.attributions(forward, torch.from_numpy(row[name]), question)

    def describe_handle(self) -> Any:
        """The graph's inputs and outputs, with their number formats and shapes."""
        said = {"inputs": self.model.inputs, "outputs": self.model.outputs}
        return {key: [{**port._asdict(), "shape": list(port.shape)} for port in ports] for key, ports in said.items()}

    def _row(self, row: Any) -> dict[str, np.ndarray]:
        try:
            value = row_value(row)
        except ValueError as error:
            raise PredictionException(f"The input is not JSON: {error}. The model takes {self.model}.", 400) from error
        if not isinstance(value, Mapping):
            if isinstance(row, Mapping) and not {"data", "body"} & set(row):  # a form, a field an input
                value = {name: row_value({"data": field}) for name, field in row.items()}
            else:
                value = {self.model.inputs[0].name: value}
        self.model.check_names(value)
        arrays = {port.name: self.model.array(port, value[port.name])[None] for port in self.model.inputs}
        for port in self.model.inputs:
            if not fits(arrays[port.name].shape, port.shape):
                raise PredictionException(
                    f"The input does not fit the model: a row's {port.name} has the shape "
                    f"{list(arrays[port.name].shape[1:])}. The model takes {self.model}, the first axis for the rows.",
                    400,
                )
        return arrays


# ONNX Runtime's words for number formats -> the protocol's.
_DATATYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float": "FP32",
    "double": "FP64",
    "string": "BYTES",
    **{f"{kind}{bits}": f"{kind}{bits}".upper() for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}


def _port(port: Port, any_batch: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"name": port.name, "datatype": _DATATYPES.get(port.dtype, "BYTES")}
    if port.shape:  # else it is a number's, or not known to the graph
        shape = [axis if type(axis) is int else -1 for axis in port.shape]
        said["shape"] = [-1, *shape[1:]] if any_batch else shape
    return said


def _texts(array: np.ndarray) -> np.ndarray:
    """Text as ONNX Runtime takes it."""
    if array.dtype != np.object_:
        return array
    try:
        texts = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise PredictionException(f"The input does not fit the model: its text is no UTF-8 ({error}).", 400) from error
    return np.array(texts, np.object_).reshape(array.shape)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value
