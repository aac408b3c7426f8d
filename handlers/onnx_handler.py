"""Serves any ONNX graph as it is: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from handlers.base import BaseHandler, row_value
from handlers.errors import HandlerLoadError, PredictionException
from handlers.onnx import OnnxModel, fits
from handlers.timer import timed


class OnnxHandler(BaseHandler):
    """Each row is what the graph takes without its batch axis: a list of numbers, or ``{input's name: list}``.

    The answer is the row's output as nested lists, or with several outputs ``{output's name: lists}``. Rows of one
    shape run together; where an axis may have any length, rows of each length do.
    """

    model: OnnxModel

    def initialize(self, context: Any) -> None:
        super().initialize(context)
        if not isinstance(self.model, OnnxModel):
            raise HandlerLoadError(
                f"{self.model_pt_path}: the handler onnx serves an .onnx file and this is none. Archive one with "
                "--serialized-file, or name another handler (base_handler)."
            )
        for port in self.model.inputs:
            if not port.shape or (isinstance(port.shape[0], int) and port.shape[0] != 1):
                raise HandlerLoadError(
                    f"{self.model_pt_path}: the input {port} has no batch axis in front, so the handler onnx cannot "
                    "tell its rows apart. Export the graph with a dynamic first axis, or write a handler that calls "
                    "self.model as the graph wants it."
                )

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


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value
