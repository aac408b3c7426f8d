"""The stored drift statistics: one row for each version with its reference and its windows."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
import sqlalchemy as sa

from serve_app.control.persistence.database import Database, upsert
from serve_app.control.persistence.schema import DRIFT_WINDOWS
from serve_app.domain.capture import CapturePolicy
from serve_app.domain.drift_window import FeatureWindow, merge_windows

log = logging.getLogger(__name__)

Key = tuple[str, str]  # model and version
Source = Literal["requests", "file", "reset"]
_SHARES = 10  # windows that make up the current one


@dataclass
class DriftRecord:
    """The statistics of one version; ``digest`` is that of its archive.

    ``windows`` are parts of the current window, the oldest first. The counts are not stored.
    """

    digest: str
    source: Source = "requests"
    reference: FeatureWindow | None = None
    windows: list[FeatureWindow] = field(default_factory=list)
    captured: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    last_error: str = ""
    last_error_time: float = 0.0

    def add(self, window: FeatureWindow, policy: CapturePolicy) -> bool:
        """Add a window to the reference, where that is incomplete, else to the current window.

        Return whether a part was completed, and the record is to be stored.
        """
        if self.fills_reference(policy):
            if self.reference is None:
                self.reference = FeatureWindow(policy.max_features)
            self.reference.merge(window)
            return True
        last = self.windows[-1] if self.windows else None
        if last is not None and last.requests < policy.window / _SHARES:
            last.merge(window)
            return False
        self.windows.append(merge_windows([window], policy.max_features))
        while sum(part.requests for part in self.windows[1:]) >= policy.window:
            del self.windows[0]
        return True

    def fills_reference(self, policy: CapturePolicy) -> bool:
        """Return whether the next requests belong to the reference."""
        if self.source != "requests" or policy.reference_version or isinstance(policy.reference, str):
            return False
        return self.reference is None or self.reference.requests < policy.reference

    def drop_old(self, limit: float) -> None:
        """Drop the parts of the current window whose last request is older."""
        self.windows = [window for window in self.windows if window.until >= limit]


class DriftStore:
    """The records in the database. Blocking: call it from a thread, one at a time. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self) -> dict[Key, DriftRecord]:
        """Return the stored records; one that cannot be read holds only statistics, and is dropped."""
        records: dict[Key, DriftRecord] = {}
        with self._database.transaction() as connection:
            for row in connection.execute(sa.select(DRIFT_WINDOWS)).all():
                try:
                    records[row.model, row.version] = _decode(row.document)
                except (KeyError, TypeError, ValueError, zlib.error) as error:
                    log.warning(
                        "the drift statistics of %s %s are dropped, they cannot be read: %s",
                        row.model,
                        row.version,
                        error,
                    )
        return records

    def save(self, changed: Mapping[Key, Mapping[str, Any] | None]) -> None:
        """Store the documents of records, and delete those that are None, in one transaction."""
        with self._database.transaction() as connection:
            for (model, version), document in changed.items():
                if document is None:
                    columns = DRIFT_WINDOWS.c
                    row = columns.model == model, columns.version == version
                    connection.execute(sa.delete(DRIFT_WINDOWS).where(*row))
                else:
                    values = {"model": model, "version": version, "document": _encode(document)}
                    upsert(connection, DRIFT_WINDOWS, [values])


def to_document(record: DriftRecord) -> dict[str, Any]:
    """Return what is stored of a record, as JSON data."""
    return {
        "digest": record.digest,
        "source": record.source,
        "reference": record.reference.to_dict() if record.reference is not None else None,
        "windows": [window.to_dict() for window in record.windows],
    }


def _encode(document: Mapping[str, Any]) -> bytes:
    return zlib.compress(orjson.dumps(document), 1)


def _decode(data: bytes) -> DriftRecord:
    document = orjson.loads(zlib.decompress(data))
    reference = document["reference"]
    return DriftRecord(
        document["digest"],
        document["source"],
        FeatureWindow.from_dict(reference) if reference is not None else None,
        [FeatureWindow.from_dict(window) for window in document["windows"]],
    )
