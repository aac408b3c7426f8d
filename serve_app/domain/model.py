"""The words of the design as frozen values: what travels between the rooms."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Literal

from serve_app import autoscaling, signature
from serve_app.autoscaling import Autoscaling
from serve_app.graph import Graph
from serve_app.policy import Policy, Trial
from serve_app.signature import Signature

# Of a call of "tensors" the inputs are tensors (see tensors.py), and so is what it is answered with.
Kind = Literal["predict", "explain", "describe", "tensors"]
Priority = Literal["high", "normal", "low", "shadow"]  # a caller may ask for the first three
Phase = Literal["stopped", "idle", "loading", "ready", "failed"]  # idle: without replicas, until a call wakes it


@dataclass(frozen=True, slots=True)
class ModelRef:
    """One version of one model."""

    name: str
    version: str

    @property
    def app(self) -> str:
        """The name of the Serve application, and of the deployment in it, that runs this version."""
        return f"{self.name}--{self.version}"


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
    batcher: Literal["torchrelay", "ray"] = "torchrelay"
    retries: bool = True  # a failed batch is run again in halves; rows of a dead replica go to another
    bucket_by_length: bool = False  # rows of similar length run together
    use_job_ticket: bool = False  # a row is taken only where the model is idle
    num_cpus: float = 0.1
    num_gpus: float = 0.0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"  # of its ranks
    max_ongoing_requests: int = 0  # 0: as many as the queue and two batches hold
    max_concurrent_requests: int = 0  # of all its replicas together; 0: no limit
    fast_path: Literal["torchserve", "oip"] = "torchserve"
    loaded_at_startup: bool = False
    autoscaling: Autoscaling | None = None  # what was said of it; None: nothing
    graph: Graph | None = None  # of a workflow, whose own workers run its functions alone
    config: Mapping[str, Any] = field(default_factory=dict)  # model-config.yaml, whole, for the handler

    @property
    def ranks(self) -> int:
        """The processes that one replica is; each of them claims ``num_cpus`` and ``num_gpus``."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def tensors(self) -> bool:
        """Whether a row is ``{name: array}``, whatever form its call had."""
        return self.config.get("tensors") is True

    @property
    def signature(self) -> Signature | None:
        """What it takes and gives, where its file says so."""
        said = self.config.get("signature")
        return signature.read(said) if said is not None else None

    @property
    def scaling(self) -> Autoscaling | None:
        """How its replicas follow the load; None where there is one number of them."""
        if self.min_workers >= self.max_workers:
            return None
        return autoscaling.whole(self.autoscaling, self.batch_size)

    @property
    def ref(self) -> ModelRef:
        return ModelRef(self.name, self.version)

    @property
    def sleeps(self) -> bool:
        """Whether it has no workers, and so cannot answer; a workflow without functions needs none."""
        return self.max_workers == 0 and (self.graph is None or bool(self.handler))

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


class _Quick:
    """Pickled as its values in order: half the cost of what a frozen dataclass with slots does by itself."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), attrgetter(*self.__slots__)(self)


@dataclass(frozen=True, slots=True)
class Input(_Quick):
    """One named part of a request, as it came over the wire.

    Decoding waits for the author's thread: a replica's event loop parses no JSON, and the hop
    between processes copies bytes rather than objects.
    """

    name: str
    value: bytes
    content_type: str | None = None


@dataclass(frozen=True, slots=True)
class Call(_Quick):
    """One request in nobody's dialect."""

    model: str
    version: str | None = None
    inputs: tuple[Input, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)  # the client's case is kept
    kind: Kind = "predict"
    request_id: str = ""
    deadline: float | None = None  # absolute, in seconds of time.time(), so that it crosses machines
    priority: Priority = "normal"

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.time() >= self.deadline


@dataclass(frozen=True, slots=True)
class Timings(_Quick):
    """Where a row's time went, in seconds; measured once, reported everywhere."""

    queue: float = 0.0
    inference: float = 0.0
    batch_size: int = 0


@dataclass(frozen=True, slots=True)
class Reply(_Quick):
    """One row's answer: bytes already, with what the handler set on its context."""

    body: bytes
    content_type: str | None = None
    status: int = 200
    phrase: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    version: str = ""
    timings: Timings = Timings()
    arm: str = ""  # "trial/arm" where an experiment or a rollout chose the version


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed reply. The first carries status and headers; ``last`` ends the stream."""

    body: bytes
    last: bool = False
    head: Reply | None = None


class ReplyStream:
    """A reply that comes in pieces: ``head`` has its status and headers, iterating gives the bodies.

    Closing the iterator early (``aclose``) tells the runtime that the caller left. An error in
    mid-stream is raised by the iterator.
    """

    __slots__ = ("head", "_chunks")

    def __init__(self, head: Reply, chunks: AsyncIterator[bytes]) -> None:
        self.head = head
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks

    async def aclose(self) -> None:
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()

    def at_end(self, ended: Callable[[], None]) -> None:
        """Call ``ended``, once, when the last piece was read, an error was raised, or the stream is closed."""
        self._chunks = _Ending(self._chunks, ended)


class _Ending(AsyncIterator[bytes]):
    """Pieces whose end is told."""

    __slots__ = ("_ended", "_pieces")

    def __init__(self, pieces: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        self._pieces = pieces
        self._ended: Callable[[], None] | None = ended

    async def __anext__(self) -> bytes:
        try:
            return await self._pieces.__anext__()
        except BaseException:
            self._end()
            raise

    async def aclose(self) -> None:
        self._end()
        close = getattr(self._pieces, "aclose", None)
        if close is not None:
            await close()

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


@dataclass(frozen=True, slots=True)
class Worker:
    """A replica as a management door shows it."""

    id: str
    pid: int
    started: float  # seconds since the epoch
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
    workers: tuple[Worker, ...] = ()
    start_seconds: float = 0.0  # from none to the first that was ready, when that was last seen
    signature: Signature | None = None  # what its handler says that it takes and gives


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version in the table: only what the data plane needs to choose and to call."""

    version: str
    phase: Phase
    replicas: int
    job_queue_size: int = 100
    max_batch_size: int = 1
    client_timeout: int = 0  # milliseconds, 0: none
    max_concurrent_requests: int = 0  # 0: no limit
    start_seconds: float = 0.0  # that its replicas took to start when they last did; 0: nobody has seen it
    retries: bool = True
    ids: tuple[str, ...] = ()  # of the replicas that run
    healthy: bool = True  # as many replicas as it should have, or within its time to recover
    last_error: str = ""
    loaded_at_startup: bool = False
    wake_timeout: float = 0.0  # seconds that a call waits for a replica of a version that may sleep
    stateful: bool = False  # its calls belong to sequences
    graph: Graph | None = None  # of a workflow: its replicas, if any, run its functions
    signature: Signature | None = None  # what it takes and gives, where file or handler say it


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model in the table."""

    default: str
    versions: Mapping[str, VersionRow]
    policy: Policy = Policy()
    trial: Trial | None = None  # an experiment or a rollout that is on
    sequences: str = ""  # the header in which a call names its sequence; empty where no version is stateful


Right = Literal["infer", "observe", "manage", "token"]


@dataclass(frozen=True, slots=True)
class Grant:
    """What the holder of one key may do, with which models, and until when."""

    rights: frozenset[Right]
    models: tuple[str, ...] = ("*",)  # patterns
    expires: float | None = None  # in seconds of time.time(); None: never

    def covers(self, model: str) -> bool:
        return matches(model, self.models)


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what: the SHA-256 of each key, and its grant. Whoever shows none of these keys may do nothing."""

    grants: Mapping[bytes, Grant] = field(repr=False)


def matches(model: str, patterns: tuple[str, ...]) -> bool:
    """Whether a model's name is one of those that ``patterns`` (``*``, ``team-*``) stand for."""
    return "*" in patterns or any(fnmatchcase(model, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Table:
    """The routing table that the data plane reads. A higher generation is newer."""

    generation: int = 0
    models: Mapping[str, ModelRow] = field(default_factory=dict)
    settled: bool = False  # every version that start-up wanted is ready or has failed
    access: Access | None = None  # None: every door is open to everybody


@dataclass(frozen=True, slots=True)
class Registration:
    """What a caller asks for when registering an archive; None where it did not say.

    ``url`` is a bare name in the model store, or a URI of any scheme that ``store.allowed_urls`` allows.
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
    within: tuple[str, ...] = ("*",)  # patterns that the model's name must match: what its caller may manage
    s3_sse_kms: bool = False  # an https URL of S3's is asked for with credentials, or not at all
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
LAST_STAGES = ("ready", "failed")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a model on its way to being served."""

    id: int  # higher than those of all events before it, also before a restart
    registration: str
    model: str  # as far as it is known: the name that was asked for, then the manifest's
    version: str  # empty before the manifest has said it
    stage: Stage
    time: float  # seconds since the epoch
    said: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a change of a version's replicas has come.

    ``done``: they are all there; ``processing``: asked for without waiting; ``partial``: waited for,
    and some are still on their way.
    """

    ref: ModelRef
    replicas: int
    state: Literal["done", "processing", "partial"]
    between: tuple[int, int] | None = None  # autoscaling holds from now on, between so many
    was_between: tuple[int, int] | None = None  # autoscaling held until now, and is off
    advice: str = ""  # how there is more to be had of the version


@dataclass(frozen=True, slots=True)
class Figures:
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
    last: float = 0.0  # when the last batch ran, in seconds since the epoch; 0: none has
    sizes: tuple[tuple[int, int, float], ...] = ()  # rows of a batch, how many such, and their seconds in the handler


@dataclass(frozen=True, slots=True)
class Description:
    """A version as a management door shows it."""

    spec: ModelSpec
    status: ModelStatus
    default: bool
    pending: int = 0  # rows waiting in its replicas' queues
    metadata: Any = None  # what the handler's describe said, where it was asked
