"""A handler of SageMaker's script mode: ``code/inference.py`` has functions, and absent ones have defaults.

The functions are those of the SageMaker PyTorch inference toolkit:

* ``model_fn(model_dir)`` loads the model; ``pre_model_fn(model_dir)`` runs before it,
  ``model_warmup_fn(model_dir, model)`` after it.
* ``input_fn(data, content_type)``, ``predict_fn(data, model)`` and ``output_fn(prediction, accept)``, or
  ``transform_fn(model, data, content_type, accept)`` in place of all three.

Each may take one more argument, the context. SAGEMAKER_PROGRAM names another script, with a path below
``code/`` or an absolute one, and SAGEMAKER_SUBMIT_DIRECTORY another folder, for a model without ``code/``. A
generator is a streamed response.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import GeneratorType, ModuleType
from typing import Any

import torch

import handlers.sagemaker
from handlers.builtin.script import ScriptHandler, find_script, import_script, read_body, read_content_type
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.loading import private_modules
from handlers.loading.module_loader import add_archive_to_path
from handlers.loading.weights import load_torchscript
from handlers.sagemaker import content_types, decoder, encoder
from handlers.sagemaker.errors import UnsupportedFormatError

_log = logging.getLogger(__name__)

CODE = "code"  # the folder of a model with its script
_PROGRAM, _SUBMIT_DIRECTORY = "SAGEMAKER_PROGRAM", "SAGEMAKER_SUBMIT_DIRECTORY"
_ACCEPT = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
_STAGES = ("input_fn", "predict_fn", "output_fn")
_NUMBERS = {"pre_model_fn": 1, "model_fn": 1, "model_warmup_fn": 2, "transform_fn": 4} | dict.fromkeys(
    _STAGES, 2
)


class SageMakerHandler(ScriptHandler):
    """A handler that calls the functions of a script, row by row."""

    def initialize(self, context: Context) -> None:
        """Import the script and load its model. Raises HandlerLoadError for invalid functions."""
        handlers.sagemaker.install()
        self.device = torch.device(context.device)
        script = _import_script(context.model_dir)
        found = {name: getattr(script, name) for name in _NUMBERS if hasattr(script, name)}
        if "transform_fn" in found and (others := [name for name in _STAGES if name in found]):
            raise HandlerLoadError(
                f"{getattr(script, '__file__', CODE)}: transform_fn replaces {', '.join(others)}; "
                "define one or the other."
            )
        defaults: dict[str, Callable[..., Any]] = {
            "model_fn": self.default_model_fn,
            "input_fn": self.default_input_fn,
            "predict_fn": self.default_predict_fn,
            "output_fn": self.default_output_fn,
            "transform_fn": self._default_transform_fn,
        }
        self._functions = {
            name: _with_context(name, function) for name, function in {**defaults, **found}.items()
        }
        model_dir = str(context.model_dir)
        if "pre_model_fn" in self._functions:
            self._functions["pre_model_fn"](model_dir, context)
        self.model = self._functions["model_fn"](model_dir, context)
        if "model_warmup_fn" in self._functions:
            self._functions["model_warmup_fn"](model_dir, self.model, context)

    def respond(self, row: Any, context: Context) -> Any:
        content_type = read_content_type(context)
        accept = _select_accept(context.get_request_header(0, "accept"))
        body = _read_text(row, content_type)
        result = self._functions["transform_fn"](self.model, body, content_type, accept, context)
        # A single accepted type is the response's; the default output_fn returns the one that it selected.
        response_type = accept.partition(",")[0].strip()
        if isinstance(result, tuple):
            result, response_type = result[0], result[1]
        context.set_response_content_type(0, response_type)
        if isinstance(result, GeneratorType):
            for chunk in result:
                context.emit(0, chunk)
            return b""
        return result

    def _default_transform_fn(
        self, model: Any, data: Any, content_type: str | None, accept: str, context: Context
    ) -> Any:
        value = self._functions["input_fn"](data, content_type, context)
        prediction = self._functions["predict_fn"](value, model, context)
        return self._functions["output_fn"](prediction, accept, context)

    # The default functions

    def default_model_fn(self, model_dir: str) -> Any:
        """Return the TorchScript model in ``model.pt``, or in the only .pt or .pth file."""
        file = Path(model_dir, "model.pt")
        if not file.is_file():
            files = sorted(path for path in Path(model_dir).iterdir() if path.suffix in (".pt", ".pth"))
            if len(files) != 1:
                names = ", ".join(path.name for path in files) or "none"
                raise HandlerLoadError(
                    f"{model_dir}: without model_fn in the script the model is model.pt or the only .pt or "
                    f".pth file, and there is {names}. Define model_fn, or name the file model.pt."
                )
            file = files[0]
        return load_torchscript(file, self.device)

    def default_input_fn(self, data: Any, content_type: str | None) -> torch.Tensor:
        """Return the tensor in JSON, CSV or NPY; numbers of text become floats."""
        try:
            array = decoder.decode(data, content_type)
        except ValueError as error:
            raise PredictionException(f"The body is not {content_type}: {error}", 400) from None
        if content_types.media_type(content_type) in content_types.UTF8_TYPES:
            return torch.tensor(array, dtype=torch.float32, device=self.device)
        return torch.from_numpy(array).to(self.device)

    def default_predict_fn(self, data: Any, model: Any) -> Any:
        """Return the model's output without gradients."""
        with torch.no_grad():
            return model.to(self.device).eval()(data.to(self.device))

    def default_output_fn(self, prediction: Any, accept: str) -> tuple[Any, str]:
        """Return the prediction in the first accepted format of JSON, CSV and NPY, and that format."""
        if isinstance(prediction, torch.Tensor):
            prediction = prediction.detach().cpu().numpy().tolist()
        for name in map(content_types.media_type, accept.split(",")):
            if name in encoder.SUPPORTED_CONTENT_TYPES:
                return encoder.encode(prediction, name), name
        raise UnsupportedFormatError(accept)


def _import_script(model_dir: Path) -> ModuleType | None:
    """Return the module of the script; None where there is none and the default functions apply."""
    name = os.environ.get(_PROGRAM) or "inference.py"
    name = name if name.endswith(".py") else f"{name}.py"
    folders = [model_dir / CODE]
    if submitted := os.environ.get(_SUBMIT_DIRECTORY):
        folders.append(Path(submitted.removeprefix("file://")))
    file = find_script([*folders, model_dir], name)
    if file is None:
        if os.environ.get(_PROGRAM):
            _log.warning("%s has no %s (%s); the default functions serve it", folders[0], name, _PROGRAM)
        return None
    for folder in folders:
        if folder in file.parents and folder != file.parent and private_modules.current() is None:
            add_archive_to_path(folder.resolve())  # a script in a folder below it imports from it, too
    return import_script(file)


def _with_context(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` so that it is called with a context, which it may not take."""
    number, taken = _NUMBERS[name], len(inspect.signature(function).parameters)
    if taken == number + 1:
        return function
    if taken != number:
        raise HandlerLoadError(
            f"{name} takes {taken} arguments; write it with {number}, or with {number + 1} "
            "to receive the context too."
        )
    return lambda *arguments: function(*arguments[:-1])


def _select_accept(header: Any) -> str:
    """Return the header Accept, or SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT where any type is accepted."""
    first = header.partition(",")[0].partition(";")[0].strip() if isinstance(header, str) else ""
    if first in ("", content_types.ANY):
        return os.environ.get(_ACCEPT) or content_types.JSON
    return str(header)


def _read_text(row: Any, content_type: str | None) -> Any:
    """Return a request's body as the toolkit passes it: text for JSON and CSV, else bytes."""
    body = read_body(row)
    body = b"" if body is None else body
    if isinstance(body, (bytes, bytearray)):
        is_text = content_types.media_type(content_type) in content_types.UTF8_TYPES
        return body.decode() if is_text else body
    return body if isinstance(body, str) else json.dumps(body)  # the server has decoded it
