"""Translation of TorchServe's configuration of large models, before a replica starts.

An archive is recognized by its handler: a built-in one of TorchServe, or a file that imports a base of one.
"""

from __future__ import annotations

import ast
import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from handlers import HandlerLoadError, extras
from handlers.torchserve_compat import llm_config
from handlers.torchserve_compat.model_folder import find_local_folder
from handlers.torchserve_compat.names import REPLACED
from serve_app.errors import ConfigurationError, InvalidArchive
from serve_app.model_store.manifest import CONFIG, Manifest, find_inside
from serve_app.model_store.model_config import ModelConfig

log = logging.getLogger(__name__)

LANGUAGE_MODEL_HANDLERS = ("vllm_handler", "trt_llm_handler")
_LANGUAGE_MODEL_BASES = {f"ts.torch_handler.{name}": name for name in LANGUAGE_MODEL_HANDLERS}
_SHARDED_BASES = {
    "ts.handler_utils.distributed.deepspeed",
    "ts.handler_utils.distributed.pt_pippy",
    "ts.torch_handler.distributed.base_deepspeed_handler",
    "ts.torch_handler.distributed.base_pippy_handler",
    "mii",
}
_OWN_KEYS = {"tp": "tensor_parallel", "pp": "pipeline_parallel"}  # by TorchServe's parallelType


def translate_own_handler(config: ModelConfig, file: Path, manifest: Manifest) -> tuple[ModelConfig, str]:
    """Return the configuration of an archive with a handler of its own, and that handler's built-in base.

    The base is one of ``LANGUAGE_MODEL_HANDLERS``, or empty. A base of sharded models starts the ranks that
    TorchServe's keys request. Raises InvalidArchive.
    """
    modules = _imported_modules(file)
    for package in sorted(REPLACED.keys() & {module.partition(".")[0] for module in modules}):
        log.warning("%s: %s imports %s. %s", manifest.archive, file.name, package, REPLACED[package])
    if modules & _SHARDED_BASES:
        section = config.raw.get("deepspeed")
        name = section.get("config") if isinstance(section, dict) else None
        if name is not None and find_inside(file.parent, str(name)) is None:
            raise InvalidArchive(
                manifest.archive,
                f"deepspeed: config: {name} is not in the archive; add it with --extra-files",
            )
        return translate_parallelism(config), ""
    bases = sorted(_LANGUAGE_MODEL_BASES[module] for module in modules & _LANGUAGE_MODEL_BASES.keys())
    return config, next(iter(bases), "")


def translate_language_model(
    config: ModelConfig, handler: str, directory: Path, manifest: Manifest
) -> tuple[ModelConfig, Path]:
    """Return the configuration of ``llm`` for TorchServe's ``handler``, and the model's folder.

    Without a local folder, it is the archive's own. Raises ConfigurationError for a key that cannot be
    translated, with its replacement.
    """
    where = manifest.config_file or CONFIG
    try:
        translated = llm_config.translate(
            handler, config.raw, directory, _has_vllm(config, directory, manifest)
        )
    except HandlerLoadError as error:
        raise ConfigurationError(where, str(error).removeprefix("model-config.yaml: ")) from None
    for warning in translated.warnings:
        log.warning("%s/%s: %s", manifest.archive, where, warning)
    made = translated.config
    folder = find_local_folder(directory, translated.model_path)
    replaced: dict[str, Any] = {key: made.get(key) for key in ("num_gpus", "tensor_parallel")}
    return replace(config, raw=made, parallel_type=None, torchrun=None, **replaced), folder or directory


def translate_parallelism(config: ModelConfig) -> ModelConfig:
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


def _has_vllm(config: ModelConfig, directory: Path, manifest: Manifest) -> bool:
    """Return whether the engine is vLLM: the file names it, it is installed, or the archive installs it."""
    engine = config.raw.get("engine")
    if isinstance(engine, dict) and "name" in engine:
        return engine["name"] == "vllm"
    if extras.is_installed("vllm"):
        return True
    if manifest.requirements_file is None or not config.use_venv:
        return False
    text = (directory / manifest.requirements_file).read_text(errors="replace")
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
