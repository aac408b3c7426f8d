"""Data capture of a version: the policy that ``capture`` in its model-config.yaml sets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from serve_app.domain import json_path, validation
from serve_app.domain.drift import DriftLevel
from serve_app.domain.drift_window import FeatureDrift
from serve_app.domain.validation import documented

_MAX_PATHS = 100
_MAX_FEATURES = 200
_MAX_REQUESTS = 1_000_000
_MAX_RECORD_BYTES = 16 << 20
_MAX_MEGABYTES = 1 << 20
_MAX_MINUTES = 525_600.0


@dataclass(frozen=True, slots=True)
class CapturePolicy:
    """The requests of a version that are stored, and the windows of its drift statistics."""

    __pydantic_config__ = validation.STRICT
    sample: float = 1.0  # share of the answered requests
    redact: tuple[str, ...] = ()  # JSON paths, of inputs and outputs
    max_bytes_per_request: int = 65_536  # stored of a request and its response; the rest is cut
    max_megabytes: int = 1_024  # of the version's files on a node; 0: nothing is stored
    format: Literal["jsonl", "parquet"] = "jsonl"
    destination: str = ""  # empty: a folder in the server's state
    drift: bool = True
    reference: int | str = 1_000  # the first captured requests, or a file of the archive
    reference_version: str = ""  # its reference is this version's too
    window: int = 1_000  # last captured requests that are compared with the reference
    window_minutes: float = 0.0  # that they are old at most; 0: any age
    max_features: int = 50

    @property
    def stores(self) -> bool:
        return self.max_megabytes > 0

    @property
    def is_remote(self) -> bool:
        """Return whether the files go to an object store."""
        return "://" in self.destination


class CaptureStatus(TypedDict):
    """The policy of a version, and its captured and lost requests since Management started."""

    sample: float
    format: Literal["jsonl", "parquet"]
    destination: Annotated[str, documented("Empty: the folder capture in the server's state.")]
    captured: int
    dropped: Annotated[dict[str, int], documented("By reason.")]
    last_error: str
    last_error_time: Annotated[float, documented("In seconds since the epoch; 0: there was none.")]


class WindowDocument(TypedDict):
    """A window of requests; times are in seconds since the epoch."""

    source: Annotated[str, documented("requests, file:NAME, version:VERSION, reset, or window.")]
    requests: int
    complete: Annotated[bool, documented("Whether it has as many requests as configured.")]
    since: float
    until: float


class VersionDrift(TypedDict):
    """The drift of one version."""

    version: str
    level: Annotated[DriftLevel, documented("The highest level of a feature.")]
    capture: CaptureStatus
    reference: WindowDocument | None
    current: WindowDocument | None
    omitted_features: Annotated[int, documented("Features beyond max_features, at most 200.")]
    features: Annotated[list[FeatureDrift], documented("The highest index first.")]


class DriftDocument(TypedDict):
    """The drift of a model's versions that have ``capture``."""

    model: str
    versions: list[VersionDrift]


_RANGES: dict[str, tuple[float, float]] = {
    "sample": (0, 1),
    "max_bytes_per_request": (0, _MAX_RECORD_BYTES),
    "max_megabytes": (0, _MAX_MEGABYTES),
    "reference": (10, _MAX_REQUESTS),
    "window": (10, _MAX_REQUESTS),
    "window_minutes": (0, _MAX_MINUTES),
    "max_features": (1, _MAX_FEATURES),
}
KEYS = tuple(f.name for f in fields(CapturePolicy))


def read(document: Any) -> CapturePolicy:
    """Return the policy of a document.

    Raises BadRequest, which names the key, the value and the remedy.
    """
    return validation.read_request(CapturePolicy, document, "capture", _find_error)


def _find_error(policy: CapturePolicy) -> str:
    for key, (low, high) in _RANGES.items():
        value = getattr(policy, key)
        if isinstance(value, int | float) and not (isfinite(value) and low <= value <= high):
            return f"{key} is {value}; it is a number from {low:g} to {high:g}"
    if len(policy.redact) > _MAX_PATHS:
        return f"redact has {len(policy.redact)} paths; at most {_MAX_PATHS} are allowed"
    for path in policy.redact:
        try:
            json_path.parse(path)
        except ValueError as error:
            return f"redact: {error}"
    if policy.reference == "":
        return "reference is empty; write a number of requests, or the name of a JSONL file in the archive"
    scheme, separator, rest = policy.destination.partition("://")
    if separator and (scheme not in ("s3", "gs") or not rest.partition("/")[0]):
        return f"destination is {policy.destination!r}; write s3://bucket/folder or gs://bucket/folder"
    if policy.destination and not separator and not policy.destination.startswith("/"):
        return (
            f"destination is {policy.destination!r}; write an absolute path or a URL, or leave it out "
            "for the folder capture in the server's state"
        )
    return ""
