"""Every setting, one frozen dataclass a room, each default once.

``load`` reads them from a plain mapping (the ``args`` of configs/app.yaml) and refuses what it
does not know, naming the nearest key that it does.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from serve_app.errors import ConfigurationError

_STRICT = pydantic.ConfigDict(extra="forbid")
MIB = 1 << 20


@dataclass(frozen=True)
class StoreSettings:
    """Where archives come from and how large they may be."""

    __pydantic_config__ = _STRICT
    model_store: str = "model_store"
    allowed_urls: tuple[str, ...] = ("file://.*", "http(s)?://.*")
    download_timeout: float = 120.0  # seconds, for the whole download
    max_archive_bytes: int = 64 * 1024 * MIB
    max_unpacked_bytes: int = 128 * 1024 * MIB
    max_ratio: float = 200.0  # unpacked : packed of a whole archive; more is a zip bomb
    max_files: int = 100_000
    default_service_handler: str = ""


@dataclass(frozen=True)
class RuntimeSettings:
    """What a version gets where neither its registration nor its model-config.yaml says."""

    __pydantic_config__ = _STRICT
    default_workers_per_model: int = 0  # 0 at start-up: one; 0 at a registration: none, as TorchServe
    default_response_timeout: int = 120  # seconds
    default_startup_timeout: int = 120  # seconds
    job_queue_size: int = 100  # rows, in each replica
    decode_input_request: bool = True
    limit_max_image_pixels: bool = True
    max_response_size: int = 0  # bytes of one row's answer; 0: no limit
    service_envelope: str = ""  # body, json, kserve or kservev2; a model's own model-config.yaml goes before it
    blacklist_env_vars: str = ""  # a regular expression: variables that no handler sees
    header_key_sequence_id: str = "ts_request_sequence_id"
    header_key_sequence_start: str = "ts_request_sequence_start"
    header_key_sequence_end: str = "ts_request_sequence_end"
    num_cpus: float = 0.1  # Ray CPUs a replica claims; a claim for placement, not a limit
    num_gpus: float = 0.0


@dataclass(frozen=True)
class VersionSettings:
    """What one version gets when it is registered; its model-config.yaml and the caller go before it.

    Delay in milliseconds, time-outs in seconds; None says nothing.
    """

    __pydantic_config__ = _STRICT
    default_version: bool = False  # calls that name no version get this one, from the start-up that first loads it
    min_workers: int | None = None
    max_workers: int | None = None
    batch_size: int | None = None
    max_batch_delay: int | None = None
    response_timeout: int | None = None
    startup_timeout: int | None = None


@dataclass(frozen=True)
class ControlSettings:
    """Where the registry lives, and how often it is compared with what runs."""

    __pydantic_config__ = _STRICT
    state_dir: str = "state"
    database_url: str = ""  # empty: SQLite in state_dir
    reconcile_period: float = 2.0  # seconds
    acknowledge_timeout: float = 5.0  # seconds to wait until every live reader has a change
    enable_model_api: bool = True
    load_models: str = "all"  # "all", "none", or "a.mar,name=b.mar"
    models: Mapping[str, Mapping[str, VersionSettings]] = field(default_factory=dict)  # by model and version


@dataclass(frozen=True)
class InferenceSettings:
    """The doors on 8080."""

    __pydantic_config__ = _STRICT
    max_request_size: int = 6_553_500  # bytes
    gateways: int = 1  # gateway replicas, at most one a node
    short_hops: bool = True  # reach replicas of the same machine over sockets rather than through Ray


@dataclass(frozen=True)
class ManagementSettings:
    """The listeners of the Management deployment."""

    __pydantic_config__ = _STRICT
    host: str = "127.0.0.1"
    port: int = 8081
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 8082


@dataclass(frozen=True)
class TelemetrySettings:
    """Logs."""

    __pydantic_config__ = _STRICT
    access_log: str = "logs/access_log.log"  # one line a request; every process of a node appends; empty: none
    access_log_bytes: int = 256 * MIB  # a larger one is put aside as access_log.log.1
    log_level: str = "INFO"


@dataclass(frozen=True)
class Settings:
    __pydantic_config__ = _STRICT
    store: StoreSettings = field(default_factory=StoreSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    control: ControlSettings = field(default_factory=ControlSettings)
    inference: InferenceSettings = field(default_factory=InferenceSettings)
    management: ManagementSettings = field(default_factory=ManagementSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    home: str = ""  # what relative paths start from; empty: the working directory

    @property
    def root(self) -> Path:
        return Path(self.home or ".").expanduser().resolve()

    @property
    def model_store(self) -> Path:
        return self.root / self.store.model_store

    @property
    def state_dir(self) -> Path:
        return self.root / self.control.state_dir

    @property
    def access_log(self) -> Path | None:
        return self.root / self.telemetry.access_log if self.telemetry.access_log else None

    @property
    def database_url(self) -> str:
        return self.control.database_url or f"sqlite:///{self.state_dir / 'registry.db'}"


def load(mapping: Mapping[str, Any] | None, where: str = "settings") -> Settings:
    """Settings from a plain mapping. Raises ConfigurationError, which names key, place and cure."""
    said = dict(mapping) if isinstance(mapping, Mapping) else mapping or {}
    try:
        return pydantic.TypeAdapter(Settings).validate_python(said)
    except pydantic.ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise ConfigurationError(where, problems) from None


def near_miss(key: str, known: Iterator[str] | list[str], cutoff: float = 0.6) -> str | None:
    """The known key that ``key`` was probably meant to be."""
    folded = {_fold(k): k for k in known}
    match = difflib.get_close_matches(_fold(key), list(folded), n=1, cutoff=cutoff)
    return folded[match[0]] if match else None


def _fold(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()


def _explain(problem: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _fields_at(problem["loc"][:-1])
        near = near_miss(str(problem["loc"][-1]), known)
        cure = f"did you mean {near!r}?" if near else f"known here: {', '.join(known)}"
        return f"unknown key {path!r}; {cure}"
    return f"{path or 'the settings'}: {problem['msg']} (got {problem['input']!r})"


def _fields_at(path: tuple[Any, ...]) -> list[str]:
    here: Any = Settings()
    for part in path:
        here = getattr(here, str(part))
    return [f.name for f in dataclasses.fields(here)]
