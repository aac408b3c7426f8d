"""Tensors by the Open Inference Protocol, as numpy arrays, in the protocol's binary form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from serve_app import tensors
from serve_app.client.ask import Ask, Listen, Talk, of_json, operation, path, streaming
from serve_app.client.errors import ServerError
from serve_app.client.pieces import Events

_LENGTH = "inference-header-content-length"


class OpenInference:
    """The routes under ``/v2``."""

    @operation
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
    ) -> Talk[dict[str, np.ndarray]]:
        """A model's outputs by their names, those that ``outputs`` names or all.

        ``inputs`` are arrays, or what numpy makes arrays of; ``datatypes`` are theirs in the protocol's words where
        they are not the arrays' own (``BF16``). BYTES come as arrays of ``bytes``. Not ``binary``: all is JSON.
        """
        sent = [tensors.of(name, value, (datatypes or {}).get(name)) for name, value in inputs.items()]
        head: dict[str, Any] = {"parameters": {**(parameters or {}), "binary_data_output": binary}, "inputs": []}
        for tensor in sent:
            said: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            if binary:
                said["parameters"] = {"binary_data_size": len(tensor.data)}
            else:
                said["data"] = _plain(tensor)
            head["inputs"].append(said)
        if outputs:
            head["outputs"] = [{"name": name} for name in outputs]
        front = json.dumps(head).encode()
        named = {"content-type": "application/json", **(headers or {})}
        if binary:
            named |= {"content-type": "application/octet-stream", _LENGTH: str(len(front))}
        content = b"".join((front, *(tensor.data for tensor in sent))) if binary else front
        where = _model(model, version, "infer")
        return _outputs((yield Ask("inference", "POST", where, {}, named, content, within=timeout, hurries=True)))

    @operation
    def model_ready(self, model: str, version: str | None = None) -> Talk[bool]:
        """Whether a version answers; the default one where none is named. Raises NotFound."""
        answer = yield Ask("inference", "GET", _model(model, version, "ready"), once=True, also=(503,))
        return bool(answer.json().get("ready"))

    @operation
    def metadata(self, model: str, version: str | None = None) -> Talk[dict[str, Any]]:
        """A model's versions, and its inputs and outputs by name, datatype and shape."""
        return (yield Ask("inference", "GET", _model(model, version))).json()

    @operation
    def config(self, model: str, version: str | None = None) -> Talk[dict[str, Any]]:
        """A model's configuration as Triton's clients read it: its inputs, outputs and batches."""
        return (yield Ask("inference", "GET", _model(model, version, "config"))).json()

    @operation
    def statistics(self, model: str | None = None, version: str | None = None) -> Talk[list[dict[str, Any]]]:
        """What was counted of each version of a model, or of all models."""
        where = _model(model, version, "stats") if model else path("v2", "models", "stats")
        return (yield Ask("inference", "GET", where)).json()["model_stats"]

    @operation
    def repository(self, ready: bool = False) -> Talk[list[dict[str, Any]]]:
        """Every version of every model, and its state; with ``ready``, those that can be asked."""
        return (yield Ask("inference", "POST", "/v2/repository/index", **of_json({"ready": ready}))).json()

    @operation
    def load(self, model: str, **parameters: Any) -> Talk[None]:
        """Start a model, or register the archive of its name; ``parameters``: ``url`` and ``workers``."""
        where = path("v2", "repository", "models", model, "load")
        yield Ask("inference", "POST", where, **of_json({"parameters": parameters}), silence=None)

    @operation
    def unload(self, model: str) -> Talk[None]:
        """Take a model's replicas away; it stays registered."""
        yield Ask("inference", "POST", path("v2", "repository", "models", model, "unload"), silence=None)

    @operation
    def generate(self, model: str, text: str, version: str | None = None, **parameters: Any) -> Talk[str]:
        """The text that a model goes on with; ``parameters`` such as ``max_tokens`` and ``temperature``."""
        body = of_json({"text_input": text, "parameters": parameters})
        asked = Ask("inference", "POST", _model(model, version, "generate"), **body, hurries=True)
        return (yield asked).json()["text_output"]

    @streaming
    def generate_stream(self, model: str, text: str, version: str | None = None, **parameters: Any) -> Listen[str]:
        """The same, piece by piece."""
        body = of_json({"text_input": text, "parameters": parameters})
        return Listen(Ask("inference", "POST", _model(model, version, "generate_stream"), **body), _Texts())


class _Texts:
    """The texts among the events of ``generate_stream``. Raises ServerError for one that is an error."""

    def __init__(self) -> None:
        self._events = Events()

    def feed(self, data: bytes) -> Iterator[str]:
        for event in self._events.feed(data):
            said = event.json()
            if "error" in said:
                raise ServerError(200, said["error"])
            yield said["text_output"]


def _model(model: str, version: str | None, verb: str = "") -> str:
    return path("v2", "models", model, *(("versions", version) if version else ()), verb)


def _plain(tensor: tensors.Tensor) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in tensor.values()]


def _outputs(answer: httpx.Response) -> dict[str, np.ndarray]:
    """The arrays of an answer, whose raw tensors stand behind its JSON in the order of its outputs."""
    body = answer.content
    place = int(answer.headers.get(_LENGTH, len(body)))
    found = {}
    for output in json.loads(body[:place])["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        size = (output.get("parameters") or {}).get("binary_data_size")
        if size is None:
            tensor = tensors.listed(name, datatype, shape, output["data"])
        else:
            tensor = tensors.raw(name, datatype, shape, body[place : place + size])
            place += size
        found[name] = tensor.array()
    return found
