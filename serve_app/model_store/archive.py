"""The contents of an archive, read once: its manifest, its model-config.yaml and its files."""

from __future__ import annotations

import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import yaml

from handlers import endpoint_script, untrusted_files
from serve_app.domain import autoscaling, capture, recycling, response_cache, signature
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.model import AUTHORS_KEYS
from serve_app.domain.pool import is_pool_name
from serve_app.domain.recycling import Recycling
from serve_app.domain.response_cache import CachePolicy
from serve_app.domain.signature import Signature
from serve_app.domain.validation import did_you_mean
from serve_app.errors import BadRequest, ConfigurationError, InvalidArchive
from serve_app.telemetry.logs import LEVELS

log = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 1 << 20  # of a manifest, a configuration or a specification
MANIFEST = "MAR-INF/MANIFEST.json"
CONFIG = "model-config.yaml"
HUGGING_FACE = "huggingface"  # the handler of a model folder
SCRIPT_MODE = "sagemaker"  # the handler of a folder with a script in SCRIPTS
AZUREML, HF_ENDPOINT = "azureml", "hf_endpoint"  # the handlers of a folder that is a script's
SCRIPTS = "code"
# The folder in the model's, and the files of the script, by the handler that calls it.
SCRIPT_HANDLERS = {SCRIPT_MODE: (SCRIPTS, "*.py"), AZUREML: ("", "*.py"), HF_ENDPOINT: ("", "handler.py")}
MLFLOW, _MLMODEL = "mlflow", "MLmodel"  # the handler of MLflow's model directories, and their description
_REQUIREMENTS = "requirements.txt"  # of models of MLflow, and of scripts beside them
SECTION = "torchrelay"  # of a configuration, with our keys alone; they win

_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_REBUILD = "rebuild the archive with torchrelay archive"


@dataclass(frozen=True)  # without slots, for its cached property
class Archive:
    """An unpacked archive, or a model folder.

    Each document in it is read once: the manifest by ``read``, the configuration when it is first used. The
    last four fields are empty where the archive is not stored.
    """

    name: str  # its file name, for messages
    directory: Path
    manifest: Manifest
    digest: str = ""  # sha256 of the stored archive, in hex
    uri: str = ""  # of the stored archive, the same from every node
    size: int = 0  # bytes of the stored archive
    signed_by: str = ""  # fingerprint of the trusted key that signed it; empty: not verified

    @classmethod
    def read(cls, directory: Path, name: str, default_handler: str = "") -> Archive:
        """Return an unpacked archive, with TorchServe's defaults for an older or missing manifest.

        A Hugging Face model folder needs no manifest: its handler is ``huggingface``, unless the default one
        calls a script that is in the folder. That of MLflow's model directories is ``mlflow``. The stem of
        ``name`` is the default name of the model.
        Raises InvalidArchive.
        """
        try:
            text = read_document(directory / MANIFEST, name, MANIFEST)
        except FileNotFoundError:
            config = CONFIG if (directory / CONFIG).is_file() else None
            folder, files = SCRIPT_HANDLERS.get(default_handler, (SCRIPTS, ""))
            if default_handler == HF_ENDPOINT:
                files = endpoint_script.file_name()
            has_script = bool(files) and has_scripts(directory / folder, files)
            requirements = _find_requirements(directory, folder)
            if not has_script and default_handler in ("", *SCRIPT_HANDLERS) and is_mlflow_model(directory):
                default_handler = MLFLOW
                requirements = _find_requirements(directory)
            elif not has_script and (
                is_model_folder(directory) or (not default_handler and (directory / "config.json").is_file())
            ):
                default_handler = HUGGING_FACE  # its check reports missing files
            manifest = Manifest(
                archive_stem(name),
                handler=default_handler,
                requirements_file=requirements,
                config_file=config,
            )
        else:
            manifest = Manifest.parse(text, name, default_handler)
        return cls(name, directory, manifest)

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration that the manifest names, by default an empty one.

        Raises ConfigurationError, and InvalidArchive for a file that is missing or has more than 1 MiB.
        """
        file = self.manifest.config_file
        if file is None:
            return ModelConfig()
        return ModelConfig.parse(read_document(self.find(file), self.name, file), self.config_place)

    @property
    def config_place(self) -> str:
        """Return the name of the configuration in errors."""
        return f"{self.name}/{self.manifest.config_file or CONFIG}"

    @cached_property
    def handler_file(self) -> Path | None:
        """The archive's file for its handler (``name`` or ``name.py``, each with ``:function``), or None.

        As in TorchServe, a file of the archive takes precedence over a built-in handler of the same name, and
        the last part of a path is enough, because archivers flatten folders.
        """
        path = PurePosixPath(handler_module(self.manifest.handler))
        inside = path.parts and not path.is_absolute() and ".." not in path.parts
        for candidate in (path, path.name) if inside else (path.name,):
            file = self.directory / f"{candidate}.py"
            if path.name and file.is_file():
                return file
        return None

    def find(self, name: str) -> Path:
        """Return the path of its file ``name``. Raises InvalidArchive where it is missing or outside."""
        path = find_inside(self.directory, name)
        if path is None:
            raise self.error(f"{name!r} is named but not in the archive; add it, or correct its name")
        return path

    def error(self, problem: str) -> InvalidArchive:
        """Return the error of an archive with a problem."""
        return InvalidArchive(self.name, problem)

    def with_names(
        self, model_name: str | None = None, version: str | None = None, handler: str | None = None
    ) -> Archive:
        """Return the archive with the names of a registration in place of its manifest's; None keeps one."""
        manifest = replace(
            self.manifest,
            model_name=model_name or self.manifest.model_name,
            version=version or self.manifest.version,
            handler=handler or self.manifest.handler,
        )
        return replace(self, manifest=manifest)


@dataclass(frozen=True)
class Manifest:
    """The contents of ``MAR-INF/MANIFEST.json``; None where it names no such file."""

    model_name: str
    version: str = "1.0"
    handler: str = ""  # a built-in name, or file[.py][:function]
    runtime: str = "python"
    serialized_file: str | None = None
    model_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    extensions: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)  # the whole document; empty where there is no file

    @property
    def is_code(self) -> bool:
        """Return whether the model is an archive, which is code, and not files without a manifest."""
        return bool(self.raw)

    @classmethod
    def parse(cls, text: bytes, archive: str, default_handler: str = "") -> Manifest:
        """Return the manifest in a JSON text; ``archive`` is the archive's file name.

        Raises InvalidArchive.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArchive(archive, f"{MANIFEST} is not JSON ({error}); {_REBUILD}") from None
        model = raw.get("model") if isinstance(raw, dict) else None
        if not isinstance(model, dict):
            raise InvalidArchive(archive, f'{MANIFEST} has no object "model"; {_REBUILD}')

        def text_of(key: str, where: Mapping[str, Any] = model) -> str | None:
            value = where.get(key)
            if isinstance(value, (str, int, float)) and not isinstance(value, bool):
                return str(value) or None
            if value is None:
                return None
            raise InvalidArchive(archive, f'{MANIFEST}: "{key}" is {value!r} and must be text; {_REBUILD}')

        extensions = model.get("extensions") or ()
        return cls(
            model_name=text_of("modelName") or archive_stem(archive),
            version=text_of("modelVersion") or "1.0",
            handler=text_of("handler") or default_handler,
            runtime=text_of("runtime", raw) or "python",
            serialized_file=text_of("serializedFile"),
            model_file=text_of("modelFile"),
            requirements_file=text_of("requirementsFile"),
            config_file=text_of("configFile"),
            extensions=tuple(extensions.split(",") if isinstance(extensions, str) else map(str, extensions)),
            raw=raw,
        )


def archive_stem(archive: str) -> str:
    """Return a model's name from its archive's: ``digits`` from ``digits.mar`` or ``digits.tar.gz``."""
    return re.sub(r"\.(mar|zip|tar\.gz|tgz)$", "", archive, flags=re.IGNORECASE)


def handler_module(handler: str) -> str:
    return handler.partition(":")[0].removesuffix(".py")


# Files


def read_document(path: Path, archive: str, name: str) -> bytes:
    """Return the contents of an archive's file ``name`` that is to be parsed.

    Raises FileNotFoundError, and InvalidArchive where it is larger than 1 MiB or cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidArchive(archive, f"{name} cannot be read ({error.strerror}); {_REBUILD}") from None
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidArchive(
            archive, f"{name} is larger than {MAX_DOCUMENT_BYTES} bytes; keep data in files of their own"
        )
    return text


def find_inside(directory: Path, name: str) -> Path | None:
    """Return the existing path ``name`` below ``directory``; None where it is missing or outside."""
    home = directory.resolve()
    try:
        path = (home / name).resolve()
        return path if home in path.parents and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL, a name too long
        return None


def find_syntax_error(file: Path, hint: str = "") -> str:
    """Return why ``file`` is not Python, as the text after its name; empty where it compiles.

    ``hint`` is added to a syntax error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the author's code are not reported
            compile(file.read_bytes(), file.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f", line {error.lineno}: {error.msg}{hint}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f" is not Python ({error})"
    return ""


def is_mlflow_model(directory: Path) -> bool:
    """Return whether this directory is a model of MLflow."""
    return (directory / _MLMODEL).is_file()


def is_model_folder(directory: Path) -> bool:
    """Return whether this directory is a Hugging Face model: config.json and weights."""
    from handlers import tasks  # late: reading a manifest needs no handler

    return directory.is_dir() and tasks.is_model_folder(path.name for path in directory.iterdir())


def _find_requirements(directory: Path, folder: str = "") -> str | None:
    """Return the name of the requirements file in a folder of the model's; None where there is none."""
    name = str(PurePosixPath(folder) / _REQUIREMENTS)
    return name if (directory / name).is_file() else None


def has_scripts(folder: Path, pattern: str = "*.py") -> bool:
    """Return whether a folder has Python files, and is no archive itself."""
    return any(folder.glob(pattern)) and not (folder / MANIFEST).is_file()


def find_adapter_folder(directory: Path, source: str) -> Path:
    """Return the folder with a LoRA adapter's files: ``directory``, or the only folder in it.

    Raises InvalidArchive for ``source`` where files are missing.
    """
    folders = [directory, *(path for path in directory.iterdir() if path.is_dir() and path.name[0] != ".")]
    found = next((path for path in folders[:2] if (path / _ADAPTER_CONFIG).is_file()), None)
    if found is None or (len(folders) > 2 and found is not directory):
        raise InvalidArchive(
            source, f"there is no {_ADAPTER_CONFIG}: archive the folder that peft's save_pretrained writes"
        )
    if not (found / _ADAPTER_WEIGHTS).is_file():
        raise InvalidArchive(
            source, f"there is no {_ADAPTER_WEIGHTS}; pickled weights (adapter_model.bin) are not read"
        )
    return found


# The configuration, model-config.yaml


class _KeyType(NamedTuple):
    """The type of a key: its description, and a parser that raises ValueError or BadRequest."""

    description: str
    parse: Callable[[Any], Any]


def _type(
    description: str, accepts: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda value: value
) -> _KeyType:
    def parse(value: Any) -> Any:
        if not accepts(value):
            raise ValueError
        return convert(value)

    return _KeyType(description, parse)


def _integer(low: int) -> _KeyType:
    return _type(f"a whole number from {low}", lambda value: type(value) is int and value >= low)


def _one_of(*allowed: str) -> _KeyType:
    return _type(" or ".join(map(repr, allowed)), lambda value: isinstance(value, str) and value in allowed)


def _list(description: str, item_type: type) -> _KeyType:
    def accepts(value: Any) -> bool:
        return type(value) is list and all(type(item) is item_type for item in value)

    return _type(description, accepts, tuple)


def _profile(value: Any) -> int:
    from handlers import profiling  # late: reading a manifest needs no handler

    return profiling.parse_batch_count(value)


_CLAMPED_INTEGER = _type("a whole number", lambda value: type(value) is int, lambda value: max(1, value))
_THREADS = _type("a whole number from 1, or auto", lambda v: v == "auto" or (type(v) is int and v >= 1))
_POOL = _type("a pool's name", lambda value: isinstance(value, str) and (not value or is_pool_name(value)))
_FLAG = _type("true or false", lambda value: type(value) is bool)
_MAPPING = _type("a mapping", lambda value: isinstance(value, dict))
_NON_NEGATIVE = _type(
    "a number from 0", lambda v: type(v) in (int, float) and v >= 0 and math.isfinite(v), float
)


def _torchserve_key(key: str, type_: _KeyType) -> Any:
    """Declare a key of TorchServe: an invalid value is ignored with a warning, as by TorchServe."""
    return field(default=None, metadata={"key": key, "type": type_})


def _own_key(type_: _KeyType, key: str = "") -> Any:
    """Declare a key of Torchrelay, by default named as the field.

    An invalid value is refused in the section ``torchrelay``; elsewhere it may be the author's own key.
    """
    return field(default=None, metadata={"type": type_, "ours": True, **({"key": key} if key else {})})


@dataclass(frozen=True)
class ModelConfig:
    """The contents of ``model-config.yaml``: the keys that the server reads, None where absent.

    ``raw`` is the whole document; those of its section ``torchrelay`` replace other values. The values of an
    author's own under our keys are in ``raw`` under AUTHORS_KEYS, for the handler. Times are in seconds by
    default; ``max_batch_delay``, ``client_timeout`` and the sequence times are in milliseconds.
    """

    min_workers: int | None = _torchserve_key("minWorkers", _CLAMPED_INTEGER)
    max_workers: int | None = _torchserve_key("maxWorkers", _integer(1))
    batch_size: int | None = _torchserve_key("batchSize", _CLAMPED_INTEGER)
    max_batch_delay: int | None = _torchserve_key("maxBatchDelay", _integer(1))
    response_timeout: int | None = _torchserve_key("responseTimeout", _integer(1))
    startup_timeout: int | None = _torchserve_key("startupTimeout", _integer(1))
    device_type: Literal["cpu", "gpu"] | None = _torchserve_key("deviceType", _one_of("cpu", "gpu"))
    device_ids: tuple[int, ...] | None = _torchserve_key("deviceIds", _list("a list of whole numbers", int))
    parallel_type: str | None = _torchserve_key("parallelType", _one_of("pp", "tp", "pptp", "custom"))
    parallel_level: int | None = _torchserve_key("parallelLevel", _integer(1))
    torchrun: Mapping[str, Any] | None = _torchserve_key("torchrun", _MAPPING)
    max_retry_timeout: int | None = _torchserve_key("maxRetryTimeoutInSec", _integer(1))
    client_timeout: int | None = _torchserve_key("clientTimeoutInMills", _integer(0))
    job_queue_size: int | None = _torchserve_key("jobQueueSize", _integer(1))
    use_job_ticket: bool | None = _torchserve_key("useJobTicket", _FLAG)
    sequence_max_idle: int | None = _torchserve_key("sequenceMaxIdleMSec", _integer(0))
    sequence_timeout: int | None = _torchserve_key("sequenceTimeoutMSec", _integer(0))
    max_num_sequence: int | None = _torchserve_key("maxNumSequence", _integer(1))
    max_sequence_job_queue_size: int | None = _torchserve_key("maxSequenceJobQueueSize", _integer(1))
    continuous_batching: bool | None = _torchserve_key("continuousBatching", _FLAG)
    sequence_batching: bool | None = _torchserve_key("sequenceBatching", _FLAG)
    async_communication: bool | None = _torchserve_key("asyncCommunication", _FLAG)
    use_venv: bool | None = _torchserve_key("useVenv", _FLAG)

    batcher: Literal["torchrelay", "ray"] | None = _own_key(_one_of("torchrelay", "ray"))
    num_cpus: float | None = _own_key(_NON_NEGATIVE)
    num_gpus: float | None = _own_key(_NON_NEGATIVE)
    tensor_parallel: int | None = _own_key(_integer(1))
    pipeline_parallel: int | None = _own_key(_integer(1))
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] | None = _own_key(
        _one_of("STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD")
    )
    retries: bool | None = _own_key(_FLAG)
    bucket_by_length: bool | None = _own_key(_FLAG)
    fast_path: Literal["torchserve", "oip"] | None = _own_key(_one_of("torchserve", "oip"))
    routing: Literal["load", "prefix"] | None = _own_key(_one_of("load", "prefix"))
    pool: str | None = _own_key(_POOL)
    pin_loaded: bool | None = _own_key(_FLAG)
    max_ongoing_requests: int | None = _own_key(_integer(0))
    max_concurrent_requests: int | None = _own_key(_integer(0), "maxConcurrentRequests")
    samples: tuple[str, ...] | None = _own_key(_list("a list of file names", str))
    trusted: bool | None = _own_key(_FLAG)
    threads: int | Literal["auto"] | None = _own_key(_THREADS)
    pin: bool | None = _own_key(_FLAG)
    task: str | None = _own_key(_type("a task's name", lambda value: isinstance(value, str) and bool(value)))
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = _own_key(_one_of(*LEVELS))
    envelope: Literal["body", "json", "kserve", "kservev2", "vertex"] | None = _own_key(
        _one_of("body", "json", "kserve", "kservev2", "vertex")
    )
    autoscaling: Autoscaling | None = _own_key(_KeyType("a mapping", autoscaling.read))  # noqa: RUF009
    recycling: Recycling | None = _own_key(_KeyType("a mapping", recycling.read))  # noqa: RUF009
    tensors: bool | None = _own_key(_FLAG)  # a row is {name: array}
    signature: Signature | None = _own_key(  # noqa: RUF009
        _KeyType("a mapping of inputs and outputs", signature.read)
    )
    capture: CapturePolicy | None = _own_key(_KeyType("a mapping", capture.read))  # noqa: RUF009
    response_cache: CachePolicy | None = _own_key(_KeyType("a mapping", response_cache.read))  # noqa: RUF009
    profile: int | None = _own_key(_KeyType("true, false or a mapping", _profile))  # batches

    raw: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = field(default=(), compare=False)  # of keys and values without effect

    @property
    def sharded(self) -> bool:
        """Return whether a replica runs in several processes."""
        return (self.tensor_parallel or 1) * (self.pipeline_parallel or 1) > 1

    @property
    def unserved(self) -> list[str]:
        """The keys that request unsupported features, with their names in the file."""
        requested = {
            "torchrun": self.torchrun is not None and not self.sharded,
            "parallelType": self.parallel_type not in (None, "custom") and not self.sharded,
            "deviceIds": self.device_ids is not None,
        }
        return [key for key, is_set in requested.items() if is_set]

    @classmethod
    def parse(cls, text: str | bytes, where: str = CONFIG, strict: bool = False) -> ModelConfig:
        """Return the configuration in a YAML text; ``where`` is its name in errors.

        ``strict`` refuses wrong values of our keys everywhere: the text has no keys of an author's own.
        """
        try:
            raw = untrusted_files.load_yaml_mapping(text)
        except untrusted_files.YamlError as error:
            raise ConfigurationError(where, str(error)) from None
        known = {f.metadata.get("key", f.name): f for f in fields(cls) if f.metadata}
        section = _parse_section(raw.pop(SECTION, None), known, where)
        values: dict[str, Any] = {}
        authors: dict[str, Any] = {}
        warnings: list[str] = []
        for key, value in list(raw.items()):
            if key not in known:
                if near := _find_resemblance(key, [*known, *HANDLER_KEYS]):
                    warnings.append(f"{where}: {key!r} is left to the handler; did you mean {near!r}?")
                continue
            if key in section:
                authors[key] = value
                continue
            entry = known[key]
            description, parse_value = entry.metadata["type"]
            try:
                values[entry.name] = parse_value(value)
            except (ValueError, BadRequest) as error:
                problem = str(error) or f"{key}: {value!r} must be {description}"
                if "ours" in entry.metadata and (strict or isinstance(value, dict)):
                    raise ConfigurationError(where, problem) from None
                warnings.append(f"{where}: {problem}; it is ignored")
                if "ours" in entry.metadata:
                    authors[key] = raw.pop(key)
        for key, (value, parsed) in section.items():
            raw[key], values[known[key].name] = value, parsed
        authors.pop("trusted", None)  # no file decides about its own trust, whatever reads it
        if authors:
            raw[AUTHORS_KEYS] = authors
        if values.get("routing") == "prefix" and values.get("sequence_batching"):
            raise ConfigurationError(
                where, "routing and sequenceBatching: the sequence selects the replica; remove one"
            )
        if values.get("tensors") and values.get("envelope"):
            raise ConfigurationError(
                where, "tensors and envelope: a model of tensors needs no envelope; remove one"
            )
        if values.get("response_cache") and values.get("sequence_batching"):
            raise ConfigurationError(
                where, "response_cache and sequenceBatching: responses depend on the sequence; remove one"
            )
        for warning in warnings:
            log.warning("%s", warning)
        return cls(**values, raw=raw, warnings=tuple(warnings))


def _find_resemblance(key: Any, known: list[str]) -> str | None:
    """Return the key that the author of an unknown one may have meant."""
    if not isinstance(key, str) or key in HANDLER_KEYS or key == SECTION:
        return None
    return did_you_mean(key, known, cutoff=0.9)


def _parse_section(section: Any, known: Mapping[str, Field[Any]], where: str) -> dict[str, tuple[Any, Any]]:
    """Return each key of the section with its value and the parsed one. Raises ConfigurationError."""
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigurationError(where, f"{SECTION} is a mapping of keys, and not {section!r}")
    parsed = {}
    for key, value in section.items():
        if key not in known:
            near = did_you_mean(str(key), list(known))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigurationError(where, f"{SECTION}: unknown key {key!r}{hint}")
        description, parse_value = known[key].metadata["type"]
        try:
            parsed[key] = value, parse_value(value)
        except (ValueError, BadRequest) as error:
            problem = str(error) or f"{key}: {value!r} must be {description}"
            raise ConfigurationError(where, f"{SECTION}: {problem}") from None
    return parsed


# Keys of TorchServe's handlers, so a near miss of one of these is an error as well.
HANDLER_KEYS = (
    "handler",
    "pt2",
    "optimize",
    "accuracy",
    "explain",
    "micro_batching",
    "onnx",
    "pippy",
    "deepspeed",
    "engine",
    "device_map",
    "max_memory",
    "offload_folder",
    "parameters",
)


# The options of a model class's decorator

_KEYS = {f.name: f.metadata.get("key", f.name) for f in fields(ModelConfig) if f.metadata}


def convert_options(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options by their keys in model-config.yaml; ``replicas`` becomes minWorkers and maxWorkers.

    ``where`` is the place of the decorator. Raises ConfigurationError for unknown keys and invalid values.
    """
    config: dict[str, Any] = {}
    for name, value in options.items():
        if name == "replicas":
            config |= {"minWorkers": value, "maxWorkers": value}
        elif name in _KEYS or name in _KEYS.values() or name in HANDLER_KEYS:
            config[_KEYS.get(name, name)] = value
        else:
            near = did_you_mean(name, [*_KEYS, "replicas", *HANDLER_KEYS])
            hint = f"; did you mean {near!r}?" if near else "; it takes the keys of model-config.yaml"
            raise ConfigurationError(where, f"@torchrelay.model has no option {name!r}{hint}")
    parse_options(config, where)
    return config


def parse_options(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the configuration of a document. Raises ConfigurationError."""
    try:
        return ModelConfig.parse(yaml.safe_dump(dict(config)), where, strict=True)
    except yaml.YAMLError as error:
        raise ConfigurationError(where, f"an option has a value that YAML cannot hold: {error}") from None
