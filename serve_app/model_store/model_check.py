"""Checks of an unpacked model before any replica of it starts."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from handlers import FOLDER_HANDLERS, HANDLERS, HandlerLoadError, extras, tasks
from handlers.distributed.degrees import check_divisible, degrees, layout
from handlers.loading import pickle_scan
from serve_app.domain.model import NAME, VERSION
from serve_app.domain.validation import did_you_mean
from serve_app.errors import ConfigurationError, InvalidArchive
from serve_app.model_store.large_model_config import (
    LANGUAGE_MODEL_HANDLERS,
    translate_language_model,
    translate_own_handler,
    translate_parallelism,
)
from serve_app.model_store.manifest import (
    CONFIG,
    HUGGING_FACE,
    Manifest,
    find_syntax_error,
    handler_file,
    handler_module,
    resolve_file,
)
from serve_app.model_store.model_config import ModelConfig

log = logging.getLogger(__name__)

_SHARDED_HANDLERS = ("causal_lm", "llm")  # built-in handlers that are sharded by configuration alone


def check_model(
    directory: Path, manifest: Manifest, task: str | None = None, trusted: bool = False
) -> ModelConfig:
    """Check everything that is known before a replica starts; return the configuration.

    ``task`` is that of the registration, which takes precedence over the configuration's. The returned
    configuration of a model folder has the task that was found. ``trusted`` replaces the configuration's:
    files of a model do not decide about their own trust. An untrusted model without a manifest runs no code
    of its own.

    Names must fit into routes, named files must exist inside the model, its Python must compile, a built-in
    handler must exist. To check the names of a registration, put them into the manifest first
    (``dataclasses.replace``). Raises InvalidArchive and ConfigurationError.
    """
    for what, name, valid in (
        ("model name", manifest.model_name, NAME),
        ("version", manifest.version, VERSION),
    ):
        if not valid.fullmatch(name):
            signs = "'_', '-' and '.'" if valid is NAME else "'_', '-', '+' and '.'"
            remedy = f"use letters, digits, {signs}, and begin with a letter, a digit or '_'"
            raise InvalidArchive(manifest.archive, f"the {what} {name!r} cannot be part of a route; {remedy}")
    if manifest.runtime not in ("python", "python3"):
        remedy = "archive the model with --runtime python"
        raise InvalidArchive(manifest.archive, f"the runtime {manifest.runtime!r} is not served; {remedy}")
    for file_name in (
        manifest.serialized_file,
        manifest.model_file,
        manifest.requirements_file,
        manifest.config_file,
    ):
        if file_name is not None:
            resolve_file(directory, manifest, file_name)
    config = _with_trust(ModelConfig.read(directory, manifest), trusted, manifest)
    task = task or config.task
    for sample in config.samples or ():
        resolve_file(directory, manifest, sample)
    own_handler = handler_file(directory, manifest.handler)
    if own_handler is not None and not (manifest.is_code or trusted):
        if handler_module(manifest.handler) not in HANDLERS:
            remedy = "register it with trusted=true, name it in store.trusted, or archive it with a manifest"
            problem = f"{own_handler.name} is code of a model without a manifest"
            raise InvalidArchive(manifest.archive, f"{problem}, which is not run; {remedy}")
        own_handler = None  # the built-in handler of that name
    _check_handler(directory, manifest, own_handler, manifest.is_code or trusted)
    built_in = handler_module(manifest.handler) if own_handler is None else ""
    # To a handler of its own, the model file may be any file, such as the weights.
    if manifest.model_file is not None and (own_handler is None or manifest.model_file.endswith(".py")):
        _check_compiles(directory / manifest.model_file, manifest)
    if built_in == HUGGING_FACE:
        task = _task(directory, manifest, task, config)
    where, base = manifest.config_file or CONFIG, built_in
    if own_handler is not None:
        config, base = translate_own_handler(config, own_handler, manifest)
    if base in LANGUAGE_MODEL_HANDLERS:
        config, folder = translate_language_model(config, base, directory, manifest)
        _check_parallelism(folder, config, where)
    elif built_in in _SHARDED_HANDLERS:
        config = translate_parallelism(config)
        _check_parallelism(directory, config, where)
    _check_weights(directory, manifest, built_in, config.trusted is True)
    return config if task == config.task else replace(config, task=task, raw={**config.raw, "task": task})


def _with_trust(config: ModelConfig, trusted: bool, manifest: Manifest) -> ModelConfig:
    """Return the configuration with the trust of the registration or the settings."""
    if config.trusted and not trusted:
        where = f"{manifest.archive}/{manifest.config_file}"
        log.warning("%s: trusted is ignored: it counts in the registration or in store.trusted", where)
    raw = {key: value for key, value in config.raw.items() if key != "trusted"}
    return replace(config, trusted=trusted or None, raw={**raw, "trusted": True} if trusted else raw)


def _check_handler(directory: Path, manifest: Manifest, file: Path | None, runs_code: bool) -> None:
    if not manifest.handler:
        remedy = (
            "name one when registering, or set default_service_handler; "
            "a Hugging Face folder has a config.json"
        )
        raise InvalidArchive(manifest.archive, f"names no handler; {remedy}")
    if file is not None:
        return _check_compiles(file, manifest)
    module, function = handler_module(manifest.handler), manifest.handler.partition(":")[2]
    if module in HANDLERS and function in ("", "handle"):
        return
    package = module.partition(".")[0]
    is_available = manifest.requirements_file is not None or _importable(package, directory, runs_code)
    if ("." in module or function) and package.isidentifier() and is_available:
        return  # only the model's own process may import it
    near = did_you_mean(module, list(HANDLERS))
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(HANDLERS)}"
    missing = f"the handler {manifest.handler!r} is neither a file of the archive nor built in"
    raise InvalidArchive(
        manifest.archive, f"{missing}; put it into the archive, or name a built-in one: {hint}"
    )


def _check_weights(directory: Path, manifest: Manifest, built_in: str, trusted: bool) -> None:
    """Check that a built-in handler can read the weights; an archive's own handler is not checked."""
    if manifest.serialized_file is None or built_in not in HANDLERS.keys() - FOLDER_HANDLERS:
        return
    is_onnx = manifest.serialized_file.endswith(".onnx")
    if is_onnx and manifest.requirements_file is None and not extras.is_installed("onnxruntime"):
        reason = f"{manifest.serialized_file} needs onnxruntime, which is not installed"
        raise InvalidArchive(manifest.archive, f"{reason}; {extras.install_command('onnxruntime')}")
    rejection = pickle_scan.find_rejection_reason(
        directory / manifest.serialized_file, manifest.model_file is not None, trusted
    )
    # torch.serialization.add_safe_globals in the model's own code may let in what its weights name.
    if rejection is not None and not any(
        b"safe_globals" in file.read_bytes() for file in directory.glob("*.py")
    ):
        raise InvalidArchive(manifest.archive, f"{manifest.serialized_file}: {rejection}")


def _task(directory: Path, manifest: Manifest, requested: str | None, config: ModelConfig) -> str:
    try:
        return tasks.select_task(directory, requested, config.trusted is True)
    except HandlerLoadError as error:
        raise InvalidArchive(manifest.archive, str(error)) from None


def _importable(package: str, directory: Path, runs_code: bool) -> bool:
    """Return whether the model has such a package and may import it, or it is installed."""
    return (runs_code and (directory / package).is_dir()) or importlib.util.find_spec(package) is not None


def _check_compiles(file: Path, manifest: Manifest) -> None:
    hint = f" (read with Python {sys.version_info.major}.{sys.version_info.minor})"
    if problem := find_syntax_error(file, hint):
        raise InvalidArchive(manifest.archive, f"{file.name}{problem}; mend the file")


def _check_parallelism(directory: Path, config: ModelConfig, where: str) -> None:
    """Raise ConfigurationError where the model in ``directory`` cannot be sharded as configured."""
    try:
        layout(config.raw)
    except HandlerLoadError as error:
        raise ConfigurationError(where, str(error)) from None
    tensor, pipeline = degrees(config.raw)
    candidates = [directory / "config.json", *sorted(directory.glob("*/config.json"))]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if tensor * pipeline == 1 or file is None:
        return
    try:
        model_config = json.loads(file.read_bytes())
        model_config = {**model_config, **(model_config.get("text_config") or {})}
    except (ValueError, TypeError, AttributeError):
        return  # loading it will report the error
    try:
        check_divisible(SimpleNamespace(**model_config), tensor, pipeline, file.relative_to(directory))
    except HandlerLoadError as error:
        raise ConfigurationError(where, str(error)) from None
