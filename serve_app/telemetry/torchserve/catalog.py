"""The catalog of metrics: TorchServe's default one as a table, and the parser of a ``metrics.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serve_app.domain import validation
from serve_app.errors import ConfigurationError

Kind = Literal["counter", "gauge", "histogram"]

HOSTNAME = "Hostname"  # added to the dimensions of every model metric
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_DIMENSION = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric by its name; ``dimensions`` are its labels, in the order they are shown."""

    name: str
    kind: Kind
    unit: str
    dimensions: tuple[str, ...]

    @property
    def help(self) -> str:
        return f"Torchserve prometheus {self.kind} metric with unit: {self.unit}"


@dataclass(frozen=True)
class MetricCatalog:
    """The metrics of the server (``server``) and of handlers (``model``), by name."""

    server: Mapping[str, MetricFamily]
    model: Mapping[str, MetricFamily]

    def __iter__(self) -> Iterator[MetricFamily]:
        yield from self.server.values()
        yield from self.model.values()


@dataclass(frozen=True)
class DeclaredMetric:
    """A metric of a metrics.yaml."""

    name: str
    unit: str
    dimensions: list[str]
    __pydantic_config__ = validation.STRICT


_Section = dict[Kind, list[DeclaredMetric] | None] | None


@dataclass(frozen=True)
class _MetricsFile:
    """The content of a metrics.yaml; ``dimensions`` has YAML anchors only."""

    dimensions: Any = None
    ts_metrics: _Section = None
    model_metrics: _Section = None
    __pydantic_config__ = validation.STRICT


_HOST = ("Level", HOSTNAME)
_MODEL = ("model_name", "model_version", "hostname")
_DEVICE = ("Level", "DeviceId", HOSTNAME)
_HANDLER = ("ModelName", "Level", HOSTNAME)

SERVER = (
    MetricFamily("Requests2XX", "counter", "Count", _HOST),
    MetricFamily("Requests4XX", "counter", "Count", _HOST),
    MetricFamily("Requests5XX", "counter", "Count", _HOST),
    MetricFamily("ts_inference_requests_total", "counter", "Count", _MODEL),
    MetricFamily("ts_inference_latency_microseconds", "counter", "Microseconds", _MODEL),
    MetricFamily("ts_queue_latency_microseconds", "counter", "Microseconds", _MODEL),
    MetricFamily("QueueTime", "gauge", "Milliseconds", _HOST),
    MetricFamily("WorkerThreadTime", "gauge", "Milliseconds", _HOST),
    MetricFamily("WorkerLoadTime", "gauge", "Milliseconds", ("WorkerName", *_HOST)),
    MetricFamily("CPUUtilization", "gauge", "Percent", _HOST),
    MetricFamily("MemoryUsed", "gauge", "Megabytes", _HOST),
    MetricFamily("MemoryAvailable", "gauge", "Megabytes", _HOST),
    MetricFamily("MemoryUtilization", "gauge", "Percent", _HOST),
    MetricFamily("DiskUsage", "gauge", "Gigabytes", _HOST),
    MetricFamily("DiskUtilization", "gauge", "Percent", _HOST),
    MetricFamily("DiskAvailable", "gauge", "Gigabytes", _HOST),
    MetricFamily("GPUMemoryUtilization", "gauge", "Percent", _DEVICE),
    MetricFamily("GPUMemoryUsed", "gauge", "Megabytes", _DEVICE),
    MetricFamily("GPUUtilization", "gauge", "Percent", _DEVICE),
)
MODEL = (
    MetricFamily("HandlerTime", "gauge", "ms", _HANDLER),
    MetricFamily("PredictionTime", "gauge", "ms", _HANDLER),
)
# The metrics of `handler: {profile: true}`.
PROFILE = tuple(
    MetricFamily(f"ts_handler_{stage}", "gauge", "ms", _HANDLER)
    for stage in ("preprocess", "inference", "postprocess")
)
# The metrics of the handler `llm`.
GENERATION = (
    MetricFamily("TimeToFirstToken", "gauge", "ms", _HANDLER),
    MetricFamily("TokensPerSecond", "gauge", "tokens", _HANDLER),
    MetricFamily("PromptTokens", "counter", "count", _HANDLER),
    MetricFamily("GeneratedTokens", "counter", "count", _HANDLER),
    MetricFamily("CacheUse", "gauge", "percent", _HANDLER),
    MetricFamily("PrefixCacheQueries", "counter", "count", _HANDLER),
    MetricFamily("PrefixCacheHits", "counter", "count", _HANDLER),
)
BUILT_IN = (*PROFILE, *GENERATION)  # present with any metrics.yaml


def _by_name(*families: MetricFamily) -> dict[str, MetricFamily]:
    return {family.name: family for family in families}


DEFAULT = MetricCatalog(_by_name(*SERVER), _by_name(*MODEL, *BUILT_IN))


def validation_error(name: str, dimensions: tuple[str, ...]) -> str:
    """Return why Prometheus does not accept this name or these dimensions; "" where it does."""
    if not _NAME.fullmatch(name):
        return f"the name {name!r} has other characters than letters, digits, _ and :"
    if name.startswith("torchrelay_"):
        return f"the name {name!r} has the prefix of the server's own metrics"
    for dimension in dimensions:
        if not _DIMENSION.fullmatch(dimension) or dimension == "le":
            return (
                f"the dimension {dimension!r} is not a valid label: use letters, digits and _, and not 'le'"
            )
    if len(set(dimensions)) < len(dimensions):
        return f"a dimension is given twice: {', '.join(dimensions)}"
    return ""


def load(path: Path) -> MetricCatalog:
    """Return the metrics of a file in the form of TorchServe's metrics.yaml, and the built-in handlers'.

    Raises ConfigurationError with the place and the remedy.
    """
    try:
        return parse(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigurationError(
            str(path), f"{error.strerror}; set telemetry.metrics_config to a file"
        ) from None


def parse(text: str | bytes, where: str) -> MetricCatalog:
    """Return the metrics of a text; ``where`` is its origin, for errors."""
    try:
        file = validation.read(_MetricsFile, validation.parse_yaml(text))
    except validation.DocumentError as error:
        raise ConfigurationError(where, str(error)) from None
    server = _families(f"{where}: ts_metrics", file.ts_metrics, ())
    model = _families(f"{where}: model_metrics", file.model_metrics, (HOSTNAME,))
    for name, family in server.items():
        default = DEFAULT.server.get(name)
        if default is not None and len(default.dimensions) != len(family.dimensions):
            required = ", ".join(default.dimensions)
            raise ConfigurationError(
                f"{where}: ts_metrics", f"{name} has the dimensions {required}, in this order"
            )
        if name in model:
            raise ConfigurationError(where, f"{name} is in both sections; remove it from one")
    built_in = {family.name: family for family in BUILT_IN if family.name not in server}
    return MetricCatalog(server, built_in | model)


def _families(where: str, section: _Section, added: tuple[str, ...]) -> dict[str, MetricFamily]:
    families: dict[str, MetricFamily] = {}
    for kind, metrics in (section or {}).items():
        for i, metric in enumerate(metrics or ()):
            labels = (*(each for each in metric.dimensions if each not in added), *added)
            error = validation_error(metric.name, labels)
            if error:
                raise ConfigurationError(f"{where}.{kind}[{i}]", f"{error}; rename it")
            if metric.name in families:
                raise ConfigurationError(
                    f"{where}.{kind}[{i}]", f"{metric.name} is declared twice; remove one"
                )
            families[metric.name] = MetricFamily(metric.name, kind, metric.unit, labels)
    return families
