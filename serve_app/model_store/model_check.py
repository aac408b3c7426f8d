"""Checks of an unpacked archive before any replica of it starts, and its effective configuration."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from handlers import FOLDER_HANDLERS, HANDLERS, HandlerLoadError, extras, tasks
from handlers.distributed.degrees import check_divisible, degrees, layout
from handlers.loading import pickle_scan
from handlers.loading.loader import find_owner_file
from handlers.torchserve_compat import llm_config
from handlers.torchserve_compat.model_folder import find_local_folder
from handlers.torchserve_compat.names import REPLACED
from serve_app.domain.model import NAME, VERSION
from serve_app.domain.validation import did_you_mean
from serve_app.errors import ConfigurationError
from serve_app.model_store.archive import (
    CONFIG,
    HUGGING_FACE,
    MLFLOW,
    SCRIPT_HANDLERS,
    SCRIPT_MODE,
    SCRIPTS,
    Archive,
    ModelConfig,
    find_inside,
    find_syntax_error,
    handler_module,
    has_scripts,
)

log = logging.getLogger(__name__)

_SHARDED_HANDLERS = ("causal_lm", "llm")  # built-in handlers that are sharded by configuration alone
_LANGUAGE_MODEL_HANDLERS = ("vllm_handler", "trt_llm_handler")
_LANGUAGE_MODEL_BASES = {f"ts.torch_handler.{name}": name for name in _LANGUAGE_MODEL_HANDLERS}
_SHARDED_BASES = {
    "ts.handler_utils.distributed.deepspeed",
    "ts.handler_utils.distributed.pt_pippy",
    "ts.torch_handler.distributed.base_deepspeed_handler",
    "ts.torch_handler.distributed.base_pippy_handler",
    "mii",
}
_OWN_KEYS = {"tp": "tensor_parallel", "pp": "pipeline_parallel"}  # by TorchServe's parallelType


def check_model(archive: Archive, task: str | None = None, trusted: bool = False) -> ModelConfig:
    """Check everything that is known before a replica starts; return the effective configuration.

    ``task`` is that of the registration, which takes precedence over the configuration's. The returned
    configuration of a model folder has the task that was found. ``trusted`` replaces the configuration's:
    files of a model do not decide about their own trust. An untrusted model without a manifest runs no code
    of its own. TorchServe's configuration of large models is translated to ours.

    Names must fit into routes, named files must exist inside the model, its Python must compile, a built-in
    handler must exist. Raises InvalidArchive and ConfigurationError.
    """
    manifest = archive.manifest
    _check_names(archive)
    for file_name in (
        manifest.serialized_file,
        manifest.model_file,
        manifest.requirements_file,
        manifest.config_file,
    ):
        if file_name is not None:
            archive.find(file_name)
    config = _with_trust(archive, trusted)
    task = task or config.task
    for sample in config.samples or ():
        archive.find(sample)
    own_handler = archive.handler_file
    if own_handler is not None and not (manifest.is_code or trusted):
        if handler_module(manifest.handler) not in HANDLERS:
            remedy = "register it with trusted=true, name it in store.trusted, or archive it with a manifest"
            problem = f"{own_handler.name} is code of a model without a manifest"
            raise archive.error(f"{problem}, which is not run; {remedy}")
        own_handler = None  # the built-in handler of that name
    _check_handler(archive, own_handler, manifest.is_code or trusted)
    built_in = handler_module(manifest.handler) if own_handler is None else ""
    # To a handler of its own, the model file may be any file, such as the weights.
    if manifest.model_file is not None and (own_handler is None or manifest.model_file.endswith(".py")):
        _check_compiles(archive, archive.directory / manifest.model_file)
    if built_in == HUGGING_FACE:
        task = _task(archive, task, config)
    config = _translate_large_model(archive, config, own_handler, built_in)
    _check_weights(archive, built_in, config.trusted is True)
    if built_in in (MLFLOW, *SCRIPT_HANDLERS) and not (manifest.is_code or trusted):
        remedy = "register it with trusted=true, or name it in store.trusted"
        raise archive.error(f"the handler {built_in} runs code of the model's directory; {remedy}")
    return config if task == config.task else replace(config, task=task, raw={**config.raw, "task": task})


def _check_names(archive: Archive) -> None:
    manifest = archive.manifest
    for what, name, valid in (
        ("model name", manifest.model_name, NAME),
        ("version", manifest.version, VERSION),
    ):
        if not valid.fullmatch(name):
            signs = "'_', '-' and '.'" if valid is NAME else "'_', '-', '+' and '.'"
            remedy = f"use letters, digits, {signs}, and begin with a letter, a digit or '_'"
            raise archive.error(f"the {what} {name!r} cannot be part of a route; {remedy}")
    if manifest.runtime not in ("python", "python3"):
        remedy = "archive the model with --runtime python"
        raise archive.error(f"the runtime {manifest.runtime!r} is not served; {remedy}")


def _with_trust(archive: Archive, trusted: bool) -> ModelConfig:
    """Return the configuration with the trust of the registration or the settings."""
    config = archive.config
    if config.trusted and not trusted:
        log.warning(
            "%s: trusted is ignored: it counts in the registration or in store.trusted", archive.config_place
        )
    raw = {key: value for key, value in config.raw.items() if key != "trusted"}
    return replace(config, trusted=trusted or None, raw={**raw, "trusted": True} if trusted else raw)


def _check_handler(archive: Archive, file: Path | None, runs_code: bool) -> None:
    manifest = archive.manifest
    if not manifest.handler:
        raise archive.error(_explain_missing_handler(archive.directory))
    if file is not None:
        return _check_compiles(archive, file)
    if runs_code and (owner_file := find_owner_file(manifest.handler.partition(":")[0])) is not None:
        return _check_compiles(archive, owner_file)
    module, function = handler_module(manifest.handler), manifest.handler.partition(":")[2]
    if module in HANDLERS and function in ("", "handle"):
        return
    package = module.partition(".")[0]
    is_available = manifest.requirements_file is not None or _importable(
        package, archive.directory, runs_code
    )
    if ("." in module or function) and package.isidentifier() and is_available:
        return  # only the model's own process may import it
    near = did_you_mean(module, list(HANDLERS))
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(HANDLERS)}"
    missing = f"the handler {manifest.handler!r} is neither a file of the archive nor built in"
    raise archive.error(f"{missing}; put it into the archive, or name a built-in one: {hint}")


def _explain_missing_handler(directory: Path) -> str:
    """Return what a directory without a handler is, and how it can be served."""
    if next(directory.glob("*/data.pkl"), None) is not None:  # a zip, as archives are
        return (
            "is a file of torch.save, and no archive; make one with "
            "`torchrelay archive --serialized-file`, or with --model-file, too, for a state dict"
        )
    if has_scripts(directory / SCRIPTS):
        remedy = f"register it with the handler {SCRIPT_MODE} and trusted=true"
        return f"names no handler, and has a script in {SCRIPTS}/; {remedy}"
    if (directory / "config.pbtxt").is_file():
        return "is a model of Triton; make an archive of its ONNX or TorchScript file by `torchrelay archive`"
    return (
        "names no handler; name one when registering, or set default_service_handler; "
        "a Hugging Face folder has a config.json"
    )


def _check_weights(archive: Archive, built_in: str, trusted: bool) -> None:
    """Check that a built-in handler can read the weights; an archive's own handler is not checked."""
    manifest = archive.manifest
    if manifest.serialized_file is None or built_in not in HANDLERS.keys() - FOLDER_HANDLERS:
        return
    is_onnx = manifest.serialized_file.endswith(".onnx")
    if is_onnx and manifest.requirements_file is None and not extras.is_installed("onnxruntime"):
        reason = f"{manifest.serialized_file} needs onnxruntime, which is not installed"
        raise archive.error(f"{reason}; {extras.install_command('onnxruntime')}")
    rejection = pickle_scan.find_rejection_reason(
        archive.directory / manifest.serialized_file, manifest.model_file is not None, trusted
    )
    # torch.serialization.add_safe_globals in the model's own code may let in what its weights name.
    if rejection is not None and not any(
        b"safe_globals" in file.read_bytes() for file in archive.directory.glob("*.py")
    ):
        raise archive.error(f"{manifest.serialized_file}: {rejection}")


def _task(archive: Archive, requested: str | None, config: ModelConfig) -> str:
    try:
        return tasks.select_task(archive.directory, requested, config.trusted is True)
    except HandlerLoadError as error:
        raise archive.error(str(error)) from None


def _importable(package: str, directory: Path, runs_code: bool) -> bool:
    """Return whether the model has such a package and may import it, or it is installed."""
    return (runs_code and (directory / package).is_dir()) or importlib.util.find_spec(package) is not None


def _check_compiles(archive: Archive, file: Path) -> None:
    hint = f" (read with Python {sys.version_info.major}.{sys.version_info.minor})"
    if problem := find_syntax_error(file, hint):
        raise archive.error(f"{file.name}{problem}; mend the file")


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


# TorchServe's configuration of large models


def _translate_large_model(
    archive: Archive, config: ModelConfig, own_handler: Path | None, built_in: str
) -> ModelConfig:
    """Return the configuration in our keys, checked against the model's sizes.

    An archive is recognized by its handler: a built-in one, or a file that imports a base of TorchServe's.
    Raises InvalidArchive and ConfigurationError.
    """
    where, base = archive.manifest.config_file or CONFIG, built_in
    if own_handler is not None:
        config, base = _translate_own_handler(archive, config, own_handler)
    if base in _LANGUAGE_MODEL_HANDLERS:
        config, folder = _translate_language_model(archive, config, base)
        _check_parallelism(folder, config, where)
    elif built_in in _SHARDED_HANDLERS:
        config = _translate_parallelism(config)
        _check_parallelism(archive.directory, config, where)
    return config


def _translate_own_handler(archive: Archive, config: ModelConfig, file: Path) -> tuple[ModelConfig, str]:
    """Return the configuration of an archive with a handler of its own, and that handler's built-in base.

    The base is one of ``_LANGUAGE_MODEL_HANDLERS``, or empty. A base of sharded models starts the ranks that
    TorchServe's keys request. Raises InvalidArchive.
    """
    modules = _imported_modules(file)
    for package in sorted(REPLACED.keys() & {module.partition(".")[0] for module in modules}):
        log.warning("%s: %s imports %s. %s", archive.name, file.name, package, REPLACED[package])
    if modules & _SHARDED_BASES:
        section = config.raw.get("deepspeed")
        name = section.get("config") if isinstance(section, dict) else None
        if name is not None and find_inside(file.parent, str(name)) is None:
            raise archive.error(f"deepspeed: config: {name} is not in the archive; add it with --extra-files")
        return _translate_parallelism(config), ""
    bases = sorted(_LANGUAGE_MODEL_BASES[module] for module in modules & _LANGUAGE_MODEL_BASES.keys())
    return config, next(iter(bases), "")


def _translate_language_model(
    archive: Archive, config: ModelConfig, handler: str
) -> tuple[ModelConfig, Path]:
    """Return the configuration of ``llm`` for TorchServe's ``handler``, and the model's folder.

    Without a local folder, it is the archive's own. Raises ConfigurationError for a key that cannot be
    translated, with its replacement.
    """
    directory, where = archive.directory, archive.manifest.config_file or CONFIG
    try:
        translated = llm_config.translate(handler, config.raw, directory, _has_vllm(archive, config))
    except HandlerLoadError as error:
        raise ConfigurationError(where, str(error).removeprefix("model-config.yaml: ")) from None
    for warning in translated.warnings:
        log.warning("%s: %s", archive.config_place, warning)
    made = translated.config
    folder = find_local_folder(directory, translated.model_path)
    replaced: dict[str, Any] = {key: made.get(key) for key in ("num_gpus", "tensor_parallel")}
    return replace(config, raw=made, parallel_type=None, torchrun=None, **replaced), folder or directory


def _translate_parallelism(config: ModelConfig) -> ModelConfig:
    """Translate TorchServe's ``parallelType: tp`` or ``pp`` to own keys.

    The number is ``parallelLevel``, or torchrun's ``nproc-per-node``. The file's own ``tensor_parallel`` and
    ``pipeline_parallel`` take precedence.
    """
    key = _OWN_KEYS.get(config.parallel_type or "")
    level = config.parallel_level or (config.torchrun or {}).get("nproc-per-node")
    if key is None or type(level) is not int or config.tensor_parallel or config.pipeline_parallel:
        return config
    translated: dict[str, Any] = {key: level, "raw": {**config.raw, key: level}}
    return replace(config, **translated)


def _has_vllm(archive: Archive, config: ModelConfig) -> bool:
    """Return whether the engine is vLLM: the file names it, it is installed, or the archive installs it."""
    engine = config.raw.get("engine")
    if isinstance(engine, dict) and "name" in engine:
        return engine["name"] == "vllm"
    if extras.is_installed("vllm"):
        return True
    requirements = archive.manifest.requirements_file
    if requirements is None or not config.use_venv:
        return False
    text = (archive.directory / requirements).read_text(errors="replace")
    return re.search(r"^\s*vllm\b", text, re.MULTILINE | re.IGNORECASE) is not None


def _imported_modules(file: Path) -> set[str]:
    """Return the names of the modules that ``file`` imports."""
    modules: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the author's code are not reported
        tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules
