"""Tensors by the Open Inference Protocol, as numpy arrays."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from serve_app import tensors
from serve_app.client.ask import operation, streaming
from serve_app.client.errors import ServerError
from serve_app.client.grpc import errors
from serve_app.client.grpc.ask import Ask, Listen, Requests, Talk, document
from serve_app.proto import open_inference_grpc_pb2 as messages
from serve_app.proto.contents import CONTENTS
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub as Stub

_PARAMETERS = ((bool, "bool_param"), (int, "int64_param"), (str, "string_param"))
_FINAL = "triton_final_response"
_WANTS_FINAL = "triton_enable_empty_final_response"


@dataclass(frozen=True)
class Outputs:
    """One answer of a stream to its request number ``request``, counted from 0, or a piece of one.

    ``final``: the request has no more of them; where a handler streams, the last has no ``arrays``. Where it is an
    ``error``, that is what its request came to.
    """

    request: int
    arrays: dict[str, np.ndarray]
    final: bool
    error: ServerError | None = None


class OpenInference:
    """The service ``inference.GRPCInferenceService``."""

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
        they are not the arrays' own (``BF16``). BYTES come as arrays of ``bytes``. Not ``binary``: in typed contents.
        ``timeout`` is the call's deadline in seconds; ``headers`` are metadata.
        """
        request = _request(model, inputs, outputs, version, datatypes or {}, parameters or {}, binary)
        within = ... if timeout is None else timeout
        return _arrays((yield Ask("inference", Stub, "ModelInfer", request, _lower(headers), within)).message)

    @streaming
    def infer_stream(
        self,
        model: str,
        requests: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        outputs: Sequence[str] = (),
        version: str | None = None,
        *,
        datatypes: Mapping[str, str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Listen[Outputs]:
        """The answers to many requests over one stream, one after the other, each sent as ``requests`` gives it.

        A request is the ``inputs`` of ``infer``. One that goes wrong is answered with its ``error``, and the stream
        goes on. ``timeout`` is that of the whole stream.
        """
        numbers = count()
        wants = {**(parameters or {}), _WANTS_FINAL: True}

        def request(inputs: Mapping[str, Any]) -> messages.ModelInferRequest:
            made = _request(model, inputs, outputs, version, datatypes or {}, wants, True)
            made.id = str(next(numbers))
            return made

        given = Requests(requests, request)
        return Listen(Ask("inference", Stub, "ModelStreamInfer", given, _lower(headers), timeout), _outputs)

    @operation
    def model_ready(self, model: str, version: str | None = None) -> Talk[bool]:
        """Whether a version answers; the default one where none is named. Raises NotFound."""
        return (yield _of("ModelReady", model, version, once=True)).message.ready

    @operation
    def metadata(self, model: str, version: str | None = None) -> Talk[dict[str, Any]]:
        """A model's versions, and its inputs and outputs by name, datatype and shape."""
        return document((yield _of("ModelMetadata", model, version)).message)

    @operation
    def config(self, model: str, version: str | None = None) -> Talk[dict[str, Any]]:
        """A model's configuration as Triton's clients read it: its inputs, outputs and batches."""
        return document((yield _of("ModelConfig", model, version)).message.config)

    @operation
    def statistics(self, model: str | None = None, version: str | None = None) -> Talk[list[dict[str, Any]]]:
        """What was counted of each version of a model, or of all models."""
        return document((yield _of("ModelStatistics", model or "", version)).message)["model_stats"]

    @operation
    def repository(self, ready: bool = False) -> Talk[list[dict[str, Any]]]:
        """Every version of every model, and its state; with ``ready``, those that can be asked."""
        asked = messages.RepositoryIndexRequest(ready=ready)
        return document((yield Ask("inference", Stub, "RepositoryIndex", asked)).message)["models"]

    @operation
    def load(self, model: str, **parameters: Any) -> Talk[None]:
        """Start a model, or register the archive of its name; ``parameters``: ``url`` and ``workers``."""
        asked = messages.RepositoryModelLoadRequest(model_name=model)
        for name, value in parameters.items():
            _put(asked.parameters[name], name, value)
        yield Ask("inference", Stub, "RepositoryModelLoad", asked, within=None)

    @operation
    def unload(self, model: str) -> Talk[None]:
        """Take a model's replicas away; it stays registered."""
        asked = messages.RepositoryModelUnloadRequest(model_name=model)
        yield Ask("inference", Stub, "RepositoryModelUnload", asked, within=None)


def _of(method: str, model: str, version: str | None, once: bool = False) -> Ask:
    kind = getattr(messages, f"{method}Request")
    return Ask("inference", Stub, method, kind(name=model, version=version or ""), once=once)


def _lower(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {name.lower(): value for name, value in (headers or {}).items()}


def _request(
    model: str,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    version: str | None,
    datatypes: Mapping[str, str],
    parameters: Mapping[str, Any],
    binary: bool,
) -> messages.ModelInferRequest:
    request = messages.ModelInferRequest(model_name=model, model_version=version or "")
    for name, value in parameters.items():
        _put(request.parameters[name], name, value)
    for name, value in inputs.items():
        tensor = tensors.of(name, value, datatypes.get(name))
        said = request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        if binary:
            request.raw_input_contents.append(bytes(tensor.data))
        elif tensor.datatype in CONTENTS:
            getattr(said.contents, CONTENTS[tensor.datatype]).extend(tensor.values())
        else:
            raise ValueError(f"{name} is {tensor.datatype}, which has no typed contents; send it binary.")
    for name in outputs:
        request.outputs.add(name=name)
    return request


def _put(parameter: Any, name: str, value: Any) -> None:
    field = next((field for kind, field in _PARAMETERS if isinstance(value, kind)), None)
    if field is None and isinstance(value, float) and "double_param" in parameter.DESCRIPTOR.fields_by_name:
        field = "double_param"
    if field is None:
        raise ValueError(
            f"The parameter {name} is {type(value).__name__}; gRPC has a place for bool, int, float and str."
        )
    setattr(parameter, field, value)


def _arrays(answer: messages.ModelInferResponse) -> dict[str, np.ndarray]:
    raw, found = answer.raw_output_contents, {}
    for place, output in enumerate(answer.outputs):
        name, datatype, shape = output.name, output.datatype, tuple(output.shape)
        if raw:
            tensor = tensors.raw(name, datatype, shape, raw[place])
        else:
            tensor = tensors.listed(name, datatype, shape, list(getattr(output.contents, CONTENTS[datatype])))
        found[name] = tensor.array()
    return found


def _outputs(message: messages.ModelStreamInferResponse) -> Outputs:
    answer = message.infer_response
    request = int(answer.id or 0)
    if message.error_message:
        beside = {name: value.string_param for name, value in answer.parameters.items()}
        return Outputs(request, {}, True, errors.told(None, message.error_message, beside))
    return Outputs(request, _arrays(answer), answer.parameters[_FINAL].bool_param)
