"""Which metrics there are: TorchServe's default catalogue as a table, and the reading of a ``metrics.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from serve_app.documents import near_miss
from serve_app.errors import ConfigurationError

Kind = Literal["counter", "gauge", "histogram"]
KINDS = ("counter", "gauge", "histogram")

HOSTNAME = "Hostname"  # comes to every dimension list of a model's metric
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_DIMENSION = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SECTIONS = ("dimensions", "ts_metrics", "model_metrics")
_FIELDS = ("name", "unit", "dimensions")


@dataclass(frozen=True, slots=True)
class Family:
    """A metric by its name; ``dimensions`` are its labels, in the order they are shown."""

    name: str
    kind: Kind
    unit: str
    dimensions: tuple[str, ...]

    @property
    def help(self) -> str:
        return f"Torchserve prometheus {self.kind} metric with unit: {self.unit}"


@dataclass(frozen=True)
class Catalogue:
    """``server`` has what the server itself measures, ``model`` what handlers do; both by name."""

    server: Mapping[str, Family]
    model: Mapping[str, Family]

    def __iter__(self) -> Iterator[Family]:
        yield from self.server.values()
        yield from self.model.values()


_HOST = ("Level", HOSTNAME)
_MODEL = ("model_name", "model_version", "hostname")
_DEVICE = ("Level", "DeviceId", HOSTNAME)
_HANDLER = ("ModelName", "Level", HOSTNAME)

SERVER = (
    Family("Requests2XX", "counter", "Count", _HOST),
    Family("Requests4XX", "counter", "Count", _HOST),
    Family("Requests5XX", "counter", "Count", _HOST),
    Family("ts_inference_requests_total", "counter", "Count", _MODEL),
    Family("ts_inference_latency_microseconds", "counter", "Microseconds", _MODEL),
    Family("ts_queue_latency_microseconds", "counter", "Microseconds", _MODEL),
    Family("QueueTime", "gauge", "Milliseconds", _HOST),
    Family("WorkerThreadTime", "gauge", "Milliseconds", _HOST),
    Family("WorkerLoadTime", "gauge", "Milliseconds", ("WorkerName", *_HOST)),
    Family("CPUUtilization", "gauge", "Percent", _HOST),
    Family("MemoryUsed", "gauge", "Megabytes", _HOST),
    Family("MemoryAvailable", "gauge", "Megabytes", _HOST),
    Family("MemoryUtilization", "gauge", "Percent", _HOST),
    Family("DiskUsage", "gauge", "Gigabytes", _HOST),
    Family("DiskUtilization", "gauge", "Percent", _HOST),
    Family("DiskAvailable", "gauge", "Gigabytes", _HOST),
    Family("GPUMemoryUtilization", "gauge", "Percent", _DEVICE),
    Family("GPUMemoryUsed", "gauge", "Megabytes", _DEVICE),
    Family("GPUUtilization", "gauge", "Percent", _DEVICE),
)
MODEL = (
    Family("HandlerTime", "gauge", "ms", _HANDLER),
    Family("PredictionTime", "gauge", "ms", _HANDLER),
)
# What `handler: {profile: true}` measures.
PROFILE = tuple(
    Family(f"ts_handler_{stage}", "gauge", "ms", _HANDLER) for stage in ("preprocess", "inference", "postprocess")
)
# What the handler `llm` measures.
GENERATION = (
    Family("TimeToFirstToken", "gauge", "ms", _HANDLER),
    Family("TokensPerSecond", "gauge", "tokens", _HANDLER),
    Family("PromptTokens", "counter", "count", _HANDLER),
    Family("GeneratedTokens", "counter", "count", _HANDLER),
    Family("CacheUse", "gauge", "percent", _HANDLER),
)
OURS = (*PROFILE, *GENERATION)  # known whatever a file declares


def _by_name(*families: Family) -> dict[str, Family]:
    return {family.name: family for family in families}


DEFAULT = Catalogue(_by_name(*SERVER), _by_name(*MODEL, *OURS))


def complaint(name: str, dimensions: tuple[str, ...]) -> str:
    """Why Prometheus could not hold a metric of that name, those dimensions; "" where it can."""
    if not _NAME.fullmatch(name):
        return f"the name {name!r} has other characters than letters, digits, _ and :"
    if name.startswith("torchrelay_"):
        return f"the name {name!r} begins as the server's own do"
    for dimension in dimensions:
        if not _DIMENSION.fullmatch(dimension) or dimension == "le":
            return f"the dimension {dimension!r} is no name that Prometheus takes: letters, digits and _, and not 'le'"
    if len(set(dimensions)) < len(dimensions):
        return f"a dimension stands twice: {', '.join(dimensions)}"
    return ""


def read(path: Path) -> Catalogue:
    """What a file in the form of TorchServe's metrics.yaml declares, and besides only what handlers of ours measure.

    Raises ConfigurationError, which names the place and the cure.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigurationError(str(path), f"{error.strerror}; set telemetry.metrics_config to a file") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(str(path), f"this is no text: {error}") from None


def parse(text: str, where: str) -> Catalogue:
    """``read`` of a text; ``where`` is its place."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(where, f"this is no YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigurationError(where, f"the file must be a mapping with {_listed(_SECTIONS)}")
    _known(where, document, _SECTIONS)
    server = _section(f"{where}: ts_metrics", document.get("ts_metrics"), ())
    model = _section(f"{where}: model_metrics", document.get("model_metrics"), (HOSTNAME,))
    for name, family in server.items():
        ours = DEFAULT.server.get(name)
        if ours is not None and len(ours.dimensions) != len(family.dimensions):
            wanted = ", ".join(ours.dimensions)
            raise ConfigurationError(f"{where}: ts_metrics", f"{name} has the dimensions {wanted}, in this order")
        if name in model:
            raise ConfigurationError(where, f"{name} stands in both sections; take it out of one")
    ours = {family.name: family for family in OURS if family.name not in server}
    return Catalogue(server, ours | model)


def _section(where: str, section: Any, more: tuple[str, ...]) -> dict[str, Family]:
    families: dict[str, Family] = {}
    if section is None:
        return families
    if not isinstance(section, dict):
        raise ConfigurationError(where, f"must be a mapping with {_listed(KINDS)}")
    _known(where, section, KINDS)
    for kind, metrics in section.items():
        if not isinstance(metrics, list | None):
            raise ConfigurationError(f"{where}.{kind}", "must be a list of metrics")
        for i, metric in enumerate(metrics or ()):
            family = _family(f"{where}.{kind}[{i}]", kind, metric, more)
            if family.name in families:
                raise ConfigurationError(f"{where}.{kind}[{i}]", f"{family.name} is declared twice; take one out")
            families[family.name] = family
    return families


def _family(where: str, kind: str, metric: Any, more: tuple[str, ...]) -> Family:
    if not isinstance(metric, dict):
        raise ConfigurationError(where, f"must be a mapping with {_listed(_FIELDS)}")
    _known(where, metric, _FIELDS)
    for field in ("name", "unit"):
        if not isinstance(metric.get(field), str):
            raise ConfigurationError(where, f"{field} must be a text (got {metric.get(field)!r})")
    dimensions = metric.get("dimensions")
    if not isinstance(dimensions, list) or not all(isinstance(each, str) for each in dimensions):
        raise ConfigurationError(where, f"dimensions must be a list of names (got {dimensions!r})")
    labels = (*(each for each in dimensions if each not in more), *more)
    if why := complaint(metric["name"], labels):
        raise ConfigurationError(where, f"{why}; rename it")
    return Family(metric["name"], cast(Kind, kind), metric["unit"], labels)


def _known(where: str, mapping: dict[Any, Any], known: tuple[str, ...]) -> None:
    for key in mapping:
        if key not in known:
            near = near_miss(str(key), list(known))
            cure = f"did you mean {near!r}?" if near else f"known here: {', '.join(known)}"
            raise ConfigurationError(where, f"unknown key {key!r}; {cure}")


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
