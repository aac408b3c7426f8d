"""ONNX graphs, run by ONNX Runtime and called as PyTorch's models are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch

from handlers.errors import HandlerLoadError, PredictionException

# Where a graph runs: torch's word for a device -> ONNX Runtime's for what runs it there.
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int16)": np.int16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
    "tensor(string)": np.object_,
}
# The Open Inference Protocol's names for them; BYTES, which may be texts, is looked at row by row.
_OIP = {
    "BOOL": np.bool_,
    **{
        f"{kind}{8 * size}": f"{letter}{size}"
        for kind, letter in (("UINT", "u"), ("INT", "i"))
        for size in (1, 2, 4, 8)
    },
    **{f"FP{8 * size}": f"f{size}" for size in (2, 4, 8)},
}
ANY = -1  # an axis of any length, in the same protocol
_OUT_OF_MEMORY = ("Failed to allocate memory", "bad_alloc", "bad allocation", "Available memory of", "out of memory")


class Port(NamedTuple):
    """One input or output of a graph; an axis of ``shape`` is a number, or a name where any length will do."""

    name: str
    dtype: str  # in ONNX Runtime's words without "tensor": float, int64
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


class OnnxModel:
    """``model(tensor)``, ``model(first, second)``, ``model(mask=..., ids=...)`` or ``model({"ids": ...})``.

    Takes torch tensors, numpy arrays and lists; gives a torch tensor on the CPU, or where the graph has several
    outputs a dict of them by name. Numbers become the graph's format where nothing is lost but digits: integers
    floats, int64 int32; never floats integers. What does not fit raises PredictionException (400) that says what
    the graph wants. A graph whose batch axis is 1 is run row by row (``row_by_row``).

    It runs in as many threads as torch does in this process. Raises HandlerLoadError for a file that is no graph
    which can be run, and where ``device`` is a GPU and ONNX Runtime does not get there: it never runs elsewhere.
    """

    def __init__(self, file: Path, device: torch.device) -> None:
        self.session = _session(file, device)
        self.inputs = tuple(map(_port, self.session.get_inputs()))
        self.outputs = tuple(map(_port, self.session.get_outputs()))
        for put in self.session.get_inputs():
            if put.type not in _DTYPES:
                raise HandlerLoadError(
                    f"{file}: the input {put.name} is a {put.type}, which has no like in numpy. Export the graph with "
                    "inputs of float32 or integers; converters of number formats can keep the inputs' (keep_io_types)."
                )
        self._dtypes = {put.name: np.dtype(_DTYPES[put.type]) for put in self.session.get_inputs()}
        batched = [port.shape[0] for port in self.inputs if port.shape]
        self.row_by_row = bool(batched) and all(length == 1 and type(length) is int for length in batched)

    @property
    def provider(self) -> str:
        """What runs the graph, in ONNX Runtime's words."""
        return self.session.get_providers()[0]

    def __str__(self) -> str:
        return ", ".join(map(str, self.inputs))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        arrays = self._arrays(inputs, named)
        lengths = {len(array) for array in arrays.values() if array.ndim}
        if self.row_by_row and len(lengths) == 1 and (length := lengths.pop()) > 1:
            runs = [
                self._run({name: array[row : row + 1] if array.ndim else array for name, array in arrays.items()})
                for row in range(length)
            ]
            values = [np.concatenate(parts) if np.ndim(parts[0]) else np.stack(parts) for parts in zip(*runs)]
        else:
            values = self._run(arrays)
        made = [_tensor(value) for value in values]
        return made[0] if len(made) == 1 else dict(zip((port.name for port in self.outputs), made))

    def array(self, port: Port, value: Any) -> np.ndarray:
        """``value`` in the number format of that input, whatever its shape. Raises PredictionException."""
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise self._refused(f"the input {port.name} is a list whose parts differ in length") from None
        wanted = self._dtypes[port.name]
        if array.dtype == wanted and array.dtype != np.object_:
            return array
        if wanted == np.object_:
            if array.dtype.kind in "UO" and all(isinstance(item, str) for item in array.flat):
                return array.astype(np.object_)
            raise self._refused(f"the input {port.name} holds {array.dtype}")
        if not _becomes(array, wanted):
            raise self._refused(f"the input {port.name} holds {_kind(array)}")
        if wanted.kind in "iu" and array.size:
            limits = np.iinfo(wanted)
            if array.min() < limits.min or array.max() > limits.max:
                raise self._refused(f"the input {port.name} holds numbers that {wanted} has no room for")
        with np.errstate(over="ignore"):  # a number that is too large for a float is infinite
            return array.astype(wanted)

    def _arrays(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, np.ndarray]:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            inputs, named = (), {**inputs[0], **named}
        if len(inputs) > len(self.inputs):
            raise self._refused(f"there are {len(inputs)} inputs")
        given = dict(zip((port.name for port in self.inputs), inputs)) | named
        self.check_names(given)
        arrays = {port.name: self.array(port, given[port.name]) for port in self.inputs}
        for port in self.inputs:
            if not fits(arrays[port.name].shape, port.shape, 1 if self.row_by_row else 0):
                raise self._refused(f"the input {port.name} has the shape {list(arrays[port.name].shape)}")
        return arrays

    def check_names(self, given: Mapping[str, Any]) -> None:
        """PredictionException where ``given`` has not exactly the graph's inputs."""
        names = [port.name for port in self.inputs]
        if missing := [name for name in names if name not in given]:
            raise self._refused(f"the input {missing[0]} is missing")
        if unknown := [name for name in given if name not in names]:
            raise self._refused(f"there is no input {unknown[0]!r}")

    def check_signature(self, ports: Iterable[Mapping[str, Any]]) -> None:
        """Raises HandlerLoadError where these inputs of a model-config.yaml's ``signature`` are not the graph's.

        The first axis is the batch's; -1 is an axis of any length, and so is one that the graph only names.
        """
        said = {port["name"]: port for port in ports}
        if said and said.keys() != {port.name for port in self.inputs}:
            raise self._unlike(f"signature has the inputs {', '.join(said)}")
        for port in self.inputs if said else ():
            datatype, shape = said[port.name].get("datatype"), said[port.name].get("shape")
            if datatype in _OIP and not _becomes(np.empty(1, _OIP[datatype]), self._dtypes[port.name]):
                raise self._unlike(f"signature has {port.name} as {datatype}")
            if shape is None or not port.shape:
                continue
            alike = all(ANY in (axis, own) or axis == own for axis, own in zip(shape[1:], map(_length, port.shape[1:])))
            if len(shape) != len(port.shape) or not alike:
                raise self._unlike(f"signature has {port.name} with the shape {list(shape)}")

    def _unlike(self, what: str) -> HandlerLoadError:
        return HandlerLoadError(f"model-config.yaml: {what}, and the graph takes {self}. Write it as the graph has it.")

    def _run(self, arrays: dict[str, np.ndarray]) -> list[Any]:
        try:
            return self.session.run(None, arrays)
        except Exception as error:  # ONNX Runtime's are of one family in name only
            if any(sign in str(error) for sign in _OUT_OF_MEMORY):
                raise MemoryError(str(error)) from error
            if axis := self._uneven(arrays):
                raise self._refused(f"the axis {axis} has different lengths in its inputs") from error
            if type(error).__name__ == "InvalidArgument":
                raise self._refused(" ".join(str(error).rpartition("INVALID_ARGUMENT : ")[2].split())) from error
            raise

    def _uneven(self, arrays: dict[str, np.ndarray]) -> str | None:
        """A name that stands for axes of different lengths here. Some exporters name alike what is not."""
        lengths: dict[str, int] = {}
        for port in self.inputs:
            for axis, length in zip(port.shape, arrays[port.name].shape):
                if isinstance(axis, str) and axis != "?" and lengths.setdefault(axis, length) != length:
                    return axis
        return None

    def _refused(self, why: str) -> PredictionException:
        return PredictionException(f"The input does not fit the model: {why}. It takes {self}.", 400)


def fits(shape: tuple[int, ...], wanted: tuple[int | str, ...], after: int = 0) -> bool:
    """Whether an array of that shape can be what a graph calls ``wanted``; ``after`` axes are not looked at.

    A shape without axes is a number's or not known to the graph, so any will do.
    """
    if not wanted:
        return True
    pairs = list(zip(shape, wanted))[after:]
    return len(shape) == len(wanted) and all(type(axis) is str or axis == length for length, axis in pairs)


def _session(file: Path, device: torch.device) -> onnxruntime.InferenceSession:
    provider = PROVIDERS.get(device.type)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; warnings are about every node of a graph
    if provider is None or provider not in onnxruntime.get_available_providers():
        raise _not_there(file, device, f"the onnxruntime that is installed has no provider for {device.type}")
    settings = {"device_id": device.index or 0} if device.type == "cuda" else {}
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=[(provider, settings)])
    except Exception as error:
        raise _unreadable(file, str(error)) from error
    if session.get_providers()[0] != provider:  # where a GPU does not start, it takes the CPU
        raise _not_there(file, device, "ONNX Runtime did not start there (stderr has its reason)")
    return session


def _not_there(file: Path, device: torch.device, why: str) -> HandlerLoadError:
    return HandlerLoadError(
        f"{file}: this model is to run on {device}, and {why}. Install onnxruntime-gpu in place of onnxruntime, with "
        "the CUDA that it asks for; or give the model no GPU (deviceType: cpu in model-config.yaml)."
    )


def _unreadable(file: Path, why: str) -> HandlerLoadError:
    said = " ".join(why.split())
    if "External data" in why or "external data" in why:
        cure = "Its weights lie in a file of their own: pack that too (--extra-files), under the name it has."
    elif "No Op registered" in why or "NOT_IMPLEMENTED" in why:
        cure = "It uses an operator that this onnxruntime has not: export it with standard operators."
    elif "opset" in why or "IR version" in why:
        cure = f"It is newer than onnxruntime {onnxruntime.__version__}: export it with a lower opset_version."
    else:
        cure = "The file is damaged or no ONNX graph: export it again with torch.onnx.export, and pack the whole file."
    return HandlerLoadError(f"{file}: ONNX Runtime cannot load this. {cure} It says: {said}")


def _port(put: Any) -> Port:
    shape = tuple(axis if isinstance(axis, (int, str)) else "?" for axis in put.shape or ())
    return Port(put.name, put.type.removeprefix("tensor(").removesuffix(")"), shape)


def _length(axis: int | str) -> int:
    return axis if isinstance(axis, int) else ANY


def _becomes(array: np.ndarray, wanted: np.dtype) -> bool:
    """Whether its numbers may be written as ``wanted``: floats as floats, integers as both."""
    if array.dtype.kind not in "biuf":
        return False
    if array.size == 0 or (array.dtype.kind == "i" and wanted.kind == "u"):
        return True
    return np.can_cast(array.dtype, wanted, "same_kind")


def _kind(array: np.ndarray) -> str:
    return {"f": "floats", "b": "true and false", "i": "integers", "u": "integers"}.get(array.dtype.kind, "no numbers")


def _tensor(value: Any) -> Any:
    """An output as a tensor; text, and what converters of other libraries make of labels, as it is."""
    if not isinstance(value, np.ndarray):
        return torch.tensor(value) if isinstance(value, np.generic) else value
    return torch.from_numpy(value) if value.dtype != np.object_ else value
