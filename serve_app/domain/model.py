"""A model version: its identity, its specification, its observed status, and its lifecycle events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from serve_app.domain import adapter, autoscaling, capture, signature
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.signature import Signature
from serve_app.domain.workflow_graph import WorkflowGraph

# idle: without replicas, until a call wakes it
Phase = Literal["stopped", "idle", "loading", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """One version of one model."""

    name: str
    version: str

    @property
    def app(self) -> str:
        """The name of the Serve application, and of the deployment in it, that runs this version.

        Two versions never share it: the part behind the last ``--`` is the version. A version that contains
        ``--`` itself is escaped; it then begins with a period, which no version does.
        """
        version = self.version
        if "--" in version:
            version = "." + version.replace(".", ".0").replace("-", ".1")
        return f"{self.name}--{version}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a version should be. Everything a replica needs to start is here, and nothing else.

    Times are in the unit that TorchServe's API uses for them: ``max_batch_delay`` and
    ``client_timeout`` in milliseconds, all others in seconds.
    """

    name: str
    version: str
    url: str  # as the caller gave it
    digest: str  # sha256 of the stored archive
    archive: str  # URI of the stored archive, the same from every node
    handler: str = ""  # overrides the manifest's where set
    runtime: str = "python"
    min_workers: int = 0
    max_workers: int = 0
    batch_size: int = 1
    max_batch_delay: int | None = None  # None: nobody asked for a wait, so an idle model starts at once
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
    requirements: str = ""  # the archive's file that is installed for this version's replicas; empty: none is
    signed_by: str = ""  # fingerprint of the trusted key that signed the archive; empty: not verified
    batcher: Literal["torchrelay", "ray"] = "torchrelay"
    retries: bool = True  # a failed batch is run again in halves; rows of a dead replica go to another
    bucket_by_length: bool = False  # rows of similar length run together
    use_job_ticket: bool = False  # a row is taken only where the model is idle
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
    loaded_at_startup: bool = False
    autoscaling: Autoscaling | None = None  # what was said of it; None: nothing
    adapters: tuple[AdapterSpec, ...] = ()  # loaded at run time
    graph: WorkflowGraph | None = None  # of a workflow, whose own workers run its functions alone
    config: Mapping[str, Any] = field(default_factory=dict)  # model-config.yaml, whole, for the handler

    @property
    def claimed_memory(self) -> int:
        """Return the bytes that each rank claims at its start: as measured, else the archive's size."""
        return self.memory or self.archive_bytes

    @property
    def ranks(self) -> int:
        """Return the processes of one replica; each claims ``num_cpus``, ``num_gpus`` and the memory."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def tensors(self) -> bool:
        """Return whether a row is ``{name: array}``, whatever form its call had."""
        return self.config.get("tensors") is True

    @property
    def signature(self) -> Signature | None:
        """What it takes and gives, where its file says so."""
        document = self.config.get("signature")
        return signature.read(document) if document is not None else None

    @property
    def capture(self) -> CapturePolicy | None:
        """Return which of its requests are stored and measured; None where its file says nothing."""
        document = self.config.get("capture")
        return capture.read(document) if document is not None else None

    @property
    def all_adapters(self) -> tuple[AdapterSpec, ...]:
        """The adapters of its archive, and those that were loaded at run time."""
        return (*adapter.find_static(self.config), *self.adapters)

    @property
    def scaling(self) -> Autoscaling | None:
        """How its replicas follow the load; None where there is one number of them."""
        if self.min_workers >= self.max_workers:
            return None
        return autoscaling.with_defaults(self.autoscaling, self.batch_size)

    @property
    def ref(self) -> ModelRef:
        return ModelRef(self.name, self.version)

    @property
    def has_no_workers(self) -> bool:
        """Return whether it has no workers and needs some; a workflow without functions needs none."""
        return self.max_workers == 0 and (self.graph is None or bool(self.handler))

    @property
    def routed_by_prefix(self) -> bool:
        """Return whether gateways choose the replica by a request's prefix; one replica needs no choice."""
        return self.routing == "prefix" and max(self.min_workers, self.max_workers) > 1

    @property
    def default_route(self) -> str:
        """The model's own route, which its default version's application owns."""
        return f"/v2/models/{self.name}" if self.fast_path == "oip" else f"/predictions/{self.name}"

    @property
    def route(self) -> str:
        """The version's explicit route, which begins with the model's own."""
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
    """What a version is, as far as the control plane has seen."""

    phase: Phase = "stopped"
    replicas: int = 0  # running now
    last_error: str = ""  # stays when the version runs again
    error_time: float = 0.0  # of it, in seconds since the epoch
    workers: tuple[ReplicaInfo, ...] = ()
    start_seconds: float = 0.0  # from none to the first that was ready, when that was last seen
    signature: Signature | None = None  # what its handler says that it takes and gives
    input_type: str = ""  # the media type of its input, where its handler declares one
    schemas: Mapping[str, Any] | None = None  # the JSON schemas of input and output, of a model class
    waiting_for: str = ""  # the resources that replicas without a place wait for


@dataclass(frozen=True, slots=True)
class Registration:
    """What a caller asks for when registering an archive; None where it did not say.

    ``url`` is a bare name in the model store, or a URI of any scheme that ``store.allowed_urls`` allows. It
    may end in ``?sha256=`` or ``#sha256=`` with the expected digest.
    """

    url: str
    model_name: str | None = None
    handler: str | None = None
    task: str | None = None  # of a Hugging Face folder: what it is asked, as transformers' pipelines call it
    runtime: str | None = None
    batch_size: int | None = None
    max_batch_delay: int | None = None  # milliseconds
    initial_workers: int | None = None
    response_timeout: int | None = None  # seconds
    startup_timeout: int | None = None  # seconds
    wait: bool = True  # until the workers are ready, or have failed
    # Patterns of the models that its caller may manage; the model's name must match one.
    allowed_models: tuple[str, ...] = ("*",)
    s3_sse_kms: bool = False  # an https URL of S3's is asked for with credentials, or not at all
    sha256: str | None = None  # expected digest of the archive, in hex; another one is refused
    trusted: bool = False  # its weights and, of a folder, its own code may run as they load
    id: str | None = None  # by which its caller finds its events; else one is made


Stage = Literal[
    "accepted",  # a registration, or a change of a version's workers, begins
    "downloading",  # bytes, total and percent, where they are known
    "unpacking",  # the same
    "checking",
    "installing",  # a line of the installer's
    "starting",  # how many workers, and what they wait for
    "loading",  # a worker's handler loads its model
    "warming",
    "ready",
    "failed",
]
FINAL_STAGES = ("ready", "failed")


@dataclass(frozen=True, slots=True)
class ModelEvent:
    """Something that happened to a model on its way to being served."""

    id: int  # higher than those of all events before it, also before a restart
    registration: str
    model: str  # as far as it is known: the name that was asked for, then the manifest's
    version: str  # empty before the manifest has said it
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
    """How far a change of a version's replicas has come.

    ``done``: they are all there; ``processing``: asked for without waiting; ``partial``: waited for,
    and some are still on their way.
    """

    ref: ModelRef
    replicas: int
    state: Literal["done", "processing", "partial"]
    bounds: tuple[int, int] | None = None  # autoscaling holds from now on, between so many
    previous_bounds: tuple[int, int] | None = None  # autoscaling held until now, and is off
    advice: str = ""  # how there is more to be had of the version


@dataclass(frozen=True, slots=True)
class VersionStats:
    """What the whole cluster has counted of one version, since it was first asked."""

    model: str
    version: str
    answered: int  # calls
    failed: int
    seconds: float  # from the calls' arrival to their answers, all together
    rows: int
    queue_seconds: float  # that they waited for their batches
    batches: int
    inference_seconds: float  # that these were in the handler
    last_batch_at: float = 0.0  # when the last batch ran, in seconds since the epoch; 0: none has
    # Rows of a batch (of tensors: along the first axis), how many such, and their seconds in the handler.
    batch_sizes: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class VersionDescription:
    """A version as the management API describes it."""

    spec: ModelSpec
    status: ModelStatus
    default: bool
    pending: int = 0  # rows waiting in its replicas' queues
    metadata: Any = None  # what the handler's describe said, where it was asked
