"""What a model author writes against: handlers, the context that they get, and the errors they may raise.

``load`` turns a handler's name, as a manifest has it, into an ``Entry`` that runs batches. Nothing
here imports torch until a handler needs it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from handlers.envelopes import ENVELOPES
from handlers.errors import HandlerLoadError, PredictionException
from handlers.source import failure, list_classes_from_module, load_source, open_archive
from handlers.torchserve_names import INSTEAD

__all__ = ["HANDLERS", "OF_FOLDERS", "Entry", "HandlerLoadError", "PredictionException", "load", "load_envelope"]

# The built-in handlers: a name that a manifest may hold -> "module:Class", imported when asked for.
HANDLERS: dict[str, str] = {
    "base_handler": "handlers.base:BaseHandler",
    "causal_lm": "handlers.causal_lm:CausalLM",
    "dali_image_classifier": "handlers.dali:DALIImageClassifier",
    "densenet_handler": "handlers.densenet:DenseNetHandler",
    "huggingface": "handlers.huggingface:HuggingFace",
    "image_classifier": "handlers.image_classifier:ImageClassifier",
    "image_segmenter": "handlers.image_segmenter:ImageSegmenter",
    "llm": "handlers.llm:LanguageModel",
    "object_detector": "handlers.object_detector:ObjectDetector",
    "onnx": "handlers.onnx_handler:OnnxHandler",
    "text_classifier": "handlers.text_classifier:TextClassifier",
}
OF_FOLDERS = frozenset(("causal_lm", "huggingface", "llm"))  # those that read a model's folder, and no weights file


@dataclass(frozen=True)
class Entry:
    """A loaded handler: ``initialize(context)`` once, then ``handle(data, context)`` for each batch.

    ``function`` is the author's function; for a class there is its ``instance`` instead.
    """

    function: Callable[[Any, Any], Any] | None = None
    instance: Any = None

    @property
    def handle(self) -> Callable[[Any, Any], Any]:
        """What takes a batch; an instance may put something else in its place while it initializes."""
        return self.instance.handle if self.function is None else self.function

    @property
    def asynchronous(self) -> bool:
        """Whether ``handle`` is ``async def``: what it returns is to be awaited, and batches may overlap."""
        return inspect.iscoroutinefunction(self.handle)

    def initialize(self, context: Any) -> Any:
        """Let the handler load its model: a class's ``initialize``, or the function once with no data.

        An awaitable where that is ``async def``, else None.
        """
        if self.function is not None:
            made = self.function(None, context)
        else:
            made = self.instance.initialize(context) if hasattr(self.instance, "initialize") else None
        return made if inspect.isawaitable(made) else None

    def __call__(self, data: list[dict[str, Any]], context: Any) -> Any:
        """One value or one exception for each row of ``data``, as the handler returned them, unchecked."""
        return self.handle(data, context)


def load(handler: str, directory: Path, manifest: dict[str, Any]) -> Entry:
    """The handler that ``handler`` names, ready for ``Entry.initialize``.

    ``handler`` is a file of the archive (``file.py``, ``file``), a function or class in it
    (``file.py:name``, ``file:name``), the name of a built-in handler, or ``package.module:name`` of
    something installed; a file of the archive goes before a built-in name. Empty: the manifest's own.

    ``directory`` goes to the front of ``sys.path``, so this belongs in the model's own process.
    Raises HandlerLoadError, with the author's own error as its cause where there is one.
    """
    handler = handler or (manifest.get("model") or {}).get("handler") or ""
    if not handler:
        raise HandlerLoadError(
            f"{directory}: neither the manifest nor the registration names a handler. {_choices(directory)}"
        )
    directory = Path(directory).resolve()
    open_archive(directory)
    name, _, attribute = handler.partition(":")
    stem = name[:-3] if name.endswith(".py") else name
    file = _find(stem, directory)
    if file is not None:
        return _entry(load_source(file), file, attribute)
    if stem in HANDLERS and attribute in ("", "handle"):
        module_name, _, class_name = HANDLERS[stem].partition(":")
        return _construct(getattr(importlib.import_module(module_name), class_name), stem)
    if ("." in stem or attribute) and all(part.isidentifier() for part in stem.split(".")):
        module = _import(stem, directory)
        if module is not None:
            return _entry(module, getattr(module, "__file__", None) or stem, attribute)
    instead = INSTEAD.get(f"ts.torch_handler.{stem}")
    without = f" {instead}" if instead else ""
    raise HandlerLoadError(f"{directory}: there is no handler {handler!r}.{without} {_choices(directory, stem)}")


def load_envelope(name: str) -> type[Any]:
    """The envelope class of that name: ``load_envelope("kserve")(entry).handle`` takes the place of ``entry``.

    Raises HandlerLoadError where there is none.
    """
    place = ENVELOPES.get(name)
    if place is None:
        near = difflib.get_close_matches(name, ENVELOPES, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise HandlerLoadError(f"There is no service envelope {name!r}.{hint} There are {', '.join(ENVELOPES)}.")
    module, _, class_name = place.partition(":")
    return getattr(importlib.import_module(module), class_name)


def _find(stem: str, directory: Path) -> Path | None:
    """The archive's file of that name; archivers flatten folders, so its last part is enough."""
    path = PurePosixPath(stem)
    places = [path.name] if path.is_absolute() or ".." in path.parts else [stem, path.name]
    for place in places:
        file = directory / f"{place}.py"
        if path.name and file.is_file():
            return file
    return None


def _import(name: str, directory: Path) -> ModuleType | None:
    """The module ``name``, in a package of the archive or installed; None where there is none."""
    try:
        return importlib.import_module(name)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(f"{missing}.")):
            return None
        raise HandlerLoadError(failure(f"{directory}: the handler's module {name}", error)) from error


def _entry(module: ModuleType, place: object, attribute: str) -> Entry:
    found = getattr(module, attribute or "handle", None)
    if inspect.isclass(found):
        return _construct(found, place)
    if callable(found):
        return Entry(found)
    if attribute not in ("", "handle"):
        near = difflib.get_close_matches(attribute, [n for n, v in vars(module).items() if callable(v)], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise HandlerLoadError(f"{place}: there is no function or class {attribute!r} in it.{hint}")
    return _construct(_only_class(module, place), place)


def _only_class(module: ModuleType, place: object) -> type:
    """The one class that the file defines with ``handle``; a class that another one there extends does not count."""
    defined = list_classes_from_module(module)
    able = [cls for cls in defined if callable(getattr(cls, "handle", None)) and not inspect.isabstract(cls)]
    leaves = [cls for cls in able if not any(other is not cls and issubclass(other, cls) for other in able)]
    if len(leaves) == 1:
        return leaves[0]
    if leaves:
        names = [cls.__name__ for cls in leaves]
        raise HandlerLoadError(
            f"{place}: {len(names)} classes in it have a handle method ({', '.join(names)}), and only one can be the "
            f"handler. Name it: handler={Path(str(place)).name}:{names[0]}, at registration or in the manifest."
        )
    others = [cls.__name__ for cls in defined]
    seen = f" The classes in it ({', '.join(others)}) have no handle method." if others else ""
    raise HandlerLoadError(
        f"{place}: there is no handler in it.{seen} Define a function handle(data, context), or a class with "
        "initialize(context) and handle(data, context)."
    )


def _construct(cls: type, place: object) -> Entry:
    if not callable(getattr(cls, "handle", None)):
        raise HandlerLoadError(f"{place}: the class {cls.__name__} has no method handle(data, context). Define one.")
    try:
        instance = cls()
    except MemoryError:
        raise
    except Exception as error:
        raise HandlerLoadError(
            f"{place}: {cls.__name__}() failed with {type(error).__name__}: {error}. A handler is made without "
            "arguments; what it needs of the archive it finds in initialize(context)."
        ) from error
    return Entry(instance=instance)


def _choices(directory: Path, stem: str = "") -> str:
    files = sorted(file.name for file in directory.glob("*.py"))
    near = difflib.get_close_matches(stem, [*HANDLERS, *(file[:-3] for file in files)], 1) if stem else []
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return (
        f"{hint}The Python files in the archive: {', '.join(files) or 'none'}. The built-in handlers: "
        f"{', '.join(sorted(HANDLERS))}. Pack the file (torch-model-archiver --handler), or name a built-in one."
    )
