"""The configuration of a model, ``model-config.yaml``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from serve_app.domain import autoscaling, capture, signature, validation
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.model import AUTHORS_KEYS
from serve_app.domain.pool import is_pool_name
from serve_app.domain.signature import Signature
from serve_app.domain.validation import did_you_mean
from serve_app.errors import BadRequest, ConfigurationError
from serve_app.model_store.manifest import CONFIG, Manifest, read_document, resolve_file
from serve_app.telemetry.logs import LEVELS

log = logging.getLogger(__name__)

SECTION = "torchrelay"  # of a file, with our keys alone; they win


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
    envelope: Literal["body", "json", "kserve", "kservev2"] | None = _own_key(
        _one_of("body", "json", "kserve", "kservev2")
    )
    autoscaling: Autoscaling | None = _own_key(_KeyType("a mapping", autoscaling.read))  # noqa: RUF009
    tensors: bool | None = _own_key(_FLAG)  # a row is {name: array}
    signature: Signature | None = _own_key(  # noqa: RUF009
        _KeyType("a mapping of inputs and outputs", signature.read)
    )
    capture: CapturePolicy | None = _own_key(_KeyType("a mapping", capture.read))  # noqa: RUF009
    profile: int | None = _own_key(_KeyType("true, false or a mapping", _profile))  # batches

    raw: Mapping[str, Any] = field(default_factory=dict)

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
    def read(cls, directory: Path, manifest: Manifest) -> ModelConfig:
        """Return the configuration that the manifest names, by default an empty one.

        Raises ConfigurationError, and InvalidArchive for a file of more than 1 MiB.
        """
        if manifest.config_file is None:
            return cls()
        file = resolve_file(directory, manifest, manifest.config_file)
        text = read_document(file, manifest.archive, manifest.config_file)
        return cls.parse(text, f"{manifest.archive}/{manifest.config_file}")

    @classmethod
    def parse(cls, text: str | bytes, where: str = CONFIG, strict: bool = False) -> ModelConfig:
        """Return the configuration in a YAML text; ``where`` is its name in errors.

        ``strict`` refuses wrong values of our keys everywhere: the text has no keys of an author's own.
        """
        try:
            raw = validation.parse_yaml(text)
        except validation.DocumentError as error:
            raise ConfigurationError(where, str(error)) from None
        known = {f.metadata.get("key", f.name): f for f in fields(cls) if f.metadata}
        section = _parse_section(raw.pop(SECTION, None), known, where)
        values: dict[str, Any] = {}
        authors: dict[str, Any] = {}
        for key, value in list(raw.items()):
            if key not in known:
                _warn_of_resemblance(key, [*known, *HANDLER_KEYS], where)
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
                log.warning("%s: %s; it is ignored", where, problem)
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
        return cls(**values, raw=raw)


def _warn_of_resemblance(key: Any, known: list[str], where: str) -> None:
    near = did_you_mean(key, known, cutoff=0.9) if isinstance(key, str) and key not in HANDLER_KEYS else None
    if near is not None and key != SECTION:
        log.warning("%s: %r is left to the handler; did you mean %r?", where, key, near)


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
