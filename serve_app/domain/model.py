"""A model version: its identity, its specification, its observed status, and its lifecycle events."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

from serve_app.domain import adapter, autoscaling, capture, recycling, response_cache, signature
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.recycling import Recycling
from serve_app.domain.response_cache import CachePolicy
from serve_app.domain.signature import Signature
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import BadRequest

# Fields that change without a reload.
_NO_REVISION = ("memory", "min_workers", "max_workers", "autoscaling", "signed_by", "isolated", "pin_loaded")

# idle: without replicas, until a call wakes it
Phase = Literal["stopped", "idle", "loading", "ready", "failed"]


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of a model, which is part of a route
VERSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")  # semantic versions have build metadata: 1.0+cu118
AUTHORS_KEYS = "torchrelay"  # of a configuration: values of the author's own under keys that are ours


def check_word(word: str, such: str) -> None:
    """Raise BadRequest for a word that cannot be part of a route; ``such`` starts the explanation."""
    check_name(NAME, word, f"{such} letters, digits and any of _ . -")


def check_name(valid: re.Pattern[str], name: str, explanation: str) -> None:
    """Raise BadRequest for a name that is not ``valid``, one of the patterns above."""
    if not valid.fullmatch(name):
        raise BadRequest(f"{name!r} cannot be part of a route: {explanation} and begin with none of . and -")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """One version of one model."""

    name: str
    version: str

    @property
    def app(self) -> str:
        """Return the name of this version's Serve application, and of the deployment in it.

        Two versions never share it: the part behind the last ``--`` is the version. A version that contains
        ``--`` or ``+`` itself is escaped; it then begins with a period, which no version does.
        """
        version = self.version
        if "--" in version or "+" in version:
            version = "." + version.replace(".", ".0").replace("-", ".1").replace("+", ".2")
        return f"{self.name}--{version}"


@dataclass(frozen=True)  # without slots, for its cached properties
class ModelSpec:
    """The desired state of a version: everything that a replica needs to start, and nothing else.

    Times have the units of TorchServe's API: ``max_batch_delay`` and ``client_timeout`` are in milliseconds,
    all others in seconds.
    """

    name: str
    version: str
    url: str  # as in the registration
    digest: str  # sha256 of the stored archive
    archive: str  # URI of the stored archive, the same from every node
    handler: str = ""  # overrides the manifest's where set
    runtime: str = "python"
    min_workers: int = 0
    max_workers: int = 0
    batch_size: int = 1
    max_batch_delay: int | None = None  # None: an idle model starts a batch at once
    response_timeout: int = 120
    startup_timeout: int = 120
    max_retry_timeout: int = 300
    client_timeout: int = 0
    job_queue_size: int = 100
    device_type: str = ""
    device_ids: tuple[int, ...] = ()
    parallel_type: str = ""
    parallel_level: int = 0
    continuous_batching: bool = False
    sequence_batching: bool = False
    sequence_max_idle: int = 0  # milliseconds, as the next
    sequence_timeout: int = 0
    max_num_sequence: int = 0
    max_sequence_job_queue_size: int = 0
    use_venv: bool = False
    requirements: str = ""  # the archive's requirements file, if it is installed for this version's replicas
    signed_by: str = ""  # fingerprint of the trusted key that signed the archive; empty: not verified
    batcher: Literal["torchrelay", "ray"] = "torchrelay"
    retries: bool = True  # a failed batch is run again in halves; rows of a dead replica go to another
    bucket_by_length: bool = False  # rows of similar length run together
    use_job_ticket: bool = False  # a row is accepted only while the model is idle
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    archive_bytes: int = 0
    memory: int = 0  # bytes of a replica's process after its warm-up; 0: not measured yet
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    max_ongoing_requests: int = 0  # 0: as many as the queue and two batches hold
    max_concurrent_requests: int = 0  # of all its replicas together; 0: no limit
    fast_path: Literal["torchserve", "oip"] = "torchserve"
    routing: Literal["load", "prefix"] = "load"  # by which a replica is chosen for a request
    pool: str = ""  # whose hosts load it, beside other versions; empty: it has replicas of its own
    pin_loaded: bool = False  # its hosts never evict it
    isolated: str = ""  # why it left its pool for replicas of its own; empty: it did not
    loaded_at_startup: bool = False
    autoscaling: Autoscaling | None = None  # as configured; None: the defaults
    adapters: tuple[AdapterSpec, ...] = ()  # loaded at run time
    graph: WorkflowGraph | None = None  # of a workflow, whose own replicas run its functions only
    config: Mapping[str, Any] = field(default_factory=dict)  # model-config.yaml, whole, for the handler

    @property
    def claimed_memory(self) -> int:
        """Return the bytes that each rank claims at its start: as measured, else the archive's size."""
        return self.memory or self.archive_bytes

    @property
    def is_pooled(self) -> bool:
        """Return whether the hosts of its pool run it; workers are then the hosts that load it at first."""
        return bool(self.pool) and not self.isolated

    @cached_property
    def revision(self) -> str:
        """Return a digest of all that a host of its pool loads; a version with another one is reloaded."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content = repr([value for name, value in fields.items() if name not in _NO_REVISION])
        return blake2b(content.encode(), digest_size=8).hexdigest()

    @property
    def ranks(self) -> int:
        """Return the processes of one replica; each claims ``num_cpus``, ``num_gpus`` and the memory."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def handler_config(self) -> dict[str, Any]:
        """Return model-config.yaml for the handler, with the author's values of keys that are ours, too."""
        config = dict(self.config)
        authors: Mapping[str, Any] = config.pop(AUTHORS_KEYS, {})
        return {**config, **authors}

    @property
    def tensors(self) -> bool:
        """Return whether a row is ``{name: array}``, whatever form its request had."""
        return self.config.get("tensors") is True

    @property
    def signature(self) -> Signature | None:
        """Return the declared inputs and outputs; None where its file declares none."""
        document = self.config.get("signature")
        return signature.read(document) if document is not None else None

    @property
    def capture(self) -> CapturePolicy | None:
        """Return which of its requests are captured; None where its file configures no capture."""
        document = self.config.get("capture")
        return capture.read(document) if document is not None else None

    @cached_property
    def response_cache(self) -> CachePolicy | None:
        """Return the limits of its stored responses; None where its file configures no cache."""
        document = self.config.get("response_cache")
        return response_cache.read(document) if document is not None else None

    def find_recycling(self, default: Recycling) -> Recycling:
        """Return the limits of its replicas; its file replaces keys of the server's ``default``."""
        document = self.config.get("recycling")
        return recycling.read_stored(document, default) if document is not None else default

    @property
    def all_adapters(self) -> tuple[AdapterSpec, ...]:
        """The adapters of its archive, and those that were loaded at run time."""
        return (*adapter.find_static(self.config), *self.adapters)

    @property
    def scaling(self) -> Autoscaling | None:
        """Return the autoscaling policy; None for a fixed number of replicas."""
        if self.min_workers >= self.max_workers:
            return None
        return autoscaling.with_defaults(self.autoscaling, self.batch_size)

    @cached_property
    def ref(self) -> ModelRef:
        return ModelRef(self.name, self.version)

    @property
    def has_no_workers(self) -> bool:
        """Return whether it has no replicas and needs some; a workflow without functions needs none."""
        if self.is_pooled:
            return False  # its pool loads it on demand
        return self.max_workers == 0 and (self.graph is None or bool(self.handler))

    @property
    def routed_by_prefix(self) -> bool:
        """Return whether gateways choose the replica by a request's prefix; one replica needs no choice."""
        return self.routing == "prefix" and max(self.min_workers, self.max_workers) > 1

    @property
    def default_route(self) -> str:
        """Return the model's own route, which its default version's application owns."""
        return f"/v2/models/{self.name}" if self.fast_path == "oip" else f"/predictions/{self.name}"

    @property
    def route(self) -> str:
        """Return the version's explicit route, which begins with the model's own."""
        return f"{self.default_route}/{'versions/' if self.fast_path == 'oip' else ''}{self.version}"

    def with_(self, **changes: Any) -> ModelSpec:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica as the management API describes it."""

    id: str
    pid: int
    started_at: float  # seconds since the epoch
    ready: bool
    memory: int = 0  # resident bytes
    gpu: str = ""  # "" on a CPU, else the visible device ids
    node: str = ""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The observed state of a version."""

    phase: Phase = "stopped"
    replicas: int = 0  # running now
    last_error: str = ""  # stays when the version runs again
    error_time: float = 0.0  # of the last error, in seconds since the epoch
    workers: tuple[ReplicaInfo, ...] = ()
    start_seconds: float = 0.0  # of the last observed start, from no replica to the first ready one
    signature: Signature | None = None  # the inputs and outputs that its handler declares
    input_type: str = ""  # the media type of its input, where its handler declares one
    schemas: Mapping[str, Any] | None = None  # the JSON schemas of input and output, of a model class
    waiting_for: str = ""  # the resources that replicas without a place wait for
    pool_hosts: int = 0  # hosts of its pool that should load it; 0: it is in no pool


@dataclass(frozen=True, slots=True)
class Registration:
    """A request to register an archive; None stands for an absent parameter.

    ``url`` is a bare name in the model store, or a URI of any scheme that ``store.allowed_urls`` allows. It
    may end in ``?sha256=`` or ``#sha256=`` with the expected digest.
    """

    url: str
    model_name: str | None = None
    version: str | None = None  # in place of the manifest's; only of a repository's folder
    handler: str | None = None
    task: str | None = None  # of a Hugging Face folder, by the names of transformers' pipelines
    runtime: str | None = None
    batch_size: int | None = None
    max_batch_delay: int | None = None  # milliseconds
    initial_workers: int | None = None
    response_timeout: int | None = None  # seconds
    startup_timeout: int | None = None  # seconds
    wait: bool = True  # until the workers are ready, or have failed
    # Patterns of the models that the request's key may manage; the model's name must match one.
    allowed_models: tuple[str, ...] = ("*",)
    s3_sse_kms: bool = False  # an https URL of S3 is fetched with credentials, or not at all
    sha256: str | None = None  # expected digest of the archive, in hex; another one is refused
    trusted: bool = False  # its weights and, of a folder, its own code may run as they load
    id: str | None = None  # by which the client finds its events; else one is generated


Stage = Literal[
    "accepted",  # a registration, or a change of a version's replicas, begins
    "downloading",  # bytes, total and percent, where they are known
    "unpacking",  # the same
    "checking",
    "installing",  # a line of the installer
    "starting",  # the number of replicas, and the resources that they wait for
    "isolated",  # it leaves its pool for replicas of its own, and why
    "recycling",  # a replica that has reached a limit is replaced, and why
    "loading",  # a replica's handler loads its model
    "warming",
    "ready",
    "failed",
]
FINAL_STAGES = ("ready", "failed")


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """An event in the lifecycle of a model."""

    id: int  # higher than those of all events before it, also before a restart
    registration: str
    model: str  # the requested name until the manifest is read, then the manifest's
    version: str  # empty until the manifest is read
    stage: Stage
    time: float  # seconds since the epoch
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EventQuery:
    """A filter of events; empty fields match all."""

    limit: int = 100
    model: str = ""
    stage: str = ""


@dataclass(frozen=True, slots=True)
class ScalingProgress:
    """The progress of a change of a version's replicas.

    ``done``: all of them run; ``processing``: the client does not wait; ``partial``: the wait ended while
    some still start.
    """

    ref: ModelRef
    replicas: int
    state: Literal["done", "processing", "partial"]
    bounds: tuple[int, int] | None = None  # of the autoscaling that applies from now on
    previous_bounds: tuple[int, int] | None = None  # of the autoscaling that has been switched off
    advice: str = ""  # a better option for the version
    on_demand: bool = False  # its pool loads it with the first request


@dataclass(frozen=True, slots=True)
class VersionStats:
    """The counts of one version over the whole cluster since the first request for them."""

    model: str
    version: str
    answered: int  # requests
    failed: int
    seconds: float  # from the requests' arrival to their responses, in total
    rows: int
    queue_seconds: float  # of the rows' waits for their batches, in total
    batches: int
    inference_seconds: float  # of the batches in the handler, in total
    last_batch_at: float = 0.0  # time of the last batch in seconds since the epoch; 0: no batch has run
    # Rows of a batch (of tensors: along the first axis), number of such batches, seconds in the handler.
    batch_sizes: tuple[tuple[int, int, float], ...] = ()
    cache_hits: int = 0
    cache_misses: int = 0


@dataclass(frozen=True, slots=True)
class VersionDescription:
    """A version as the management API describes it."""

    spec: ModelSpec
    status: ModelStatus
    default: bool
    pending: int = 0  # rows waiting in its replicas' queues
    metadata: Any = None  # the handler's response to a describe request, if one was sent
