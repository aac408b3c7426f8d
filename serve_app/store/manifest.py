"""What an archive says of its model: ``MAR-INF/MANIFEST.json`` and ``model-config.yaml``, read and checked."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from serve_app import autoscaling, documents, signature
from serve_app.autoscaling import Autoscaling
from serve_app.documents import near_miss
from serve_app.errors import BadRequest, ConfigurationError, InvalidArchive
from serve_app.signature import Signature
from serve_app.store import ranks
from serve_app.telemetry.logs import LEVELS

MANIFEST = "MAR-INF/MANIFEST.json"
CONFIG = "model-config.yaml"
HUGGING_FACE = "huggingface"  # the handler of a model folder

log = logging.getLogger("torchrelay.manifest")


@dataclass(frozen=True)
class Manifest:
    """An archive's manifest; None where it names no such file."""

    archive: str  # the archive's file name, for messages
    model_name: str
    version: str = "1.0"
    handler: str = ""  # a built-in name, or file[.py][:function]
    runtime: str = "python"
    serialized_file: str | None = None
    model_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    extensions: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)  # as handlers see it

    @classmethod
    def read(cls, directory: Path, archive: str, default_handler: str = "") -> Manifest:
        """The manifest of an unpacked model. Older ones, and none at all, are taken with TorchServe's defaults.

        A Hugging Face model folder needs none: its handler is ``huggingface``.
        ``archive`` is the archive's file name: its stem names a model that does not name itself.
        """
        name = stem(archive)
        try:
            text = (directory / MANIFEST).read_bytes()
        except FileNotFoundError:
            config = CONFIG if (directory / CONFIG).is_file() else None
            if is_folder(directory) or (not default_handler and (directory / "config.json").is_file()):
                default_handler = HUGGING_FACE  # which says what is lacking, if anything is
            return cls(archive, name, handler=default_handler, config_file=config)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArchive(archive, f"{MANIFEST} is not JSON ({error}); {_REBUILD}") from None
        model = raw.get("model") if isinstance(raw, dict) else None
        if not isinstance(model, dict):
            raise InvalidArchive(archive, f'{MANIFEST} has no object "model"; {_REBUILD}')

        def word(key: str, where: Mapping[str, Any] = model) -> str | None:
            value = where.get(key)
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                return str(value) or None
            if value is None:
                return None
            raise InvalidArchive(archive, f'{MANIFEST}: "{key}" is {value!r} and must be text; {_REBUILD}')

        extensions = model.get("extensions") or ()
        return cls(
            archive=archive,
            model_name=word("modelName") or name,
            version=word("modelVersion") or "1.0",
            handler=word("handler") or default_handler,
            runtime=word("runtime", raw) or "python",
            serialized_file=word("serializedFile"),
            model_file=word("modelFile"),
            requirements_file=word("requirementsFile"),
            config_file=word("configFile"),
            extensions=tuple(extensions.split(",") if isinstance(extensions, str) else map(str, extensions)),
            raw=raw,
        )


class _Type(NamedTuple):
    """What a key's value must be: in words, and read (ValueError where it is not)."""

    wants: str
    read: Callable[[Any], Any]


def _type(wants: str, accepts: Callable[[Any], bool], make: Callable[[Any], Any] = lambda value: value) -> _Type:
    def read(value: Any) -> Any:
        if not accepts(value):
            raise ValueError
        return make(value)

    return _Type(wants, read)


def _whole(low: int) -> _Type:
    return _type(f"a whole number from {low}", lambda value: type(value) is int and value >= low)


def _words(*allowed: str) -> _Type:
    return _type(" or ".join(map(repr, allowed)), lambda value: isinstance(value, str) and value in allowed)


def _list(wants: str, of: type) -> _Type:
    return _type(wants, lambda value: type(value) is list and all(type(item) is of for item in value), tuple)


def _autoscaling(value: Any) -> Autoscaling:
    try:
        return autoscaling.read(value)
    except BadRequest as error:
        raise ValueError(str(error)) from None


def _signature(value: Any) -> Signature:
    try:
        return signature.read(value)
    except BadRequest as error:
        raise ValueError(str(error)) from None


def _profile(value: Any) -> int:
    from handlers import profiling  # late: reading a manifest needs no handler

    return profiling.batches(value)


_AT_LEAST_ONE = _type("a whole number", lambda value: type(value) is int, lambda value: max(1, value))
_THREADS = _type("a whole number from 1, or auto", lambda v: v == "auto" or (type(v) is int and v >= 1))
_FLAG = _type("true or false", lambda value: type(value) is bool)
_MAPPING = _type("a mapping", lambda value: isinstance(value, dict))
_AMOUNT = _type("a number from 0", lambda v: type(v) in (int, float) and v >= 0 and math.isfinite(v), float)


def _theirs(key: str, type_: _Type) -> Any:
    """TorchServe's key: a wrong value is ignored with a warning, as there."""
    return field(default=None, metadata={"key": key, "type": type_})


def _ours(type_: _Type, key: str = "") -> Any:
    """Our key, named as the field unless it stands beside its like of TorchServe's: a wrong value is refused."""
    return field(default=None, metadata={"type": type_, "ours": True, **({"key": key} if key else {})})


@dataclass(frozen=True)
class ModelConfig:
    """``model-config.yaml``: every key that the server reads, None where absent; ``raw`` is the handler's, whole.

    Times are in seconds where the key says nothing else; ``max_batch_delay``, ``client_timeout``
    and the sequence times are in milliseconds.
    """

    min_workers: int | None = _theirs("minWorkers", _AT_LEAST_ONE)
    max_workers: int | None = _theirs("maxWorkers", _whole(1))
    batch_size: int | None = _theirs("batchSize", _AT_LEAST_ONE)
    max_batch_delay: int | None = _theirs("maxBatchDelay", _whole(1))
    response_timeout: int | None = _theirs("responseTimeout", _whole(1))
    startup_timeout: int | None = _theirs("startupTimeout", _whole(1))
    device_type: Literal["cpu", "gpu"] | None = _theirs("deviceType", _words("cpu", "gpu"))
    device_ids: tuple[int, ...] | None = _theirs("deviceIds", _list("a list of whole numbers", int))
    parallel_type: str | None = _theirs("parallelType", _words("pp", "tp", "pptp", "custom"))
    parallel_level: int | None = _theirs("parallelLevel", _whole(1))
    torchrun: Mapping[str, Any] | None = _theirs("torchrun", _MAPPING)
    max_retry_timeout: int | None = _theirs("maxRetryTimeoutInSec", _whole(1))
    client_timeout: int | None = _theirs("clientTimeoutInMills", _whole(0))
    job_queue_size: int | None = _theirs("jobQueueSize", _whole(1))
    use_job_ticket: bool | None = _theirs("useJobTicket", _FLAG)
    sequence_max_idle: int | None = _theirs("sequenceMaxIdleMSec", _whole(0))
    sequence_timeout: int | None = _theirs("sequenceTimeoutMSec", _whole(0))
    max_num_sequence: int | None = _theirs("maxNumSequence", _whole(1))
    max_sequence_job_queue_size: int | None = _theirs("maxSequenceJobQueueSize", _whole(1))
    continuous_batching: bool | None = _theirs("continuousBatching", _FLAG)
    sequence_batching: bool | None = _theirs("sequenceBatching", _FLAG)
    async_communication: bool | None = _theirs("asyncCommunication", _FLAG)
    use_venv: bool | None = _theirs("useVenv", _FLAG)

    batcher: Literal["torchrelay", "ray"] | None = _ours(_words("torchrelay", "ray"))
    num_cpus: float | None = _ours(_AMOUNT)
    num_gpus: float | None = _ours(_AMOUNT)
    tensor_parallel: int | None = _ours(_whole(1))
    pipeline_parallel: int | None = _ours(_whole(1))
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] | None = _ours(
        _words("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")
    )
    retries: bool | None = _ours(_FLAG)
    bucket_by_length: bool | None = _ours(_FLAG)
    fast_path: Literal["torchserve", "oip"] | None = _ours(_words("torchserve", "oip"))
    max_ongoing_requests: int | None = _ours(_whole(0))
    max_concurrent_requests: int | None = _ours(_whole(0), "maxConcurrentRequests")
    samples: tuple[str, ...] | None = _ours(_list("a list of file names", str))
    trusted: bool | None = _ours(_FLAG)
    threads: int | Literal["auto"] | None = _ours(_THREADS)
    pin: bool | None = _ours(_FLAG)
    task: str | None = _ours(_type("a task's name", lambda value: isinstance(value, str) and bool(value)))
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = _ours(_words(*LEVELS))
    envelope: Literal["body", "json", "kserve", "kservev2"] | None = _ours(_words("body", "json", "kserve", "kservev2"))
    autoscaling: Autoscaling | None = _ours(_Type("a mapping", _autoscaling))
    tensors: bool | None = _ours(_FLAG)  # a row is {name: array}
    signature: Signature | None = _ours(_Type("a mapping of inputs and outputs", _signature))
    profile: int | None = _ours(_Type("true, false or a mapping", _profile))  # batches

    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        """Whether a replica of it lies in more processes than one."""
        return (self.tensor_parallel or 1) * (self.pipeline_parallel or 1) > 1

    @property
    def unserved(self) -> list[str]:
        """The keys that ask for something which is not served, as the file writes them."""
        asked = {
            "torchrun": self.torchrun is not None and not self.sharded,
            "parallelType": self.parallel_type not in (None, "custom") and not self.sharded,
            "deviceIds": self.device_ids is not None,
        }
        return [key for key, set_ in asked.items() if set_]

    @classmethod
    def read(cls, directory: Path, manifest: Manifest) -> ModelConfig:
        """The configuration that the manifest names, empty where it names none. Raises ConfigurationError."""
        if manifest.config_file is None:
            return cls()
        return cls.parse(_file(directory, manifest, manifest.config_file).read_bytes(), _where(manifest))

    @classmethod
    def parse(cls, text: str | bytes, where: str = CONFIG) -> ModelConfig:
        """The configuration in a YAML text; ``where`` names it in messages."""
        raw = _yaml(text, where)
        known = {f.metadata.get("key", f.name): f for f in fields(cls) if f.metadata}
        values = {}
        for key, value in raw.items():
            if key not in known:
                near = near_miss(key, [*known, *_HANDLERS_KEYS], cutoff=0.9) if isinstance(key, str) else None
                if near is not None and key not in _HANDLERS_KEYS:
                    raise ConfigurationError(where, f"unknown key {key!r}; did you mean {near!r}?")
                continue
            entry = known[key]
            wants, read = entry.metadata["type"]
            try:
                values[entry.name] = read(value)
            except ValueError as error:
                if "ours" in entry.metadata:
                    raise ConfigurationError(where, str(error) or f"{key}: {value!r} must be {wants}") from None
                log.warning("%s: %s: %r is ignored, it must be %s", where, key, value, wants)
        if values.get("tensors") and values.get("envelope"):
            raise ConfigurationError(where, "tensors and envelope: a model of tensors needs no envelope; take one off")
        return cls(**values, raw=raw)


# Known to handlers of TorchServe's, so a near miss of one of these is a mistake as well.
_HANDLERS_KEYS = (
    "handler",
    "pt2",
    "optimize",
    "accuracy",
    "explain",
    "micro_batching",
    "pippy",
    "deepspeed",
    "engine",
    "device_map",
    "max_memory",
    "offload_folder",
    "parameters",
)

_REBUILD = "rebuild the archive with torch-model-archiver"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def is_folder(directory: Path) -> bool:
    """Whether a Hugging Face model lies in this directory: its config.json, and weights."""
    from handlers import tasks  # late: reading a manifest needs no handler

    return directory.is_dir() and tasks.is_folder(path.name for path in directory.iterdir())


def check(directory: Path, manifest: Manifest, task: str | None = None) -> ModelConfig:
    """Everything that can be known before a replica starts is right; returns the configuration, read.

    ``task`` is what the registration asks for; it goes before the configuration's own. A model folder's is
    in what is returned, wherever it was found.

    Names fit into routes, files that are named exist inside the model, its Python compiles, a
    built-in handler exists. To check names given at a registration, put them into the manifest
    first (``dataclasses.replace``). Raises InvalidArchive and ConfigurationError.
    """
    for what, name in (("model name", manifest.model_name), ("version", manifest.version)):
        if not _NAME.fullmatch(name):
            cure = "use letters, digits, '_', '-' and '.', and begin with none of '-' and '.'"
            raise InvalidArchive(manifest.archive, f"the {what} {name!r} cannot be part of a route; {cure}")
    if manifest.runtime not in ("python", "python3"):
        cure = "archive the model with --runtime python"
        raise InvalidArchive(manifest.archive, f"the runtime {manifest.runtime!r} is not served; {cure}")
    for name in (manifest.serialized_file, manifest.model_file, manifest.requirements_file, manifest.config_file):
        if name is not None:
            _file(directory, manifest, name)
    config = ModelConfig.read(directory, manifest)
    task = task or config.task
    for sample in config.samples or ():
        _file(directory, manifest, sample)
    _check_handler(directory, manifest)
    if manifest.model_file is not None:
        _compiles(directory / manifest.model_file, manifest)
    if _module(manifest.handler) == HUGGING_FACE and handler_file(directory, manifest.handler) is None:
        task = _task(directory, manifest, task, config)
    if _module(manifest.handler) in ranks.HANDLERS and handler_file(directory, manifest.handler) is None:
        config = ranks.translated(config)
        ranks.check(directory, config, manifest.config_file or CONFIG)
    _check_weights(directory, manifest, config.trusted is True)
    return config if task == config.task else replace(config, task=task, raw={**config.raw, "task": task})


def handler_file(directory: Path, handler: str) -> Path | None:
    """The file of the model that ``handler`` names, if it is there: ``name`` or ``name.py``, each with ``:function``.

    Like TorchServe, a file of the model's wins over a built-in handler of the same name, and the
    last part of a path is enough, because archivers flatten folders.
    """
    path = PurePosixPath(_module(handler))
    inside = path.parts and not path.is_absolute() and ".." not in path.parts
    for place in (path, path.name) if inside else (path.name,):
        file = directory / f"{place}.py"
        if path.name and file.is_file():
            return file
    return None


def stem(archive: str) -> str:
    """A model's name from its archive's: ``digits`` from ``digits.mar`` or ``digits.tar.gz``."""
    return re.sub(r"\.(mar|zip|tar\.gz|tgz)$", "", archive, flags=re.IGNORECASE)


def _check_handler(directory: Path, manifest: Manifest) -> None:
    if not manifest.handler:
        cure = "name one when registering, or set default_service_handler; a Hugging Face folder has a config.json"
        raise InvalidArchive(manifest.archive, f"names no handler; {cure}")
    file = handler_file(directory, manifest.handler)
    if file is not None:
        return _compiles(file, manifest)
    from handlers import HANDLERS  # late: reading a manifest needs no handler

    module, function = _module(manifest.handler), manifest.handler.partition(":")[2]
    if module in HANDLERS and function in ("", "handle"):
        return
    package = module.partition(".")[0]
    there = manifest.requirements_file is not None or _importable(package, directory)
    if ("." in module or function) and package.isidentifier() and there:
        return  # only the model's own process may import it
    near = near_miss(module, list(HANDLERS))
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(HANDLERS)}"
    missing = f"the handler {manifest.handler!r} is neither a file of the archive nor built in"
    raise InvalidArchive(manifest.archive, f"{missing}; put it into the archive, or name a built-in one: {hint}")


def _check_weights(directory: Path, manifest: Manifest, trusted: bool) -> None:
    """The weights are what a built-in handler reads. How one of the archive's own loads, only loading tells."""
    from handlers import HANDLERS, OF_FOLDERS, pickles

    own = handler_file(directory, manifest.handler) is not None
    if own or manifest.serialized_file is None or _module(manifest.handler) not in HANDLERS.keys() - OF_FOLDERS:
        return
    why = pickles.refusal(directory / manifest.serialized_file, manifest.model_file is not None, trusted)
    # torch.serialization.add_safe_globals in the model's own code may let in what its weights name.
    if why is not None and not any(b"safe_globals" in file.read_bytes() for file in directory.glob("*.py")):
        raise InvalidArchive(manifest.archive, f"{manifest.serialized_file}: {why}")


def _task(directory: Path, manifest: Manifest, asked: str | None, config: ModelConfig) -> str:
    from handlers import HandlerLoadError, tasks

    try:
        return tasks.choose(directory, asked, config.trusted is True)
    except HandlerLoadError as error:
        raise InvalidArchive(manifest.archive, str(error)) from None


def _importable(package: str, directory: Path) -> bool:
    """Is there such a package in the model, or installed?"""
    return (directory / package).is_dir() or importlib.util.find_spec(package) is not None


def _module(handler: str) -> str:
    return handler.partition(":")[0].removesuffix(".py")


def _file(directory: Path, manifest: Manifest, name: str) -> Path:
    """The file ``name`` of the model; InvalidArchive where it is missing or lies outside."""
    home = directory.resolve()
    try:
        path = (home / name).resolve()
        if home in path.parents and path.exists():
            return path
    except (OSError, RuntimeError, ValueError):
        pass
    raise InvalidArchive(manifest.archive, f"{name!r} is named but not in the archive; add it, or mend its name")


def _compiles(file: Path, manifest: Manifest) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the author's style is not our business
            compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        raise InvalidArchive(
            manifest.archive, f"{file.name}, line {error.lineno}: {error.msg} (read with {python}); mend the file"
        ) from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidArchive(manifest.archive, f"{file.name} is not Python ({error}); mend the file") from None


def _where(manifest: Manifest) -> str:
    return f"{manifest.archive}/{manifest.config_file}"


def _yaml(text: str | bytes, where: str) -> dict[Any, Any]:
    try:
        return documents.from_yaml(text)
    except documents.Misread as error:
        raise ConfigurationError(where, str(error)) from None
