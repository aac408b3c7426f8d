"""The target of ``torchrelay serve``: a file, a folder or a URL, as a model that a server can register."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from handlers import tasks
from handlers.errors import HandlerLoadError
from handlers.loading import pickle_scan
from handlers.loading.class_inspection import ClassDescription
from serve_app.domain.validation import did_you_mean
from serve_app.model_store.archive import MANIFEST, archive_stem, is_mlflow_model, is_model_folder
from serve_app.model_store.archiver import ArchiveRecipe, ArchiverError, make
from serve_app.model_store.class_archive import ClassFile, class_recipe

_ARCHIVES = (".mar", ".zip", ".tar.gz", ".tgz")
_WEIGHTS = {".onnx": "onnx", ".pt": "base_handler", ".pt2": "base_handler", ".safetensors": "base_handler"}
_DEFAULT_FILE = "model.py"


@dataclass(frozen=True)
class ServedTarget:
    """A checked target. It is one of a class, weights, a path that is served as it is, and a URL."""

    name: str
    trusted: bool = False
    url: str = ""
    handler: str = ""  # in place of the target's own
    path: Path | None = None  # an archive, or a folder that is a model
    class_file: ClassFile | None = None
    description: ClassDescription = field(default_factory=ClassDescription)
    whole_folder: bool = False
    weights: ArchiveRecipe | None = None
    extra_files: str | None = None

    @property
    def schemas(self) -> Mapping[str, Any] | None:
        return self.description.schemas

    def write(self, store: Path, version: str, reload_report: Path | None = None) -> str:
        """Put the model into a model store and return its URL for the registration. Raises ArchiverError.

        With ``reload_report`` its replicas watch the class's file, and append their reports to that file.
        """
        if self.url:
            return self.url
        if self.path is not None:
            return _link(self.path, store)
        output: dict[str, Any] = {"export_path": str(store), "archive_format": "zip-store", "force": True}
        if self.weights is not None:
            make(replace(self.weights, version=version, **output))
            return f"{self.name}.mar"
        assert self.class_file is not None
        recipe = ArchiveRecipe(self.name, version, "", extra_files=self.extra_files, **output)
        config = {} if reload_report is None else {"reload": self._reload_options(reload_report)}
        with class_recipe(self.class_file, recipe, self.description, config, self.whole_folder) as complete:
            make(complete)
        return f"{self.name}.mar"

    def _reload_options(self, report: Path) -> dict[str, Any]:
        assert self.class_file is not None
        return {
            "source": str(self.class_file.path),
            "class_name": self.class_file.class_name,
            "report": str(report),
            "tree": self.whole_folder,
        }


def read_target(
    target: str,
    name: str = "",
    model_file: str | None = None,
    extra_files: str | None = None,
    trusted: bool = False,
    handler: str = "",
) -> ServedTarget:
    """Return the checked target. Raises ArchiverError with the place and the remedy.

    A folder of a causal language model has the handler ``llm`` where ``handler`` names no other.
    """
    served = _read(target, name, model_file, extra_files, trusted)
    if not handler:
        return served
    if served.class_file is not None or served.weights is not None:
        raise ArchiverError(f"{target} has its own handler; --handler is for archives and model folders")
    return replace(served, handler=handler)


def _read(
    target: str, name: str, model_file: str | None, extra_files: str | None, trusted: bool
) -> ServedTarget:
    if target.startswith("hf://"):
        repository = target.removeprefix("hf://").partition("@")[0].rstrip("/")
        return ServedTarget(name or repository.rpartition("/")[2], trusted, url=target)
    path = Path(target.partition(":")[0] if ".py:" in target else target)
    if not path.exists():
        near = did_you_mean(path.name, [other.name for other in path.parent.glob(f"*{path.suffix}")])
        hint = f"; did you mean {path.parent / near}?" if near else "; name a file, a folder or an hf:// name"
        raise ArchiverError(f"{path} does not exist{hint}")
    if path.is_dir():
        return _read_folder(path.resolve(), name, extra_files, trusted)
    if path.suffix == ".py":
        return _read_class(ClassFile.parse(target), name or path.stem, extra_files)
    if path.name.lower().endswith(_ARCHIVES):
        return ServedTarget(name or archive_stem(path.name), trusted, path=path.resolve())
    if path.suffix in _WEIGHTS:
        return _read_weights(path.resolve(), name, model_file, extra_files, trusted)
    kinds = ", ".join((".py", *_ARCHIVES, *_WEIGHTS))
    raise ArchiverError(f"{path} is none of {kinds}; write a model.py whose setup loads it")


def _read_class(
    file: ClassFile, name: str, extra_files: str | None, whole_folder: bool = False
) -> ServedTarget:
    return ServedTarget(
        name,
        class_file=file,
        description=file.inspect(),
        whole_folder=whole_folder,
        extra_files=extra_files,
    )


def _read_folder(folder: Path, name: str, extra_files: str | None, trusted: bool) -> ServedTarget:
    name = name or folder.name
    if (folder / MANIFEST).is_file():
        return ServedTarget(name, trusted, path=folder)
    if is_mlflow_model(folder):
        return ServedTarget(name, trusted, path=folder)
    if is_model_folder(folder):
        return ServedTarget(name, trusted, path=folder, handler=_default_handler(folder, trusted))
    if (folder / _DEFAULT_FILE).is_file():
        return _read_class(ClassFile(folder / _DEFAULT_FILE), name, extra_files, whole_folder=True)
    raise ArchiverError(
        f"{folder} has no {_DEFAULT_FILE}, no {MANIFEST}, and no Hugging Face model (config.json and "
        f"weights); add a {_DEFAULT_FILE} with a class, or name a file"
    )


def _default_handler(folder: Path, trusted: bool) -> str:
    """Return the handler with which a folder streams and has OpenAI's API; empty for other folders."""
    if tasks.reads_images_and_texts(folder):
        return "image_text_to_text"
    try:
        return "llm" if tasks.select_task(folder, None, trusted) == "text-generation" else ""
    except HandlerLoadError:  # the registration reports it
        return ""


def _read_weights(
    file: Path, name: str, model_file: str | None, extra_files: str | None, trusted: bool
) -> ServedTarget:
    if file.suffix == ".safetensors" and model_file is None:
        if is_model_folder(file.parent):
            return _read_folder(file.parent, name, extra_files, trusted)
        raise ArchiverError(
            f"{file} has weights without their class, and no config.json is beside it; name the file of the "
            "class with --model-file, or write a model.py whose setup loads it"
        )
    if reason := pickle_scan.find_rejection_reason(file, model_file is not None, trusted):
        raise ArchiverError(f"{file}: {reason} Here, --trusted and --model-file are the options.")
    name = name or file.stem
    recipe = ArchiveRecipe(
        name, "1.0", _WEIGHTS[file.suffix], str(file), model_file=model_file, extra_files=extra_files
    )
    return ServedTarget(name, trusted, weights=recipe)


def _link(path: Path, store: Path) -> str:
    """Put an archive or a folder into a model store, without a copy where both are on one file system."""
    target = store / path.name
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    try:
        if path.is_dir():
            shutil.copytree(path, target, copy_function=_link_file, ignore=shutil.ignore_patterns(".*"))
        else:
            _link_file(str(path), str(target))
    except (OSError, shutil.Error) as error:
        raise ArchiverError(f"{path} cannot be put into {store}: {error}") from None
    return path.name


def _link_file(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
