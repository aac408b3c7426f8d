"""ONNX graphs that run in ONNX Runtime and are called like PyTorch's models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch

from handlers.errors import HandlerLoadError, PredictionException
from handlers.loading.device import remaining_gpu_bytes
from handlers.onnx_providers import PROVIDERS, select_providers

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
# Number formats of tensors on a GPU that a graph reads in place.
_TORCH_DTYPES = {
    "float": torch.float32,
    "float16": torch.float16,
    "double": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
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

    It runs in as many threads as torch does in this process, with the execution providers that ``config``, a
    model-config.yaml, names under ``onnx``. Tensors on the GPU are bound to its inputs without a copy. Raises
    HandlerLoadError for a file that is not a runnable graph, and if ONNX Runtime cannot use ``device`` or a
    provider: it never falls back to another one.
    """

    def __init__(self, file: Path, device: torch.device, config: Mapping[str, Any] | None = None) -> None:
        self._device = device
        self._config = config or {}
        self.session = _create_session(file, device, self._config)
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

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the session, as ``run``: TorchServe's ``self.model`` is the session."""
        if name == "session":  # not yet created, or being unpickled
            raise AttributeError(name)
        return getattr(self.session, name)

    @property
    def provider(self) -> str:
        """The execution provider of the graph, by ONNX Runtime's name."""
        return self.session.get_providers()[0]

    def with_graph(self, file: Path) -> OnnxModel:
        """Return the graph of another file on the same device, with the same providers."""
        return OnnxModel(file, self._device, self._config)

    def __str__(self) -> str:
        return ", ".join(map(str, self.inputs))

    def __call__(self, *inputs: Any, **keyword_inputs: Any) -> Any:
        if (bound := self._bindable_inputs(inputs, keyword_inputs)) is not None:
            return self._name_outputs(self._guard(self._run_bound, bound))
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
        return self._name_outputs(values)

    def _name_outputs(self, values: list[Any]) -> Any:
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

    def _bindable_inputs(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]
    ) -> dict[str, torch.Tensor] | None:
        """Return the inputs by name if the graph can read all of them where they are, on its GPU; else None.

        On a CPU nothing is bound: ``session.run`` reads numpy's memory in place too, and takes less time
        (20 against 26 µs for a matrix of 16 numbers, 2.27 against 2.17 ms for one of 1024).
        """
        if self._device.type != "cuda" or self.row_by_row:
            return None
        first = inputs[0] if len(inputs) == 1 else None
        if isinstance(first, Mapping):
            inputs, keyword_inputs = (), {**first, **keyword_inputs}
        values = dict(zip((port.name for port in self.inputs), inputs)) | keyword_inputs
        if len(inputs) > len(self.inputs) or values.keys() != {port.name for port in self.inputs}:
            return None  # the errors are those of the other path
        for port in self.inputs:
            value = values[port.name]
            if (
                not isinstance(value, torch.Tensor)
                or value.device != self._device
                or value.dtype != _TORCH_DTYPES.get(port.dtype)
                or not shape_matches(tuple(value.shape), port.shape)
            ):
                return None
        return {name: value.detach().contiguous() for name, value in values.items()}

    def _run_bound(self, tensors: dict[str, torch.Tensor]) -> list[Any]:
        """Run the graph on tensors of its GPU; the outputs are copied to the CPU."""
        binding = self.session.io_binding()
        for name, tensor in tensors.items():
            index, dtype = self._device.index or 0, self._dtypes[name]
            binding.bind_input(name, "cuda", index, dtype, tuple(tensor.shape), tensor.data_ptr())
        for port in self.outputs:
            binding.bind_output(port.name, "cpu")
        torch.cuda.current_stream(self._device).synchronize()  # the graph runs on another stream
        self.session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()]

    def _run(self, arrays: dict[str, np.ndarray]) -> list[Any]:
        return self._guard(lambda values: self.session.run(None, values), arrays)

    def _guard(self, run: Callable[[Any], list[Any]], arrays: Mapping[str, Any]) -> list[Any]:
        """Run the graph; raise PredictionException or MemoryError for what its inputs have caused."""
        try:
            return run(arrays)
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

    def _find_inconsistent_axis(self, arrays: Mapping[str, Any]) -> str | None:
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


def _create_session(
    file: Path, device: torch.device, config: Mapping[str, Any]
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors; warnings are about every node of a graph
    available = onnxruntime.get_available_providers()
    if config.get("onnx") is None and PROVIDERS.get(device.type) not in available:
        raise _device_error(
            file, device, f"the onnxruntime that is installed has no provider for {device.type}"
        )
    limit = remaining_gpu_bytes(device)
    providers = select_providers(config, device.type, device.index or 0, available, limit)
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=providers)
    except Exception as error:
        raise _load_error(file, str(error)) from error
    for name, _ in providers:
        if name not in session.get_providers():  # where a provider does not start, it takes the CPU
            raise _device_error(
                file, device, f"ONNX Runtime did not start its {name} (stderr has the reason)"
            )
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
