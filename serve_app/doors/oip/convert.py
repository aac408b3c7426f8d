"""Inferences in the protocol's words into calls, and replies into their outputs. Pure functions, on no wire."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from serve_app import tensors
from serve_app.errors import HandlerSaid, InvalidBody, InvalidInput
from serve_app.settings import RuntimeSettings
from serve_app.signature import short
from serve_app.tensors import Tensor
from serve_app.types import Call, Input, Priority, Reply

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that is asked for; ``classes``: as its so many highest values, where that is not 0.

    ``binary`` is a word of HTTP's; None where the request says nothing of this output.
    """

    name: str
    classes: int = 0
    binary: bool | None = None


class Inference(NamedTuple):
    """A request, read: its tensors as a call carries them. No ``outputs``: all of them. ``parameters`` are its own."""

    model: str
    version: str | None
    inputs: tuple[Input, ...]
    outputs: tuple[Wanted, ...] = ()
    id: str = ""
    parameters: Mapping[str, Parameter] = MappingProxyType({})


def call(
    asked: Inference,
    request_id: str,
    headers: Mapping[str, str],
    settings: RuntimeSettings,
    deadline: float | None = None,
    priority: Priority = "normal",
) -> Call:
    """The call for an inference. Its own parameters go before ``deadline`` and ``priority``; a ``timeout`` shortens.

    ``timeout`` is in microseconds. ``priority``: 0 says nothing, 1 is high, 2 normal, more is low. ``sequence_id``,
    ``sequence_start`` and ``sequence_end`` become TorchServe's headers. Raises InvalidBody.
    """
    said = asked.parameters
    inputs = asked.inputs
    if len(inputs) > 1 and len({part.name for part in inputs}) < len(inputs):
        names = [part.name for part in inputs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidBody(f"The input {short(twice)} is there twice; each name once.")
    if "timeout" in said and (timeout := _number(said, "timeout")):
        until = time.time() + timeout / 1e6
        deadline = until if deadline is None else min(deadline, until)
    if "priority" in said and (level := _number(said, "priority")):
        priority = "high" if level == 1 else "normal" if level == 2 else "low"
    sent = {**headers, "explain": "False"}
    if said and said.get("sequence_id") not in (None, 0, ""):
        sent[settings.header_key_sequence_id.lower()] = str(said["sequence_id"])
        for key, header in (
            ("sequence_start", settings.header_key_sequence_start),
            ("sequence_end", settings.header_key_sequence_end),
        ):
            if said.get(key) is True:
                sent[header.lower()] = "true"
    return Call(asked.model, asked.version, inputs, sent, "tensors", request_id, deadline, priority)


def declined(reply: Reply, words: str) -> HandlerSaid:
    """The error of a handler that answered with a status of its own; it tells which version and arm that was."""
    error = HandlerSaid(words, reply.status)
    error.version, error.arm = reply.version, reply.arm
    return error


def outputs(asked: Inference, reply: Reply) -> Sequence[Tensor]:
    """What was asked for of a reply, in the order it was asked for.

    Raises InvalidInput for an output that is not there, and HandlerSaid where the handler answered with a status of
    its own.
    """
    if not 200 <= reply.status < 300:
        raise declined(reply, reply.body.decode("utf-8", "replace"))
    given = tensors.unpack(reply.body) if reply.content_type == tensors.PACKED else (tensors.text(reply.body),)
    if not asked.outputs:
        return given
    found = {tensor.name: tensor for tensor in given}
    chosen = []
    for wanted in asked.outputs:
        tensor = found.get(wanted.name)
        if tensor is None:
            raise InvalidInput(f"There is no output {short(wanted.name)}; the model gives {', '.join(found)}.")
        chosen.append(classes(tensor, wanted.classes) if wanted.classes else tensor)
    return chosen


def wanted(name: str, parameters: Mapping[str, Any]) -> Wanted:
    """An output as a request names it. Raises InvalidBody."""
    classes, binary = parameters.get("classification"), parameters.get("binary_data")
    if classes is not None and (type(classes) is not int or classes < 1):
        raise InvalidBody(f"The output {short(name)}: classification is {short(classes)}; it is a number from 1.")
    if binary is not None and type(binary) is not bool:
        raise InvalidBody(f"The output {short(name)}: binary_data is {short(binary)}; it is true or false.")
    return Wanted(name, classes or 0, binary)


def classes(tensor: Tensor, count: int) -> Tensor:
    """The ``count`` highest values along the last axis, each as BYTES ``value:index``. Raises InvalidInput."""
    if tensor.datatype in ("BYTES", "BOOL") or not tensor.shape:
        raise InvalidInput(
            f"The output {tensor.name} is {tensor.datatype} {list(tensor.shape)}, which holds no classes."
        )
    array = tensor.array()
    best = np.argsort(-array.astype(np.float64), axis=-1, kind="stable")[..., :count]
    values = np.take_along_axis(array, best, axis=-1)
    pairs = zip(values.reshape(-1).tolist(), best.reshape(-1).tolist())
    return Tensor(tensor.name, "BYTES", best.shape, tensors.joined(f"{v:f}:{i}".encode() for v, i in pairs))


def _number(parameters: Mapping[str, Any], key: str) -> int:
    """A parameter that is a number, also as text; 0 where it is not there. Raises InvalidBody."""
    value = parameters.get(key, 0)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if type(value) is not int or value < 0:
        raise InvalidBody(f"The parameter {key} is {short(value)}; it is a whole number from 0.")
    return value
