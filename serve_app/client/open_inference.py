"""Tensors by the Open Inference Protocol, as numpy arrays, in the protocol's binary form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from serve_app.client._decoders import EventDecoder
from serve_app.client._operations import (
    Operation,
    RequestDescriptor,
    RequestFlow,
    StreamDescriptor,
    StreamOperation,
    fetch_list,
    fetch_object,
    fetch_text,
    join_path,
    json_body,
)
from serve_app.client.errors import ServerError
from serve_app.domain import tensors

_JSON_LENGTH = "inference-header-content-length"


class OpenInferenceOperations:
    """The routes under ``/v2``."""

    @Operation
    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        version: str | None = None,
        *,
        datatypes: Mapping[str, str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        binary: bool = True,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> RequestFlow[dict[str, np.ndarray]]:
        """Return a model's outputs by name, those in ``outputs`` or all.

        ``inputs`` are arrays, or values that numpy converts to arrays. ``datatypes`` are the protocol's names
        of their types where they differ from the arrays' own (``BF16``). BYTES are arrays of ``bytes``.
        Without ``binary`` all data is JSON.
        """
        sent = [
            tensors.from_array(name, value, (datatypes or {}).get(name)) for name, value in inputs.items()
        ]
        document: dict[str, Any] = {
            "parameters": {**(parameters or {}), "binary_data_output": binary},
            "inputs": [_input(tensor, binary) for tensor in sent],
        }
        if outputs:
            document["outputs"] = [{"name": name} for name in outputs]
        encoded = json.dumps(document).encode()
        all_headers = {"content-type": "application/json", **(headers or {})}
        if binary:
            all_headers |= {"content-type": "application/octet-stream", _JSON_LENGTH: str(len(encoded))}
        content = b"".join((encoded, *(tensor.data for tensor in sent))) if binary else encoded
        path = _model_path(model, version, "infer")
        response = yield RequestDescriptor(
            "inference", "POST", path, {}, all_headers, content, timeout=timeout, use_client_timeout=True
        )
        return _outputs(response)

    @Operation
    def model_ready(self, model: str, version: str | None = None) -> RequestFlow[bool]:
        """Return whether a version is ready; without ``version``, the default one. Raises NotFoundError."""
        path = _model_path(model, version, "ready")
        document = yield from fetch_object(
            RequestDescriptor("inference", "GET", path, retryable=False, accepted_statuses=(503,))
        )
        return bool(document.get("ready"))

    @Operation
    def metadata(self, model: str, version: str | None = None) -> RequestFlow[dict[str, Any]]:
        """Return a model's versions, and its inputs and outputs by name, datatype and shape."""
        return (yield from fetch_object(RequestDescriptor("inference", "GET", _model_path(model, version))))

    @Operation
    def config(self, model: str, version: str | None = None) -> RequestFlow[dict[str, Any]]:
        """Return a model's configuration for Triton's clients: its inputs, outputs and batches."""
        path = _model_path(model, version, "config")
        return (yield from fetch_object(RequestDescriptor("inference", "GET", path)))

    @Operation
    def statistics(
        self, model: str | None = None, version: str | None = None
    ) -> RequestFlow[list[dict[str, Any]]]:
        """Return the counters of each version of a model, or of all models."""
        path = _model_path(model, version, "stats") if model else join_path("v2", "models", "stats")
        return (yield from fetch_list(RequestDescriptor("inference", "GET", path), "model_stats"))

    @Operation
    def repository(self, ready: bool = False) -> RequestFlow[list[dict[str, Any]]]:
        """Return every version of every model with its state; with ``ready``, only those that are ready."""
        body = json_body({"ready": ready})
        return (yield from fetch_list(RequestDescriptor("inference", "POST", "/v2/repository/index", **body)))

    @Operation
    def load(self, /, model: str, **parameters: Any) -> RequestFlow[None]:
        """Start a model, or register the archive of its name; ``parameters``: ``url`` and ``workers``."""
        path = join_path("v2", "repository", "models", model, "load")
        body = json_body({"parameters": parameters})
        yield RequestDescriptor("inference", "POST", path, **body, idle_timeout=None)

    @Operation
    def unload(self, model: str) -> RequestFlow[None]:
        """Stop a model's replicas; the model stays registered."""
        path = join_path("v2", "repository", "models", model, "unload")
        yield RequestDescriptor("inference", "POST", path, idle_timeout=None)

    @Operation
    def generate(
        self, /, model: str, text: str, version: str | None = None, **parameters: Any
    ) -> RequestFlow[str]:
        """Return the generated text; ``parameters`` such as ``max_tokens`` and ``temperature``."""
        body = json_body({"text_input": text, "parameters": parameters})
        path = _model_path(model, version, "generate")
        request = RequestDescriptor("inference", "POST", path, **body, use_client_timeout=True)
        return (yield from fetch_text(request, "text_output"))

    @StreamOperation
    def generate_stream(
        self, /, model: str, text: str, version: str | None = None, **parameters: Any
    ) -> StreamDescriptor[str]:
        """Yield the generated text chunk by chunk; the parameters are those of ``generate``."""
        body = json_body({"text_input": text, "parameters": parameters})
        path = _model_path(model, version, "generate_stream")
        return StreamDescriptor(RequestDescriptor("inference", "POST", path, **body), _TextDecoder())


class _TextDecoder:
    """A decoder of the events of ``generate_stream`` into texts.

    Raises ServerError for an event that is an error.
    """

    def __init__(self) -> None:
        self._events = EventDecoder()

    def feed(self, data: bytes) -> Iterator[str]:
        for event in self._events.feed(data):
            document = event.json()
            if "error" in document:
                raise ServerError(200, document["error"])
            yield document["text_output"]


def _model_path(model: str, version: str | None, route: str = "") -> str:
    return join_path("v2", "models", model, *(("versions", version) if version else ()), route)


def _input(tensor: tensors.Tensor, binary: bool) -> dict[str, Any]:
    """Return the JSON document of an input; with ``binary``, its data follows the JSON."""
    document: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
    if binary:
        document["parameters"] = {"binary_data_size": len(tensor.data)}
    else:
        document["data"] = [
            value.decode() if isinstance(value, bytes) else value for value in tensor.to_list()
        ]
    return document


def _outputs(response: httpx.Response) -> dict[str, np.ndarray]:
    """Return the arrays of a response, whose raw tensors follow its JSON in the order of its outputs."""
    body = response.content
    position = int(response.headers.get(_JSON_LENGTH, len(body)))
    arrays = {}
    for output in json.loads(body[:position])["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        size = (output.get("parameters") or {}).get("binary_data_size")
        if size is None:
            tensor = tensors.from_list(name, datatype, shape, output["data"])
        else:
            tensor = tensors.from_bytes(name, datatype, shape, body[position : position + size])
            position += size
        arrays[name] = tensor.to_array()
    return arrays
