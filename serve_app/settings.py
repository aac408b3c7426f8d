"""All settings: one frozen dataclass for each section, each default once.

``load`` parses them from a plain mapping (the ``args`` of configs/app.yaml) and rejects unknown keys, with
the nearest known key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from serve_app.domain import limits, validation
from serve_app.domain import traffic_policy as policies
from serve_app.domain.access import KeyLimits
from serve_app.domain.access_settings import JwtSettings, KeySettings
from serve_app.domain.pool import PoolName, PoolSettings
from serve_app.domain.recycling import Recycling
from serve_app.errors import BadRequest, ConfigurationError

MIB = 1 << 20
_Count = Annotated[int, pydantic.Field(ge=0)]
_Positive = Annotated[int, pydantic.Field(ge=1)]
_Port = Annotated[int, pydantic.Field(ge=0, le=65535)]
_Number = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
_PositiveNumber = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]

HOME = "TORCHRELAY_HOME"  # where relative paths of the settings start; unset: the working directory
# The variable in which `torchrelay start` passes the address that clients connect to.
INFERENCE_HOST = "TORCHRELAY_INFERENCE_HOST"
# The address of TLS and its certificate, from `torchrelay start` to HAProxy.
HAPROXY_TLS_BIND = "TORCHRELAY_HAPROXY_TLS_BIND"
HAPROXY_TLS_CERTIFICATE = "TORCHRELAY_HAPROXY_TLS_CERTIFICATE"


class _Section:
    """The base of all sections: unknown keys are refused."""

    __pydantic_config__ = validation.STRICT


@dataclass(frozen=True)
class ModelStoreSettings(_Section):
    """The sources of archives, and the limits of their size."""

    model_store: str = "model_store"
    workflow_store: str = ""  # of .war archives; empty: model_store
    # regular expressions; None: http(s) and oci to public addresses, s3, gs, az and hf, and no file
    allowed_urls: tuple[str, ...] | None = None
    storage_options: dict[str, dict[str, Any]] = field(default_factory=dict)  # by scheme
    download_timeout: _PositiveNumber = 120.0  # seconds, for the whole download, or the listing of a folder
    max_archive_bytes: _Positive = 64 * 1024 * MIB
    max_unpacked_bytes: _Positive = 128 * 1024 * MIB
    max_ratio: _PositiveNumber = 200.0  # unpacked : packed of a whole archive; more is a zip bomb
    max_files: _Positive = 100_000
    max_depth: _Positive = 64  # directory levels of an archive
    default_service_handler: str = ""
    default_task: str = ""  # of Hugging Face folders
    # patterns of model names: their weights and folders may run code as they load
    trusted: tuple[str, ...] = ()
    # patterns of model names and URLs that need a signature by one of signature_keys
    require_signature: tuple[str, ...] = ()
    signature_keys: tuple[str, ...] = ()  # PEM texts or files: public keys, or an authority's certificates


@dataclass(frozen=True)
class RepositorySettings(_Section):
    """A repository of models that the server follows: new, changed and removed ones are applied."""

    url: str = ""  # a folder, or a folder of an object store; empty: none
    period: _PositiveNumber = 15.0  # seconds between two reads
    marker: str = ""  # the file without which a version is not complete; empty: none is needed
    latest_is_default: bool = False  # a model's highest version becomes its default once it is ready
    dry_run: bool = False  # only log what would change


@dataclass(frozen=True)
class RuntimeSettings(_Section):
    """The defaults of a version, after its registration and its model-config.yaml."""

    default_workers_per_model: _Count = 0  # 0 at start-up: one; 0 at a registration: none, as TorchServe
    default_response_timeout: _Positive = 120  # seconds
    default_startup_timeout: _Positive = 120  # seconds
    job_queue_size: _Positive = 100  # rows, in each replica
    batcher: Literal["torchrelay", "ray"] = (
        "torchrelay"  # ray: @serve.batch; a model-config.yaml has precedence
    )
    # the pool of versions that can be in one and whose model-config.yaml has none; empty: none
    pool: str = ""
    decode_input_request: bool = True
    limit_max_image_pixels: bool = True
    max_response_size: _Count = 0  # bytes of one row's answer; 0: no limit
    # of a response that is written as JSON, which has neither NaN nor infinity: null instead, or an error
    non_finite_numbers: Literal["null", "error"] = "null"
    # body, json, kserve, kservev2 or vertex; a model's own model-config.yaml has precedence
    service_envelope: str = ""
    blacklist_env_vars: str = ""  # a regular expression: further variables that no handler sees
    # patterns of the server's secret variables that handlers see all the same
    handler_env_vars: tuple[str, ...] = ()
    header_key_sequence_id: str = "ts_request_sequence_id"
    header_key_sequence_start: str = "ts_request_sequence_start"
    header_key_sequence_end: str = "ts_request_sequence_end"
    num_cpus: _Number = 0.0  # Ray CPUs that a replica claims, for placement
    num_gpus: _Number = 0.0
    pin: bool = False  # replicas without a GPU compute on cores of their own
    recycling: Recycling = field(default_factory=Recycling)  # limits after which a replica is replaced
    install_py_dep_per_model: bool = False  # install each archive's requirements.txt for its replicas alone
    install_timeout: _PositiveNumber = 600.0  # seconds, for one archive's
    # The package index; empty: pip's own, or that of /etc/pip.conf; none: no index; or the ARN of a
    # repository of AWS CodeArtifact.
    pip_index_url: str = ""
    pip_extra_index_urls: tuple[str, ...] = ()
    pip_find_links: tuple[str, ...] = ()  # folders of wheels, or pages with links to them
    pip_require_hashes: bool = False  # every requirement needs --hash
    pip_allow_source_builds: bool = False  # source distributions too, whose code runs as they are built
    pip_allow_options: bool = False  # options, URLs and paths in requirements.txt


@dataclass(frozen=True)
class VersionSettings(_Section):
    """The settings of one version at its registration; its model-config.yaml and the caller have precedence.

    Delay in milliseconds, timeouts in seconds; None: no setting.
    """

    # requests without a version go to this one, from the start-up that first loads it
    default_version: bool = False
    min_workers: int | None = None
    max_workers: int | None = None
    batch_size: int | None = None
    max_batch_delay: int | None = None
    response_timeout: int | None = None
    startup_timeout: int | None = None


@dataclass(frozen=True)
class ControlSettings(_Section):
    """The location of the registry, and the period of the reconcile loop."""

    state_dir: str = "state"
    database_url: str = ""  # empty: SQLite in state_dir
    reconcile_period: _PositiveNumber = 2.0  # seconds
    acknowledge_timeout: _PositiveNumber = 5.0  # seconds to wait until every live reader has a change
    # the largest nodes that Ray's node autoscaler may add, as resources by a name; empty: no autoscaler
    node_types: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    controller_memory_limit: _Count = 1024  # MiB; 0: none
    enable_model_api: bool = True
    # another program evicts models: a registration without room is 507 at once, a removal waits for replicas
    external_eviction: bool = False
    prometheus_url: str = ""  # of the server that the autoscaling policy prometheus queries
    prometheus_token: str = ""  # "env:NAME"
    load_models: str = "all"  # "all", "none", or "a.mar,name=b.mar"
    models: Mapping[str, Mapping[str, VersionSettings]] = field(default_factory=dict)  # by model and version
    traffic: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # policies by model: traffic_policy.py


@dataclass(frozen=True)
class InferenceSettings(_Section):
    """The inference port, 8080."""

    max_request_size: _Positive = 64 * MIB  # bytes; TorchServe's 6,553,500 with a config.properties
    max_form_fields: _Positive = 1000  # of a form of a prediction
    gateways: _Positive = 1  # gateway replicas, at most one a node
    gateway_label_selector: Mapping[str, str] = field(default_factory=dict)  # Ray labels of their nodes
    callbacks: bool = True  # answer predictions by callbacks instead of ASGI tasks
    unix_sockets: bool = True  # reach replicas of the same machine over sockets rather than through Ray
    # to a request over clientTimeoutInMills: 504, or none at all
    late_response: Literal["send", "drop"] = "send"
    max_workflow_items: _Positive = 1000  # of one request for which a step of a workflow runs once each
    # of the stored responses of one process, all versions with response_cache together; 0: none is stored
    max_cache_bytes: _Count = 256 * MIB
    # /ping: TorchServe's, or 200 without a body only while every model of the start-up can answer
    ping: Literal["torchserve", "ready"] = "torchserve"
    aliases: Mapping[str, str] = field(default_factory=dict)  # further paths of routes, such as a platform's
    # how much of a handler's error a caller sees
    handler_errors: Literal["hidden", "message", "traceback"] = "hidden"
    serve_management: bool = False  # the management API on this port too
    serve_metrics: bool = False  # /metrics on this port too
    # Names in the Host header beside the loopback's, as patterns. Empty: no others where the port is the
    # loopback's, any elsewhere.
    allowed_hosts: tuple[str, ...] = ()
    # Headers Access-Control-Allow-* of every answer of this port; empty: that one is not sent.
    cors_allowed_origin: str = ""
    cors_allowed_methods: str = ""
    cors_allowed_headers: str = ""


@dataclass(frozen=True)
class AsyncPredictionSettings(_Section):
    """Predictions that are requested with ``Prefer: respond-async`` and answered later. Seconds and bytes."""

    enabled: bool = True  # false: they are answered at once, whatever they prefer
    retention_s: _PositiveNumber = 3600.0  # for which an answer is kept
    # how long a prediction is retried while all queues are full
    max_queue_time_s: _Number = 600.0
    concurrency: _Positive = 64  # that run at once
    model_concurrency: _Positive = 16  # of one model
    max_predictions: _Positive = 20_000  # that wait, run or are kept
    max_bytes: _Count = 1024 * MIB  # of their requests and answers
    # the share of max_predictions and max_bytes that one key may fill, where several keys may infer
    key_share: Annotated[float, pydantic.Field(gt=0, le=1)] = 0.25
    max_result_size: _Positive = 64 * MIB  # of one answer
    inline_max_bytes: _Count = 1 * MIB  # larger bodies are in ``results``
    results: str = ""  # a folder, as a path or a URL of fsspec's; empty: one in state_dir
    webhook_urls: tuple[str, ...] = ()  # patterns of the addresses that may get webhooks; empty: none
    webhook_secret: str = ""  # "env:NAME"
    webhook_attempts: _Positive = 8
    webhook_backoff: _PositiveNumber = 1.0  # before the second attempt; then doubled
    webhook_timeout: _PositiveNumber = 10.0


@dataclass(frozen=True)
class ManagementSettings(_Section):
    """The listeners of the Management deployment."""

    host: str = "127.0.0.1"
    port: _Port = 8081
    metrics_host: str = "127.0.0.1"
    metrics_port: _Port = 8082
    # names in the Host header beside the loopback's, as patterns; checked where requests need no key
    allowed_hosts: tuple[str, ...] = ()
    enable_metrics_api: bool = True  # false: metrics_port is closed
    serve_metrics: bool = False  # /metrics on the management port too
    certificate_file: str = ""  # PEM, with its chain: TLS on these listeners
    private_key_file: str = ""  # PEM, without a password


@dataclass(frozen=True)
class GrpcSettings(_Section):
    """The gRPC ports: inference beside each gateway replica, management beside the Management deployment.

    Ages and timeouts are in seconds; 0: without end.
    """

    host: str = "127.0.0.1"
    port: _Port = 7070  # 0: none
    management_host: str = "127.0.0.1"
    management_port: _Port = 7071  # 0: none
    certificate_file: str = ""  # PEM, with its chain: TLS on both ports
    private_key_file: str = ""  # PEM, without a password
    max_connection_age: _Number = 0.0
    max_connection_age_grace: _Number = 0.0
    management_max_connection_age: _Number = 0.0
    management_max_connection_age_grace: _Number = 0.0
    max_concurrent_calls: _Positive = 10_000  # of one port; more are refused
    # of the management port: with a key, and again as many of health and reflection
    management_max_concurrent_calls: _Positive = 64
    management_max_message_size: _Positive = 1 * MIB  # bytes
    max_concurrent_streams: _Positive = 128  # of a connection; more are refused
    max_buffered_bytes: Annotated[int, pydantic.Field(ge=MIB)] = 48 * MIB  # of all connections
    header_timeout: _Number = 10.0  # for the handshake and each header block
    message_timeout: _Number = 30.0  # for a message, from part to part
    stream_idle_timeout: _Number = 300.0  # between a stream's messages
    send_timeout: _Number = 30.0  # for a response, from part to part
    max_connection_idle: _Number = 3600.0  # without calls
    reflection: bool = True  # the ports tell tools like grpcurl what they speak


def _parse_switch(value: Any) -> Any:
    """Map the booleans that YAML reads from a bare ``on`` and ``off`` back to text."""
    return ("off", "on")[value] if isinstance(value, bool) else value


@dataclass(frozen=True)
class AuthSettings(_Section):
    """Authorization of requests. A request sends its key as ``Authorization: Bearer KEY``."""

    # auto: on as soon as an address is not the loopback's
    mode: Annotated[Literal["auto", "on", "off"], pydantic.BeforeValidator(_parse_switch)] = "auto"
    key_file: str = "key_file.json"  # TorchServe's tokens, new at each start; its folder must be writable
    token_expiration: _PositiveNumber = 60.0  # minutes, of a TorchServe token
    torchserve_tokens: bool = True  # make the three keys of key_file.json
    keys: tuple[KeySettings, ...] = ()  # of the operator's own
    default_limits: KeyLimits | None = None  # of every key that does not set its own
    jwt: JwtSettings | None = None  # tokens of an OpenID Connect provider
    metrics: Literal["open", "observe"] = "open"  # observe: /metrics wants a key that may observe every model
    isolate_prefix_cache: bool = False  # a language model's prompts reuse those of the same key's owner alone


@dataclass(frozen=True)
class TelemetrySettings(_Section):
    """Logs and metrics."""

    metrics_mode: Literal["prometheus", "log", "legacy"] = "prometheus"  # where TorchServe's metrics go
    metrics_dir: str = ""  # of ts_metrics.log and model_metrics.log, in the other modes; empty: log_dir
    metrics_config: str = ""  # a metrics.yaml, on every node; empty: TorchServe's default catalogue
    model_metrics_auto_detect: bool = False  # handlers' metrics that no file declares are taken too
    system_metrics: bool = True  # CPU, memory, disk and GPUs of every node
    system_metrics_period: _PositiveNumber = 60.0  # seconds
    # of access_log.log, ts_log.log and model_log.log; every process of a node appends to them
    log_dir: str = "logs"
    log_format: Literal["text", "json"] = "text"  # TorchServe's layout, or an object a line
    log_bytes: _Count = (
        256 * MIB
    )  # a larger ts_log.log or model_log.log is put aside as ts_log.log.1; 0: never
    log_level: str = "INFO"
    log_levels: Mapping[str, str] = field(default_factory=dict)  # by model, for its replicas
    access_log: str = "access_log.log"  # one line a request, in log_dir; empty: none
    access_log_bytes: _Count = 256 * MIB  # a larger one is put aside as access_log.log.1
    # where Ray collects metrics (RAY_enable_metrics_collection=1): export requests to them, once a second
    ray_metrics: bool = True
    otlp_endpoint: str = ""  # of a collector that receives traces, http://collector:4317; empty: no traces
    otlp_protocol: Literal["grpc", "http"] = "grpc"
    otlp_timeout: _PositiveNumber = 10.0  # seconds of one export
    # share of traced requests among those without a traceparent
    trace_sampling: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.01
    # addresses and networks whose X-Forwarded-For is the client's address in the logs
    trusted_proxies: tuple[str, ...] = ()
    audit_log: str = "audit_log.log"  # one line for each management change, in log_dir; empty: none
    audit_days: _PositiveNumber = 90.0  # for which the database keeps a record
    audit_records: Annotated[int, pydantic.Field(ge=100)] = 100_000  # that the database keeps at most
    group_readable_logs: bool = False  # the files of log_dir are readable for its group too
    # regular expressions: folders and URLs that capture in a model-config.yaml may name as its destination
    capture_destinations: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConsoleSettings(_Section):
    """The web console under ``/ui`` of the management port."""

    enabled: bool = True
    idle_timeout: _PositiveNumber = 600.0  # seconds until its unused process ends


@dataclass(frozen=True)
class Settings(_Section):
    store: ModelStoreSettings = field(default_factory=ModelStoreSettings)
    repository: RepositorySettings = field(default_factory=RepositorySettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    control: ControlSettings = field(default_factory=ControlSettings)
    inference: InferenceSettings = field(default_factory=InferenceSettings)
    async_predictions: AsyncPredictionSettings = field(default_factory=AsyncPredictionSettings)
    management: ManagementSettings = field(default_factory=ManagementSettings)
    grpc: GrpcSettings = field(default_factory=GrpcSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    console: ConsoleSettings = field(default_factory=ConsoleSettings)
    pools: Mapping[PoolName, PoolSettings] = field(default_factory=dict)
    limits: limits.Limits = field(default_factory=limits.Limits)  # of numbers from outside
    home: str = ""  # what relative paths start from; empty: the working directory

    @property
    def root(self) -> Path:
        return Path(self.home or ".").expanduser().resolve()

    @property
    def model_store(self) -> Path:
        return self.root / self.store.model_store

    @property
    def workflow_store(self) -> Path:
        return self.root / (self.store.workflow_store or self.store.model_store)

    @property
    def state_dir(self) -> Path:
        return self.root / self.control.state_dir

    @property
    def access_log(self) -> Path | None:
        return self.log_dir / self.telemetry.access_log if self.telemetry.access_log else None

    @property
    def results_location(self) -> str:
        """The folder of bodies that are too large for the database: an absolute path, or a URL."""
        value = self.async_predictions.results
        if "://" in value:
            return value
        return str(self.root / value if value else self.state_dir / "async_predictions")

    @property
    def log_file_mode(self) -> int:
        return 0o640 if self.telemetry.group_readable_logs else 0o600

    @property
    def secret_env_vars(self) -> frozenset[str]:
        """The variables that settings name with ``env:``."""
        values = [*(key.key for key in self.auth.keys), self.async_predictions.webhook_secret]
        values.append(self.control.prometheus_token)
        return frozenset(value[len("env:") :] for value in values if value.startswith("env:"))

    def without_secrets(self) -> Settings:
        """Return the settings for a process that runs handlers: no database and no storage credentials."""
        return replace(
            self,
            control=replace(self.control, database_url="", prometheus_url=""),
            store=replace(self.store, storage_options={}),
        )

    @property
    def audit_log(self) -> Path | None:
        return self.log_dir / self.telemetry.audit_log if self.telemetry.audit_log else None

    @property
    def crash_reports_dir(self) -> Path:
        return self.state_dir / "replicas"

    @property
    def counts_dir(self) -> Path:
        return self.state_dir / "counts"

    @property
    def capture_dir(self) -> Path:
        return self.state_dir / "capture"

    @property
    def log_dir(self) -> Path:
        return self.root / self.telemetry.log_dir

    @property
    def key_file(self) -> Path:
        return self.root / self.auth.key_file

    @property
    def key_run_file(self) -> Path:
        """The file with the id of the server start that created the keys in ``key_file``."""
        return self.state_dir / "key_file.run"

    def is_exposed(self, *inference_hosts: str) -> bool:
        """Return whether one of the server's addresses is reachable from other machines."""
        m, g = self.management, self.grpc
        hosts = [*inference_hosts, m.host, m.metrics_host]
        hosts += [host for host, port in ((g.host, g.port), (g.management_host, g.management_port)) if port]
        return not all(map(is_loopback, hosts))

    def requires_keys(self, *inference_hosts: str) -> bool:
        """Return whether requests need a key, if the inference port listens on ``inference_hosts``.

        Raises ConfigurationError if they need one and no key can exist.
        """
        wanted = self.auth.mode == "on" or (self.auth.mode == "auto" and self.is_exposed(*inference_hosts))
        if wanted and not (self.auth.torchserve_tokens or self.auth.keys or self.auth.jwt):
            cure = "name keys in auth.keys, or set auth.torchserve_tokens to true, or auth.mode to off"
            raise ConfigurationError("auth", f"requests need a key, and there is none; {cure}")
        return wanted

    @property
    def metrics_dir(self) -> Path:
        return self.root / (self.telemetry.metrics_dir or self.telemetry.log_dir)

    @property
    def database_url(self) -> str:
        return self.control.database_url or f"sqlite:///{self.state_dir / 'registry.db'}"


def load(mapping: Mapping[str, Any] | None, where: str = "settings") -> Settings:
    """Parse settings from a plain mapping. Raises ConfigurationError, which names key, place and remedy."""
    value = dict(mapping) if isinstance(mapping, Mapping) else mapping or {}
    try:
        settings = validation.read(Settings, value, secret_paths=(("auth", "keys"),))
        limits.check_settings(settings)
    except (validation.DocumentError, BadRequest) as error:
        raise ConfigurationError(where, str(error)) from None
    for model, policy in settings.control.traffic.items():
        try:
            limits.check(policies.read(policy), settings.limits, "the policy")
        except BadRequest as error:
            raise ConfigurationError(where, f"control.traffic.{model}: {error}") from None
    return settings


def read_secret(key: str, value: str, problem: str, environ: Mapping[str, str]) -> str:
    """Return the variable that the setting ``key`` names by ``env:NAME``.

    Raises ConfigurationError with ``problem`` where it does not name one that is set.
    """
    kind, _, name = value.partition(":")
    if kind != "env" or not environ.get(name):
        remedy = "write env: and a variable of the server's environment that holds it"
        raise ConfigurationError(key, f"{problem}; {remedy}")
    return environ[name]


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is reachable from this machine only. A name other than localhost may be
    anywhere.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
