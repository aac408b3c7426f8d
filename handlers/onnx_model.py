"""ONNX graphs that run in ONNX Runtime and are called like PyTorch's models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch

from handlers.errors import HandlerLoadError, PredictionException

# torch's name of a device -> ONNX Runtime's execution provider for it.
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
# The Open Inference Protocol's names of formats; BYTES, which may be text, is checked for each row.
_OIP_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    **{
        f"{kind}{8 * size}": f"{letter}{size}"
        for kind, letter in (("UINT", "u"), ("INT", "i"))
        for size in (1, 2, 4, 8)
    },
    **{f"FP{8 * size}": f"f{size}" for size in (2, 4, 8)},
}
ANY_LENGTH = -1  # an axis of any length, in the same protocol
_OUT_OF_MEMORY_TEXTS = (
    "Failed to allocate memory",
    "bad_alloc",
    "bad allocation",
    "Available memory of",
    "out of memory",
)


class GraphPort(NamedTuple):
    """An input or output of a graph; an axis of ``shape`` is a number, or a name where any length is
    valid.
    """

    name: str
    dtype: str  # ONNX Runtime's name without "tensor": float, int64
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


class OnnxModel:
    """An ONNX graph that is called like a PyTorch model.

    Calls are ``model(tensor)``, ``model(first, second)``, ``model(mask=..., ids=...)`` or ``model({"ids":
    ...})``, with torch tensors, numpy arrays or lists. The graph returns a torch tensor on the CPU, or a dict
    of tensors by name if the graph has several outputs. Inputs are converted to the graph's format if only
    precision is lost: integers to floats, int64 to int32, never floats to integers. An input that does not
    fit raises PredictionException (400) with the graph's inputs. A graph whose batch axis is 1 is run row by
    row (``row_by_row``).

    It runs in as many threads as torch does in this process. Raises HandlerLoadError for a file that is not a
    runnable graph, and if ``device`` is a GPU that ONNX Runtime cannot use: it never falls back to another
    device.
    """

    def __init__(self, file: Path, device: torch.device) -> None:
        self.session = _create_session(file, device)
        self.inputs = tuple(map(_make_port, self.session.get_inputs()))
        self.outputs = tuple(map(_make_port, self.session.get_outputs()))
        for info in self.session.get_inputs():
            if info.type not in _DTYPES:
                raise HandlerLoadError(
                    f"{file}: the input {info.name} is a {info.type}, which numpy does not have. Export the "
                    "graph with inputs of float32 or integers; converters of number formats can keep the "
                    "inputs' (keep_io_types)."
                )
        self._dtypes: dict[str, np.dtype[Any]] = {
            info.name: np.dtype(_DTYPES[info.type]) for info in self.session.get_inputs()
        }
        batched = [port.shape[0] for port in self.inputs if port.shape]
        self.row_by_row = bool(batched) and all(length == 1 and type(length) is int for length in batched)

    @property
    def provider(self) -> str:
        """The execution provider of the graph, by ONNX Runtime's name."""
        return self.session.get_providers()[0]

    def __str__(self) -> str:
        return ", ".join(map(str, self.inputs))

    def __call__(self, *inputs: Any, **keyword_inputs: Any) -> Any:
        arrays = self._convert_inputs(inputs, keyword_inputs)
        lengths = {len(array) for array in arrays.values() if array.ndim}
        if self.row_by_row and len(lengths) == 1 and (length := lengths.pop()) > 1:
            runs = [
                self._run(
                    {name: array[row : row + 1] if array.ndim else array for name, array in arrays.items()}
                )
                for row in range(length)
            ]
            values = [np.concatenate(parts) if np.ndim(parts[0]) else np.stack(parts) for parts in zip(*runs)]
        else:
            values = self._run(arrays)
        outputs = [_to_tensor(value) for value in values]
        return outputs[0] if len(outputs) == 1 else dict(zip((port.name for port in self.outputs), outputs))

    def convert(self, port: GraphPort, value: Any) -> np.ndarray:
        """Return ``value`` in the number format of that input, in any shape. Raises PredictionException."""
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise self._input_error(f"the input {port.name} is a list whose parts differ in length") from None
        expected = self._dtypes[port.name]
        if array.dtype == expected and array.dtype != np.object_:
            return array
        if expected == np.object_:
            if array.dtype.kind in "UO" and all(isinstance(item, str) for item in array.flat):
                return array.astype(np.object_)
            raise self._input_error(f"the input {port.name} holds {array.dtype}")
        if not _can_convert(array, expected):
            raise self._input_error(f"the input {port.name} holds {_describe_kind(array)}")
        if expected.kind in "iu" and array.size:
            limits = np.iinfo(expected)
            if array.min() < limits.min or array.max() > limits.max:
                raise self._input_error(
                    f"the input {port.name} holds numbers outside the range of {expected}"
                )
        with np.errstate(over="ignore"):  # a number that is too large for a float is infinite
            return array.astype(expected)

    def _convert_inputs(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]
    ) -> dict[str, np.ndarray]:
        first = inputs[0] if len(inputs) == 1 else None
        if isinstance(first, Mapping):
            inputs, keyword_inputs = (), {**first, **keyword_inputs}
        if len(inputs) > len(self.inputs):
            raise self._input_error(f"there are {len(inputs)} inputs")
        values = dict(zip((port.name for port in self.inputs), inputs)) | keyword_inputs
        self.check_names(values)
        arrays = {port.name: self.convert(port, values[port.name]) for port in self.inputs}
        for port in self.inputs:
            if not shape_matches(arrays[port.name].shape, port.shape, 1 if self.row_by_row else 0):
                raise self._input_error(
                    f"the input {port.name} has the shape {list(arrays[port.name].shape)}"
                )
        return arrays

    def check_names(self, values: Mapping[str, Any]) -> None:
        """Raise PredictionException unless ``values`` has exactly the graph's inputs."""
        names = [port.name for port in self.inputs]
        if missing := [name for name in names if name not in values]:
            raise self._input_error(f"the input {missing[0]} is missing")
        if unknown := [name for name in values if name not in names]:
            raise self._input_error(f"there is no input {unknown[0]!r}")

    def check_signature(self, ports: Iterable[Mapping[str, Any]]) -> None:
        """Raise HandlerLoadError unless these inputs of model-config.yaml's ``signature`` match the graph's.

        The first axis is the batch's; -1 is an axis of any length, as is one that the graph only names.
        """
        declared = {port["name"]: port for port in ports}
        if declared and declared.keys() != {port.name for port in self.inputs}:
            raise self._signature_error(f"signature has the inputs {', '.join(declared)}")
        for port in self.inputs if declared else ():
            datatype, shape = declared[port.name].get("datatype"), declared[port.name].get("shape")
            if datatype in _OIP_DTYPES and not _can_convert(
                np.empty(1, _OIP_DTYPES[datatype]), self._dtypes[port.name]
            ):
                raise self._signature_error(f"signature has {port.name} as {datatype}")
            if shape is None or not port.shape:
                continue
            matches = all(
                ANY_LENGTH in (axis, port_axis) or axis == port_axis
                for axis, port_axis in zip(shape[1:], map(_axis_length, port.shape[1:]))
            )
            if len(shape) != len(port.shape) or not matches:
                raise self._signature_error(f"signature has {port.name} with the shape {list(shape)}")

    def _signature_error(self, what: str) -> HandlerLoadError:
        return HandlerLoadError(
            f"model-config.yaml: {what}, and the graph takes {self}. Write it as the graph has it."
        )

    def _run(self, arrays: dict[str, np.ndarray]) -> list[Any]:
        try:
            return self.session.run(None, arrays)
        except Exception as error:  # ONNX Runtime's are of one family in name only
            if any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS):
                raise MemoryError(str(error)) from error
            if axis := self._find_inconsistent_axis(arrays):
                raise self._input_error(f"the axis {axis} has different lengths in its inputs") from error
            if type(error).__name__ == "InvalidArgument":
                raise self._input_error(
                    " ".join(str(error).rpartition("INVALID_ARGUMENT : ")[2].split())
                ) from error
            raise

    def _find_inconsistent_axis(self, arrays: dict[str, np.ndarray]) -> str | None:
        """Return a name that stands for axes of different lengths in these inputs.

        Some exporters use one name for different axes.
        """
        lengths: dict[str, int] = {}
        for port in self.inputs:
            for axis, length in zip(port.shape, arrays[port.name].shape):
                if isinstance(axis, str) and axis != "?" and lengths.setdefault(axis, length) != length:
                    return axis
        return None

    def _input_error(self, reason: str) -> PredictionException:
        return PredictionException(f"The input does not fit the model: {reason}. It takes {self}.", 400)


def shape_matches(shape: tuple[int, ...], expected: tuple[int | str, ...], skip: int = 0) -> bool:
    """Return whether an array of that shape fits the graph's shape ``expected``, from axis ``skip`` on.

    A shape without axes belongs to a scalar, or is unknown to the graph, so every array is valid.
    """
    if not expected:
        return True
    pairs = list(zip(shape, expected))[skip:]
    return len(shape) == len(expected) and all(type(axis) is str or axis == length for length, axis in pairs)


def _create_session(file: Path, device: torch.device) -> onnxruntime.InferenceSession:
    provider = PROVIDERS.get(device.type)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; warnings are about every node of a graph
    if provider is None or provider not in onnxruntime.get_available_providers():
        raise _device_error(
            file, device, f"the onnxruntime that is installed has no provider for {device.type}"
        )
    settings = {"device_id": device.index or 0} if device.type == "cuda" else {}
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=[(provider, settings)])
    except Exception as error:
        raise _load_error(file, str(error)) from error
    if session.get_providers()[0] != provider:  # where a GPU does not start, it takes the CPU
        raise _device_error(file, device, "ONNX Runtime did not start there (stderr has its reason)")
    return session


def _device_error(file: Path, device: torch.device, reason: str) -> HandlerLoadError:
    return HandlerLoadError(
        f"{file}: this model is to run on {device}, and {reason}. Install onnxruntime-gpu in place of "
        "onnxruntime, with "
        "the CUDA version that it requires; or give the model no GPU (deviceType: cpu in model-config.yaml)."
    )


def _load_error(file: Path, reason: str) -> HandlerLoadError:
    details = " ".join(reason.split())
    if "External data" in reason or "external data" in reason:
        hint = "Its weights lie in a file of their own: pack that too (--extra-files), under the name it has."
    elif "No Op registered" in reason or "NOT_IMPLEMENTED" in reason:
        hint = "It uses an operator that this onnxruntime has not: export it with standard operators."
    elif "opset" in reason or "IR version" in reason:
        hint = (
            f"It is newer than onnxruntime {onnxruntime.__version__}: export it with a lower opset_version."
        )
    else:
        hint = (
            "The file is damaged or no ONNX graph: export it again with torch.onnx.export, and pack the "
            "whole file."
        )
    return HandlerLoadError(f"{file}: ONNX Runtime cannot load this. {hint} Its message: {details}")


def _make_port(info: Any) -> GraphPort:
    shape = tuple(axis if isinstance(axis, (int, str)) else "?" for axis in info.shape or ())
    return GraphPort(info.name, info.type.removeprefix("tensor(").removesuffix(")"), shape)


def _axis_length(axis: int | str) -> int:
    return axis if isinstance(axis, int) else ANY_LENGTH


def _can_convert(array: np.ndarray, expected: np.dtype) -> bool:
    """Return whether the array may be converted to ``expected``: floats to floats, integers to both."""
    if array.dtype.kind not in "biuf":
        return False
    if array.size == 0 or (array.dtype.kind == "i" and expected.kind == "u"):
        return True
    return np.can_cast(array.dtype, expected, "same_kind")


def _describe_kind(array: np.ndarray) -> str:
    return {"f": "floats", "b": "true and false", "i": "integers", "u": "integers"}.get(
        array.dtype.kind, "no numbers"
    )


def _to_tensor(value: Any) -> Any:
    """Return an output as a tensor; text, and other libraries' outputs for labels, are returned unchanged."""
    if not isinstance(value, np.ndarray):
        return torch.tensor(value) if isinstance(value, np.generic) else value
    return torch.from_numpy(value) if value.dtype != np.object_ else value
