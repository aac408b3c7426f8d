"""The steps from a registration to a spec: an archive is fetched, stored and checked before any change."""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path
from typing import Any, Literal

from serve_app.control.capture_check import check_capture
from serve_app.control.scaling import check_policy
from serve_app.domain import limits
from serve_app.domain.access import matches
from serve_app.domain.adapter import AdapterRequest, AdapterSpec
from serve_app.domain.model import VERSION, ModelRef, ModelSpec, Registration, check_name, check_word
from serve_app.domain.pool import PoolSettings, check_pool_name
from serve_app.domain.urls import redact_url
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import (
    ArchiveNotFound,
    BadRequest,
    CannotBePooled,
    ConfigurationError,
    Unavailable,
    WorkflowArchiveNotFound,
)
from serve_app.model_store import workflow_archive
from serve_app.model_store.archive import (
    SCRIPT_HANDLERS,
    Archive,
    Manifest,
    ModelConfig,
    archive_stem,
    find_adapter_folder,
    handler_module,
    is_mlflow_model,
    is_model_folder,
)
from serve_app.model_store.atomic_dir import temporary_dir
from serve_app.model_store.cache import ArchiveCache, CachedArchive
from serve_app.model_store.model_check import check_model
from serve_app.model_store.signatures import (
    MAX_BYTES,
    SignatureCheck,
    SignatureVerifier,
    signature_names,
    signature_url,
)
from serve_app.model_store.sources import fetch, file_path, list_entries, split_digest
from serve_app.model_store.workflow_archive import WorkflowModel
from serve_app.settings import ModelStoreSettings, RuntimeSettings, Settings, VersionSettings

log = logging.getLogger(__name__)

OnBytes = Callable[[int, "int | None"], None]
OnProgress = Callable[..., None]  # is called with a stage of domain.model.Stage and its details

_SUFFIXES = (".mar", ".tar.gz", ".tgz", ".zip")

FUNCTIONS = "handlers.loading.workflow_functions:WorkflowFunctions"  # the handler of a workflow's functions
_PREFIX_CACHING_HANDLERS = ("llm", "vllm_handler", "trt_llm_handler")
RUNTIMES = ("python", "python3", "LSP")

_NO_OVERRIDES = VersionSettings()

# A name is part of a route, and twice of the name of each replica's log file, which has at most 255 bytes.
_MAX_LENGTH = 100

# Keys of model-config.yaml for which other sources count too; a spec has all others as the file has them.
_COMBINED_KEYS = {
    "min_workers",
    "max_workers",
    "batch_size",
    "max_batch_delay",
    "response_timeout",
    "startup_timeout",
    "autoscaling",
    "batcher",
    "routing",
    "pool",
}
_FILE_KEYS = {f.name for f in dataclasses.fields(ModelConfig)} & {
    f.name for f in dataclasses.fields(ModelSpec)
} - _COMBINED_KEYS

# Keys of model-config.yaml that @serve.batch cannot serve -> the fields of ModelConfig, and why.
_WITHOUT_RAY = {
    "sequenceBatching": ("sequence_batching", "a batch takes one row of each sequence"),
    "continuousBatching": ("continuous_batching", "rows join and leave a running batch"),
    "useJobTicket": ("use_job_ticket", "a row is taken only where the model is idle"),
    "bucket_by_length": ("bucket_by_length", "a batch is chosen among all waiting rows"),
}

# Defaults of a stateful model; times in milliseconds.
_SEQUENCE_DEFAULTS = {"sequence_max_idle": 60_000, "max_num_sequence": 100, "max_sequence_job_queue_size": 16}


def _ignore_progress(stage: str, **details: object) -> None:
    pass


class ArchiveIngestor:
    """The fetching, checking and caching of archives. Every method blocks: call it from a thread.

    Calls of ``ingest`` may overlap each other, and never a call of ``remove_unused``.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._model_store, self._workflow_store = settings.model_store, settings.workflow_store
        self._signature_limits = dataclasses.replace(settings.store, max_archive_bytes=MAX_BYTES)
        self._cache = ArchiveCache(settings.state_dir, settings.store)
        self._signatures = SignatureVerifier(settings.store, settings.root)
        # Digests that may be removed. At first all of them: a Management that was killed removed nothing.
        self._removable: set[str] = self._cache.digests()

    def ingest(
        self,
        registration: Registration,
        at_startup: bool = False,
        on_progress: OnProgress = _ignore_progress,
    ) -> ModelSpec:
        """Store the archive that ``registration`` names in the cache and return the spec of its version.

        ``on_progress`` is called from this thread. Raises ArchiveNotFound, DownloadFailed, InvalidArchive,
        SignatureRejected, ConfigurationError, BadRequest, and Unavailable on a full disk.
        """
        settings = self._settings
        stored, source, signature = self._store(registration, self._model_store, on_progress, at_startup)
        archive = dataclasses.replace(
            Archive.read(stored.directory, source, settings.store.default_service_handler),
            digest=stored.digest,
            uri=stored.uri,
            size=stored.size,
            signed_by=signature.signed_by,
        ).with_names(registration.model_name, registration.version, registration.handler)
        manifest = archive.manifest
        signature.check_names(manifest.model_name)
        trusted = registration.trusted or any(
            fnmatchcase(name, pattern)
            for name in (manifest.model_name, registration.url)
            for pattern in settings.store.trusted
        )
        task = registration.task or archive.config.task or settings.store.default_task or None
        config = check_model(archive, task, trusted)
        if config.capture is not None:
            check_capture(config.capture, archive, settings)
        spec = build_spec(registration, archive, config, settings, at_startup)
        warnings = [f"{source}: {problem}" for problem in _find_ineffective(manifest, config, spec)]
        for warning in warnings:
            log.warning("%s", warning)
        if config.warnings or warnings:
            on_progress("checking", warnings=[*config.warnings, *warnings])
        return spec

    def ingest_adapter(self, request: AdapterRequest, base: ModelSpec) -> AdapterSpec:
        """Store a LoRA adapter in the cache, as an archive is. Raises as ``ingest`` does.

        It needs a signature where the version ``base``, whose outputs it changes, needs one.
        """
        registration = Registration(request.url, sha256=request.sha256)
        stored, source, signature = self._store(registration, self._model_store, _ignore_progress, False)
        signature.check_names(*signature_names(base))
        find_adapter_folder(stored.directory, source)
        return AdapterSpec(request.name, request.url, stored.digest, stored.uri, signature.signed_by)

    def ingest_workflow(
        self, registration: Registration
    ) -> tuple[ModelSpec, list[Registration], tuple[WorkflowModel, ...]]:
        """Return the spec of the workflow in a .war, its models, and a registration for each of them.

        Raises WorkflowArchiveNotFound, InvalidWorkflow, LimitExceeded and whatever ``ingest`` raises.
        """
        url = registration.url
        try:
            stored, source, signature = self._store(
                registration, self._workflow_store, _ignore_progress, False
            )
        except ArchiveNotFound as error:
            where = "at" if "://" in url or url.startswith("/") else "in workflow store"
            is_missing = str(error).startswith("Model not found at: ")
            raise WorkflowArchiveNotFound(
                f"Workflow not found {where}: {redact_url(url)}" if is_missing else str(error)
            ) from None
        archive = workflow_archive.read(stored.directory, source, registration.model_name)
        for member in archive.members:  # before any of their archives is fetched
            limits.check(member, self._settings.limits, f"{source}: model {member.name}")
        signature.check_names(archive.graph.name)
        spec = build_workflow_spec(
            registration,
            archive.graph,
            self._settings,
            digest=stored.digest,
            archive=stored.uri,
            file=archive.file,
        ).with_(signed_by=signature.signed_by)
        registrations = [
            dataclasses.replace(
                registration,
                url=member.url,
                sha256=None,
                model_name=member.name,
                batch_size=member.batch_size,
                max_batch_delay=member.max_batch_delay,
                initial_workers=member.max_workers,
                id=None,
            )
            for member in archive.members
        ]
        return spec, registrations, archive.members

    def _store(
        self, registration: Registration, store: Path, on_progress: OnProgress, by_operator: bool
    ) -> tuple[CachedArchive, str, SignatureCheck]:
        """Store an archive in the cache; return it, its file name, and the check of its signature.

        Raises Unavailable on a full disk.
        """
        try:
            return self._fetch_and_store(registration, store, on_progress, by_operator)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            folders = f"{self._settings.state_dir} and {tempfile.gettempdir()}"
            raise Unavailable(
                f"{redact_url(registration.url)} cannot be stored: {error.strerror}. "
                f"Free space in {folders}, and register it again."
            ) from None

    def _fetch_and_store(
        self, registration: Registration, store: Path, on_progress: OnProgress, by_operator: bool
    ) -> tuple[CachedArchive, str, SignatureCheck]:
        url, sha256 = _parse_digest(registration)
        with temporary_dir(Path(tempfile.gettempdir())) as folder:

            def fetch_file(
                address: str, name: str, progress: OnBytes, store_settings: ModelStoreSettings
            ) -> Path:
                into = folder / name
                into.mkdir()
                return fetch(
                    address, store_settings, store, into, progress, registration.s3_sse_kms, by_operator
                )

            source = fetch_file(
                url,
                "archive",
                lambda done, total: on_progress("downloading", bytes=done, total=total),
                self._settings.store,
            )
            names = [source.name, url, *filter(None, [registration.model_name]), archive_stem(source.name)]
            check = SignatureCheck(
                self._signatures,
                names,
                lambda: fetch_file(
                    signature_url(url), "signature", lambda done, total: None, self._signature_limits
                ),
            )
            stored = self._cache.store(
                source,
                source.name,
                lambda done, total: on_progress("unpacking", bytes=done, total=total),
                sha256=sha256,
                verify=check.verify,
            )
        on_progress("checking")
        self._removable.add(stored.digest)
        return stored, source.name, check

    def directory(self, spec: ModelSpec) -> Path:
        """Return the directory with a version's unpacked archive on this node."""
        return self._cache.open(spec.archive, spec.digest)

    def startup_registrations(self) -> list[Registration]:
        """Return the registrations of ``control.load_models``: all of the model store, none, or a list.

        Raises ConfigurationError where the model store cannot be read.
        """
        names = self._settings.control.load_models.strip()
        if names in ("", "none"):
            return []
        if names == "all":
            entries = list_entries(self._model_store)
            return [Registration(path.name) for path in entries if _is_archive(path)]
        return [_parse_registration(item.strip()) for item in names.split(",") if item.strip()]

    def mark_unused(self, digest: str) -> None:
        """Mark the archive of a removed version for removal."""
        self._removable.add(digest)

    def remove_unused(self, used: frozenset[str]) -> None:
        """Remove the archives of refused and removed versions: all marked ones but those in ``used``."""
        while self._removable:
            digest = self._removable.pop()
            if digest not in used:
                try:
                    self._cache.remove(digest)
                except OSError as error:  # of a disk: the next start removes it
                    log.warning("the archive %s was not removed: %s", digest, error)

    def read_chunk(self, stored: ModelSpec | AdapterSpec, offset: int, length: int) -> bytes:
        """Read a chunk of a stored archive; it is empty at the end of the file."""
        path = file_path(stored.archive)
        assert path is not None, "the cache stores archives in files"
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)


def _parse_digest(registration: Registration) -> tuple[str, str | None]:
    """Return the URL of a registration, and the digest that it or its URL has. Raises BadRequest."""
    url, in_url = split_digest(registration.url)
    given = {digest.lower() for digest in (registration.sha256, in_url) if digest is not None}
    for digest in given:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise BadRequest(f"sha256 is {digest[:80]!r}; it is 64 hex digits, as sha256sum prints them.")
    if len(given) > 1:
        raise BadRequest("sha256 differs between the parameter and the URL; leave one of them out.")
    return url, next(iter(given), None)


def _parse_registration(item: str) -> Registration:
    """Parse ``a.mar`` or ``name=a.mar``; a URL may contain equals signs of its own."""
    name, equals, url = item.partition("=")
    is_named = equals and not {"/", ":"} & set(name)
    return Registration(url, model_name=name) if is_named else Registration(item)


def _is_archive(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    try:
        if path.is_dir():
            return (path / "MAR-INF").is_dir() or is_model_folder(path) or is_mlflow_model(path)
    except OSError as error:  # a folder without permission must not keep the others from loading
        log.error("%s was not loaded: %s", path, error)
        return False
    return path.name.lower().endswith(_SUFFIXES)


def _find_ineffective(manifest: Manifest, config: ModelConfig, spec: ModelSpec) -> Iterator[str]:
    """Yield what the author of an archive requests and this server does not do."""
    if config.unserved:
        yield f"{', '.join(config.unserved)} in its {manifest.config_file}: not served, and without effect"
    if manifest.requirements_file is not None and not spec.requirements:
        cure = "runtime.install_py_dep_per_model, or useVenv: true in its model-config.yaml, installs it"
        yield f"its {manifest.requirements_file} is not installed; {cure}"
    if spec.device_type == "gpu" and not spec.num_gpus:
        cure = "num_gpus in the same file, or runtime.num_gpus, does"
        yield f"deviceType gpu alone claims no GPU, so its replicas get none; {cure}"


# Specs: pure functions of an archive or a workflow, its registration and the settings


def build_spec(
    registration: Registration,
    archive: Archive,
    config: ModelConfig,
    settings: Settings,
    at_startup: bool,
) -> ModelSpec:
    """Build the spec of a version from its registration, its archive and the settings.

    ``config`` is the archive's effective configuration, as ``check_model`` returns it.

    The first source with a value applies; ``control.models`` holds settings of single versions. Batch size
    and delay: registration, file, control.models. Timeouts: file, control.models, registration, settings.
    Workers: file, registration, control.models at start-up, settings, and at start-up one. All others: file,
    settings. A number of zero or less is no value, except for workers. Raises BadRequest, and LimitExceeded
    for a number of any source that is beyond its limit, also where another source has precedence.
    """
    defaults, manifest, place = settings.runtime, archive.manifest, archive.config_place
    limits.check(registration, settings.limits, "the registration")
    limits.check(config.raw, settings.limits, place)
    limits.check({"tensor_parallel*pipeline_parallel": _ranks(config)}, settings.limits, place)
    if _ranks(config) > 1 and config.num_gpus not in (None, 0, 1):
        why = (
            f"num_gpus: {config.num_gpus:g}; a rank of a sharded model has one GPU to itself: 1, "
            f"or 0 for CPUs"
        )
        raise ConfigurationError(manifest.config_file or "", why)
    ref = _ref(registration.model_name or manifest.model_name, manifest.version)
    version_settings = settings.control.models.get(ref.name, {}).get(ref.version, _NO_OVERRIDES)
    min_workers, max_workers = _workers(registration, config, version_settings, settings, at_startup)
    options: dict[str, Any] = {
        "job_queue_size": defaults.job_queue_size,
        "batcher": _batcher(config, defaults, place),
        "routing": config.routing or _default_routing(registration.handler or manifest.handler, config),
        "num_cpus": defaults.num_cpus,
        "num_gpus": _gpus(config, defaults.num_gpus),
        **{key: getattr(config, key) for key in _FILE_KEYS if getattr(config, key) is not None},
    }
    if config.sequence_batching:
        options |= {key: value for key, value in _SEQUENCE_DEFAULTS.items() if not options.get(key)}
    if config.retries is None and (config.sequence_batching or config.continuous_batching):
        options["retries"] = False  # an executed request has changed the state already
    spec = ModelSpec(
        name=ref.name,
        version=ref.version,
        url=registration.url,
        digest=archive.digest,
        archive=archive.uri,
        archive_bytes=archive.size,
        signed_by=archive.signed_by,
        handler=registration.handler or manifest.handler,
        runtime=_runtime(registration.runtime or manifest.runtime),
        min_workers=min_workers,
        max_workers=max_workers,
        batch_size=_first(registration.batch_size, config.batch_size, version_settings.batch_size) or 1,
        max_batch_delay=_first(
            registration.max_batch_delay, config.max_batch_delay, version_settings.max_batch_delay
        ),
        response_timeout=_first(
            config.response_timeout, version_settings.response_timeout, registration.response_timeout
        )
        or defaults.default_response_timeout,
        startup_timeout=_first(
            config.startup_timeout, version_settings.startup_timeout, registration.startup_timeout
        )
        or defaults.default_startup_timeout,
        loaded_at_startup=at_startup,
        requirements=_requirements(manifest, config, settings) or "",
        autoscaling=config.autoscaling if min_workers < max_workers else None,
        config=dict(config.raw),
        **options,
    )
    if spec.autoscaling is not None:
        check_policy(spec, settings.control)
    spec = _select_pool(spec, config, settings)
    if spec.pool and at_startup and config.min_workers is None and version_settings.min_workers is None:
        return spec.with_(min_workers=0, max_workers=0)  # its first request loads it
    return spec


def build_workflow_spec(
    registration: Registration,
    graph: WorkflowGraph,
    settings: Settings,
    *,
    digest: str = "",
    archive: str = "",
    file: str = "",
) -> ModelSpec:
    """Build the spec of a workflow; ``file`` of its archive defines its functions, where it has any.

    Raises BadRequest, and LimitExceeded as ``build_spec`` does.
    """
    limits.check(registration, settings.limits, "the registration")
    limits.check(graph, settings.limits, f"workflow {graph.name}")
    ref = _ref(graph.name, graph.version)
    defaults = settings.runtime
    functions = {"file": file, "names": list(graph.functions), "plain": bool(graph.torchserve)}
    workers = graph.workers if file else 0
    return ModelSpec(
        name=ref.name,
        version=ref.version,
        url=registration.url,
        digest=digest,
        archive=archive,
        handler=FUNCTIONS if file else "",
        min_workers=workers,
        max_workers=workers,
        response_timeout=registration.response_timeout or defaults.default_response_timeout,
        startup_timeout=registration.startup_timeout or defaults.default_startup_timeout,
        client_timeout=ceil(graph.timeout_s * 1000) if graph.timeout_s is not None else 0,
        job_queue_size=defaults.job_queue_size,
        num_cpus=defaults.num_cpus,
        graph=graph,
        config={"functions": functions} if file else {},
    )


def build_member_spec(spec: ModelSpec, member: WorkflowModel) -> ModelSpec:
    """Build the spec of a model that a workflow brings; the workflow determines its workers."""
    low, high = member.min_workers, member.max_workers
    return spec.with_(min_workers=low, max_workers=high, autoscaling=spec.autoscaling if low < high else None)


def _first(*numbers: int | None) -> int | None:
    """Return the first positive number."""
    return next((number for number in numbers if number is not None and number > 0), None)


def _workers(
    registration: Registration,
    config: ModelConfig,
    version_settings: VersionSettings,
    settings: Settings,
    at_startup: bool,
) -> tuple[int, int]:
    if config.min_workers is not None:
        low, high = config.min_workers, config.max_workers or config.min_workers
        if config.autoscaling is not None and config.max_workers and config.raw.get("minWorkers") == 0:
            low = 0  # TorchServe reads 1; with autoscaling configured, 0 is meant
        if high >= low:
            return low, high
    if registration.initial_workers is not None:
        count = max(0, registration.initial_workers)
    elif at_startup and version_settings.min_workers is not None:
        low = version_settings.min_workers
        return low, max(low, version_settings.max_workers or 0)
    else:
        count = _first(settings.runtime.default_workers_per_model) or int(at_startup)
    return count, count


def _gpus(config: ModelConfig, default: float) -> float:
    """Return the GPUs of a replica whose file has no ``num_gpus``."""
    if config.device_type == "cpu":
        return 0.0  # a share would be idle
    if _ranks(config) > 1:
        return float(ceil(default))  # no two ranks can share one
    if config.parallel_type == "custom" and config.parallel_level is not None:
        return float(config.parallel_level)
    return default


def _batcher(config: ModelConfig, defaults: RuntimeSettings, place: str) -> Literal["torchrelay", "ray"]:
    """Return the batcher of the file, else of the settings. Raises ConfigurationError where it cannot be."""
    batcher = config.batcher or defaults.batcher
    for key, (name, reason) in _WITHOUT_RAY.items() if batcher == "ray" else ():
        if getattr(config, name):
            source = "batcher: ray" if config.batcher else "runtime.batcher: ray in the settings"
            remedy = "write batcher: torchrelay into this file"
            raise ConfigurationError(place, f"{key}: {reason}; {source} selects @serve.batch. {remedy}")
    return batcher


def _default_routing(handler: str, config: ModelConfig) -> Literal["load", "prefix"]:
    """Return the routing of a version whose file has none: by prefix where the handler caches prefixes."""
    engine = config.raw.get("engine")
    if handler_module(handler) not in _PREFIX_CACHING_HANDLERS or config.sequence_batching:
        return "load"
    return "load" if isinstance(engine, dict) and engine.get("prefix_caching") is False else "prefix"


def _ranks(config: ModelConfig) -> int:
    return (config.tensor_parallel or 1) * (config.pipeline_parallel or 1)


def _requirements(manifest: Manifest, config: ModelConfig, settings: Settings) -> str | None:
    wanted = config.use_venv or settings.runtime.install_py_dep_per_model
    return manifest.requirements_file if wanted else None


def _runtime(runtime: str) -> str:
    if runtime not in RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")
    return runtime


def _ref(name: str, version: str) -> ModelRef:
    check_word(name, "a model's name has")
    check_name(VERSION, version, "a version has letters, digits and any of _ . - +")
    ref = ModelRef(name, version)
    if len(ref.app) > _MAX_LENGTH:
        raise BadRequest(
            f"{ref.app[:_MAX_LENGTH]!r} is too long: name and version together have at most "
            f"{_MAX_LENGTH - 2} characters; in a version with --, each . and - counts as two."
        )
    return ref


def _select_pool(spec: ModelSpec, config: ModelConfig, settings: Settings) -> ModelSpec:
    """Return the spec with the pool of its model-config.yaml, else with that of the settings.

    An empty name in the file keeps a version out of the pool of the settings. Raises CannotBePooled where the
    file names a pool that cannot have it; then the pool of the settings is not used either.
    """
    name = settings.runtime.pool if config.pool is None else config.pool
    if not name:
        return spec
    try:
        check_pool_name(name)
    except ValueError as error:
        raise BadRequest(f"runtime.pool: {error}") from None
    allowed = settings.pools.get(name, PoolSettings()).allowed_models
    problem = _find_obstacle(spec, config)
    if not problem and not matches(spec.name, allowed):
        problem = f"pools.{name}.allowed_models admits {', '.join(allowed) or 'none'} only"
    if not problem:
        return spec.with_(pool=name)
    if config.pool is None:
        return spec
    raise CannotBePooled(spec.name, spec.version, name, problem)


def _find_obstacle(spec: ModelSpec, config: ModelConfig) -> str:
    """Return why a version cannot share its process with others; empty where it can."""
    obstacles = {
        "it has Python packages of its own, and a process has one set of them": spec.requirements,
        "its shards are processes of their own": spec.ranks > 1,
        "torchrun starts processes of its own": config.torchrun or config.parallel_type,
        "its sequences keep state, which an eviction would lose": spec.sequence_batching,
        "@serve.batch (batcher: ray) has one queue for each process": spec.batcher == "ray",
        "threads and pin apply to a process, which pools.NAME configures": config.threads or config.pin,
        "num_cpus and num_gpus are claimed by hosts, which pools.NAME configures": config.num_cpus
        or config.num_gpus,
        "autoscaling starts replicas, and a pool has a fixed number of hosts": config.autoscaling,
        "its script's modules have names of their own": handler_module(spec.handler) in SCRIPT_HANDLERS,
        "its requests are captured into files of its own replicas": config.capture,
        "recycling replaces replicas, and a pool's host has other versions too": config.recycling
        and config.recycling.is_limited,
        "its LoRA adapters are loaded by all replicas of a version": spec.all_adapters,
    }
    return next((problem for problem, applies in obstacles.items() if applies), "")
