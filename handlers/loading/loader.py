"""A loader of handlers: it turns a handler's name, as a manifest has it, into a ``LoadedHandler``.

Nothing here imports torch until a handler needs it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from handlers.envelopes import ENVELOPES
from handlers.errors import HandlerLoadError
from handlers.loading import archive_packages, private_modules
from handlers.loading.module_loader import (
    add_archive_to_path,
    format_import_error,
    list_classes_from_module,
    load_module,
)

_OWNER_HANDLER = "SAGEMAKER_HANDLER"
# Built-in handlers: the name in a manifest -> "module:Class", imported when a model needs it.
HANDLERS: dict[str, str] = {
    "azureml": "handlers.builtin.azureml:AzureMLHandler",
    "base_handler": "handlers.base:BaseHandler",
    "causal_lm": "handlers.builtin.causal_lm:CausalLM",
    "dali_image_classifier": "handlers.builtin.dali:DALIImageClassifier",
    "densenet_handler": "handlers.builtin.densenet:DenseNetHandler",
    "hf_endpoint": "handlers.builtin.hf_endpoint:HuggingFaceEndpoint",
    "huggingface": "handlers.builtin.huggingface:HuggingFace",
    "image_classifier": "handlers.builtin.image_classifier:ImageClassifier",
    "image_segmenter": "handlers.builtin.image_segmenter:ImageSegmenter",
    "image_text_to_text": "handlers.builtin.image_text_to_text:ImageTextToText",
    "llm": "handlers.builtin.llm:LanguageModel",
    "mlflow": "handlers.builtin.mlflow:MLflowHandler",
    "object_detector": "handlers.builtin.object_detector:ObjectDetector",
    "onnx": "handlers.builtin.onnx:OnnxHandler",
    "sagemaker": "handlers.builtin.sagemaker:SageMakerHandler",
    "text_classifier": "handlers.builtin.text_classifier:TextClassifier",
    "trt_llm_handler": "handlers.torchserve_compat.trt_llm_handler:TRTLLMHandler",
    "vllm_handler": "handlers.torchserve_compat.vllm_handler:VLLMHandler",
}
# Built-in handlers that read a model folder instead of a weights file.
FOLDER_HANDLERS = frozenset(
    ("causal_lm", "huggingface", "image_text_to_text", "llm", "trt_llm_handler", "vllm_handler")
)


@dataclass(frozen=True)
class LoadedHandler:
    """A loaded handler: ``initialize(context)`` once, then ``handle(data, context)`` for each batch.

    ``function`` is the author's function; for a class, ``instance`` is set instead.
    """

    function: Callable[[Any, Any], Any] | None = None
    instance: Any = None

    @property
    def handle(self) -> Callable[[Any, Any], Any]:
        """The callable that takes a batch; an instance may replace it in its ``initialize``."""
        return self.instance.handle if self.function is None else self.function

    @property
    def is_async(self) -> bool:
        """Return whether ``handle`` is ``async def``: its result must be awaited, and batches may overlap."""
        return inspect.iscoroutinefunction(self.handle)

    def initialize(self, context: Any) -> Any:
        """Call the class's ``initialize``, or the function once with no data, so that it loads its model.

        Returns an awaitable where that is ``async def``, else None.
        """
        if self.function is not None:
            result = self.function(None, context)
        else:
            result = self.instance.initialize(context) if hasattr(self.instance, "initialize") else None
        return result if inspect.isawaitable(result) else None

    def __call__(self, data: list[dict[str, Any]], context: Any) -> Any:
        """Return the handler's values unchecked: one value or one exception for each row of ``data``."""
        return self.handle(data, context)


def load(handler: str, directory: Path, manifest: dict[str, Any], runs_code: bool = True) -> LoadedHandler:
    """Return the handler named ``handler``, ready for ``LoadedHandler.initialize``.

    ``handler`` is a file of the archive (``file.py``, ``file``), or a function or class in it
    (``file.py:name``, ``file:name``). Otherwise it is the name of a built-in handler, or
    ``package.module:name`` of an installed package. A file of the archive takes precedence over a built-in
    name. An empty name means the manifest's own handler.

    ``directory`` is put first on ``sys.path``, so call this in the model's own process, or in a thread that
    has entered the archive's PrivateModules. Without
    ``runs_code`` it is not, and no file of it is imported: neither as the handler nor in place of a package
    that a built-in handler imports. Raises HandlerLoadError, with the author's own error as its cause where
    there is one.
    """
    handler = handler or (manifest.get("model") or {}).get("handler") or ""
    if not handler:
        raise HandlerLoadError(
            f"{directory}: neither the manifest nor the registration names a handler. "
            f"{_format_choices(directory)}"
        )
    directory = Path(directory).resolve()
    if runs_code and private_modules.current() is None:
        add_archive_to_path(directory)
    name, _, attribute = handler.partition(":")
    stem = name[:-3] if name.endswith(".py") else name
    file = (_find_file(stem, directory) or find_owner_file(name)) if runs_code else None
    if file is not None:
        return _make_entry(load_module(file), file, attribute)
    if stem in HANDLERS and attribute in ("", "handle"):
        module_name, _, class_name = HANDLERS[stem].partition(":")
        return _make_instance(getattr(importlib.import_module(module_name), class_name), stem)
    if ("." in stem or attribute) and all(part.isidentifier() for part in stem.split(".")):
        module = _import_module(stem, directory)
        if module is not None:
            return _make_entry(module, getattr(module, "__file__", None) or stem, attribute)
    raise HandlerLoadError(
        f"{directory}: there is no handler {handler!r}. {_format_choices(directory, name)}"
    )


def load_envelope(name: str) -> type[Any]:
    """Return the envelope class named ``name``.

    ``load_envelope("kserve")(entry).handle`` replaces ``entry``. Raises HandlerLoadError for an unknown name.
    """
    place = ENVELOPES.get(name)
    if place is None:
        near = difflib.get_close_matches(name, ENVELOPES, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise HandlerLoadError(
            f"There is no service envelope {name!r}.{hint} There are {', '.join(ENVELOPES)}."
        )
    module, _, class_name = place.partition(":")
    envelope: type[Any] = getattr(importlib.import_module(module), class_name)
    return envelope


def _find_file(stem: str, directory: Path) -> Path | None:
    """Return the archive's file named ``stem``, or None.

    Archivers flatten folders, so the last part of the name is enough.
    """
    path = PurePosixPath(stem)
    places = [path.name] if path.is_absolute() or ".." in path.parts else [stem, path.name]
    for place in places:
        file = directory / f"{place}.py"
        if path.name and file.is_file():
            return file
    return None


def find_owner_file(name: str) -> Path | None:
    """Return the file outside of the archive that SAGEMAKER_HANDLER names, as the container's owner can."""
    owner = os.environ.get(_OWNER_HANDLER, "").partition(":")[0]
    if not name or name != owner or not Path(name).is_absolute():
        return None
    file = Path(name if name.endswith(".py") else f"{name}.py")
    return file if file.is_file() else None


def _import_module(name: str, directory: Path) -> ModuleType | None:
    """Return the module ``name``, of the archive or installed; None where there is none."""
    modules = private_modules.current()
    try:
        return (modules or archive_packages).import_module(name)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            return None
        raise HandlerLoadError(
            format_import_error(f"{directory}: the handler's module {name}", error)
        ) from error


def _make_entry(module: ModuleType, place: object, attribute: str) -> LoadedHandler:
    member = getattr(module, attribute or "handle", None)
    if inspect.isclass(member):
        return _make_instance(member, place)
    if callable(member):
        return LoadedHandler(member)
    if attribute not in ("", "handle"):
        raise _missing_member(module, place, attribute)
    return _make_instance(_find_handler_class(module, place), place)


def select_model_class(module: ModuleType, place: object, attribute: str = "") -> type:
    """Return the model class of a module, by its name or the default one. Raises HandlerLoadError."""
    if not attribute:
        return _find_handler_class(module, place)
    member = getattr(module, attribute, None)
    if not inspect.isclass(member):
        raise _missing_member(module, place, attribute)
    return member


def _missing_member(module: ModuleType, place: object, attribute: str) -> HandlerLoadError:
    near = difflib.get_close_matches(attribute, [n for n, v in vars(module).items() if callable(v)], 1)
    defined = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    hint = f" Did you mean {near[0]!r}?" if near else f" It defines {', '.join(defined)}." if defined else ""
    return HandlerLoadError(f"{place}: there is no function or class {attribute!r} in it.{hint}")


def _find_handler_class(module: ModuleType, place: object) -> type:
    """Return the one class in the file with a ``handle`` method, leaving out classes that another one
    extends; where there is none, the model class.
    """
    classes = list_classes_from_module(module)
    candidates = [
        cls for cls in classes if callable(getattr(cls, "handle", None)) and not inspect.isabstract(cls)
    ]
    most_derived = [
        cls
        for cls in candidates
        if not any(other is not cls and issubclass(other, cls) for other in candidates)
    ]
    if len(most_derived) == 1:
        return most_derived[0]
    if most_derived:
        names = [cls.__name__ for cls in most_derived]
        raise HandlerLoadError(
            f"{place}: {len(names)} classes in it have a handle method ({', '.join(names)}), and only one "
            f"can be the handler. Name it: handler={Path(str(place)).name}:{names[0]}, at registration or "
            "in the manifest."
        )
    from handlers.model_interface import find_model_class  # late: it needs pydantic

    if (model_class := find_model_class(module, place)) is not None:
        return model_class
    others = [cls.__name__ for cls in classes]
    present = f" The classes in it ({', '.join(others)}) have none of these methods." if others else ""
    raise HandlerLoadError(
        f"{place}: there is no handler in it.{present} Define a class with predict(request), a function "
        "handle(data, context), or a class with initialize(context) and handle(data, context)."
    )


def _make_instance(cls: type, place: object) -> LoadedHandler:
    if not callable(getattr(cls, "handle", None)):
        from handlers.model_class import create_handler  # late: it needs pydantic

        return LoadedHandler(instance=create_handler(cls))
    try:
        instance = cls()
    except MemoryError:
        raise
    except Exception as error:
        raise HandlerLoadError(
            f"{place}: {cls.__name__}() failed with {type(error).__name__}: {error}. Handlers "
            "are created without arguments; read the archive in initialize(context)."
        ) from error
    return LoadedHandler(instance=instance)


def _format_choices(directory: Path, name: str = "") -> str:
    files = sorted(file.name for file in directory.glob("*.py"))
    known = files if name.endswith(".py") else [*HANDLERS, *(file[:-3] for file in files)]
    near = difflib.get_close_matches(name, known, 1) if name else []
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return (
        f"{hint}The Python files in the archive: {', '.join(files) or 'none'}. The built-in handlers: "
        f"{', '.join(sorted(HANDLERS))}. Pack the file (torchrelay archive --handler), or name a built-in "
        "one."
    )
