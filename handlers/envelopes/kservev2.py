"""The envelope ``kservev2``, KServe's second protocol, which became the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from handlers.envelopes.base import GroupedEnvelope, parse_json_body
from handlers.errors import PredictionException

_DATATYPES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}


class KServev2Envelope(GroupedEnvelope):
    """An envelope in which each input tensor is a row, ``{"name", "shape", "datatype", "data"}``.

    ``data`` is nested as in ``shape``; a BYTES input's data is its first element. The n-th value that the
    handler returns for a request is its n-th output, flat, under the n-th input's name. While the handler
    runs, ``context.input_names`` has the names of the rows, and ``context.input_request_id`` the id of the
    first request, where it has one.
    """

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(handle_fn)
        self._requests: dict[
            int, tuple[str | None, list[str]]
        ] = {}  # by request: its id, and its inputs' names

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        self._requests = {}
        rows = super().parse_input(data)
        self.context.input_names = [row["name"] for row in rows]
        first = self._requests.get(0, (None, []))[0]
        if first is not None:
            self.context.input_request_id = first
        return rows

    def format_output(self, data: Any) -> list[Any]:
        for name in ("input_names", "input_request_id"):
            if hasattr(self.context, name):
                delattr(self.context, name)
        return super().format_output(data)

    def parse_request(self, index: int, row: dict[str, Any]) -> list[Any]:
        request = parse_json_body(row, "inputs")
        inputs = [_parse_input(place, tensor) for place, tensor in enumerate(request["inputs"])]
        request_id = request.get("id")
        request_id = request_id if isinstance(request_id, str) and request_id.strip() else None
        self._requests[index] = request_id, [tensor["name"] for tensor in inputs]
        return inputs

    def format_response(self, index: int, values: list[Any]) -> dict[str, Any]:
        request_id, names = self._requests[index]
        model = (self.context.manifest or {}).get("model") or {}
        return {
            "id": self.context.get_request_id(index) if request_id is None else request_id,
            "model_name": model.get("modelName"),
            "model_version": model.get("modelVersion"),
            "outputs": [_format_output(place, value, names) for place, value in enumerate(values)],
        }


def _parse_input(place: int, tensor: Any) -> dict[str, Any]:
    if not isinstance(tensor, dict) or (missing := {"name", "shape", "datatype", "data"} - tensor.keys()):
        problem = f"lacks {', '.join(sorted(missing))}" if isinstance(tensor, dict) else "is no object"
        raise PredictionException(
            f"inputs[{place}] {problem}: an input has name, shape, datatype and data.", 400
        )
    if tensor["datatype"] == "BYTES":
        if not isinstance(tensor["data"], list) or not tensor["data"]:
            raise PredictionException(
                f"inputs[{place}] ({tensor['name']}): data is to be a list with one text.", 400
            )
        return {**tensor, "data": tensor["data"][0]}
    try:
        return {**tensor, "data": np.array(tensor["data"]).reshape(tuple(tensor["shape"])).tolist()}
    except (TypeError, ValueError) as error:
        raise PredictionException(
            f"inputs[{place}] ({tensor['name']}): its data does not fill its shape {tensor['shape']}: "
            f"{error}",
            400,
        ) from error


def _format_output(place: int, value: Any, names: list[str]) -> dict[str, Any]:
    flat = np.array(value.decode() if isinstance(value, (bytes, bytearray)) else value).flatten()
    return {
        "name": names[place] if place < len(names) else f"output-{place}",
        "datatype": _DATATYPES.get(str(flat.dtype), "BYTES"),
        "data": [_to_text(item) for item in flat.tolist()],
        "shape": list(flat.shape),
    }


def _to_text(item: Any) -> Any:
    return item.decode() if isinstance(item, bytes) else item
