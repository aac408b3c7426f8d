"""The interface of a model class: its method, its types, and their contradictions."""

from __future__ import annotations

import collections.abc
import inspect
import linecache
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from handlers.errors import HandlerLoadError
from handlers.loading.module_loader import list_classes_from_module
from handlers.value_types import Json, ValueType, create_type

METHODS = ("predict_batch", "predict")
DEFAULT_CLASS = "Model"
OPTIONS = "__torchrelay_options__"  # of the decorator, on the class
KEEP = "torchrelay_keep"  # the class attribute that names what a reload keeps
_STREAMS = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)
_BATCHES = (list, collections.abc.Sequence)
_TEMPLATE = "def predict(self, request: dict) -> dict"


@dataclass(frozen=True)
class ModelInterface:
    """The method that answers requests, with the types of one request and of its result."""

    method: str
    input: ValueType
    output: ValueType
    is_async: bool
    streams: bool

    @property
    def is_batch(self) -> bool:
        return self.method == "predict_batch"

    @property
    def signature(self) -> Json | None:
        """The tensors of the Open Inference Protocol; None where the annotations have none."""
        if not self.input.ports:
            return None
        return {
            "inputs": [port.describe() for port in self.input.ports],
            "outputs": [port.describe() for port in self.output.ports],
        }

    @property
    def schemas(self) -> Json:
        """The JSON schemas and media types of a request and of a result."""
        sides = {"input": self.input, "output": self.output}
        return {
            name: {"mediaType": side.media_type, "schema": side.schema(name == "input")}
            for name, side in sides.items()
        }


def read_interface(cls: type) -> ModelInterface:
    """Return the interface of a class. Raises HandlerLoadError with the file, the line and the remedy."""
    interfaces = [_read_method(cls, name) for name in METHODS if callable(getattr(cls, name, None))]
    if not interfaces:
        raise HandlerLoadError(
            f"{locate(cls)}: the class {cls.__name__} has no method predict or predict_batch. "
            f"Define {_TEMPLATE}, or predict_batch(self, requests)."
        )
    if len(interfaces) == 2 and interfaces[0].schemas != interfaces[1].schemas:
        raise HandlerLoadError(
            f"{locate(getattr(cls, 'predict'))}: predict and predict_batch of {cls.__name__} have different "  # noqa: B009
            "types. Annotate both alike, or remove one; predict_batch is used where both exist."
        )
    return interfaces[0]


def find_model_class(module: ModuleType, place: object) -> type | None:
    """Return the class ``Model`` of a file, else its only class with predict or predict_batch.

    None where there is no such class. Raises HandlerLoadError where there are several.
    """
    classes = [cls for cls in list_classes_from_module(module) if not inspect.isabstract(cls)]
    found = [cls for cls in classes if is_model_class(cls)]
    for cls in found:
        if cls.__name__ == DEFAULT_CLASS:
            return cls
    if len(found) > 1:
        names = [cls.__name__ for cls in found]
        raise HandlerLoadError(
            f"{place}: {len(names)} classes in it have predict or predict_batch ({', '.join(names)}). "
            f"Name one, as model.py:{names[0]}, or name the one to serve {DEFAULT_CLASS}."
        )
    return found[0] if found else None


def is_model_class(cls: Any) -> bool:
    return inspect.isclass(cls) and any(callable(getattr(cls, name, None)) for name in METHODS)


def locate(member: Any) -> str:
    """Return ``file, line n`` of a class or a function."""
    code = getattr(inspect.unwrap(member), "__code__", None)
    if code is not None:
        return f"{code.co_filename}, line {code.co_firstlineno}"
    try:
        file = inspect.getsourcefile(member) or member.__module__
        linecache.checkcache(file)
        return f"{file}, line {inspect.getsourcelines(member)[1]}"
    except (OSError, TypeError):
        return str(getattr(member, "__module__", member))


def _read_method(cls: type, name: str) -> ModelInterface:
    function = getattr(cls, name)
    place = f"{locate(function)}: {cls.__name__}.{name}"
    parameter = _read_parameter(function, place)
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a name of an annotation is unknown, or its expression fails
        raise HandlerLoadError(
            f"{place}: its annotations cannot be read: {error}. Import or define what they name."
        ) from None
    is_batch = name == "predict_batch"
    taken, returned = hints.get(parameter), hints.get("return")
    yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    streamed = _unwrap(returned, _STREAMS)
    if yields and returned is not None and streamed is None:
        raise HandlerLoadError(
            f"{place} yields its result in pieces, and its annotation is -> {_name(returned)}. "
            f"Annotate it -> Iterator[{_name(returned)}], or return the result."
        )
    result = returned if streamed is None else streamed[0]
    if is_batch:
        taken = _unwrap_batch(taken, f"{place}: {parameter}", "requests")
        result = _unwrap_batch(result, f"{place}: the result", "results")
    singular = parameter if not is_batch else parameter.removesuffix("s")
    return ModelInterface(
        name,
        _create_type(singular, taken, f"{place}: {parameter}"),
        _create_type("output", result, f"{place}: the result"),
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function),
        yields or streamed is not None,
    )


def _read_parameter(function: Callable[..., Any], place: str) -> str:
    """Return the name of the parameter that takes the request."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD,)]
    if len(required) != 1 or required[0].kind in (required[0].KEYWORD_ONLY, required[0].VAR_POSITIONAL):
        raise HandlerLoadError(
            f"{place} takes {len(required)} values besides self, and is called with one. "
            f"Define {_TEMPLATE}, or predict_batch(self, requests)."
        )
    return required[0].name


def _unwrap(annotation: Any, origins: tuple[Any, ...]) -> tuple[Any] | None:
    """Return the annotation of the elements as a tuple of one; None where it is no such container."""
    origin = typing.get_origin(annotation) or annotation
    if origin not in origins:
        return None
    arguments = typing.get_args(annotation)
    return (arguments[0] if arguments else None,)


def _unwrap_batch(annotation: Any, place: str, what: str) -> Any:
    if annotation is None or annotation is Any:
        return None
    element = _unwrap(annotation, _BATCHES)
    if element is None:
        name = _name(annotation)
        raise HandlerLoadError(
            f"{place} of predict_batch is annotated {name}, and is a list of {what}. "
            f"Annotate list[{name}], or rename the method to predict."
        )
    return element[0]


def _create_type(name: str, annotation: Any, place: str) -> ValueType:
    try:
        return create_type(name, annotation)
    except TypeError as error:
        raise HandlerLoadError(
            f"{place} is annotated {_name(annotation)}, which is not supported: {error} Annotate a pydantic "
            "model, dict, str, bytes, a numpy array, a tensor or a PIL image."
        ) from None


def _name(annotation: Any) -> str:
    name = getattr(annotation, "__name__", None)
    return name if isinstance(name, str) and not typing.get_args(annotation) else str(annotation)
