"""The service of drift statistics: it adds up the reports of all replicas, and compares the windows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.control.cancellation import run_to_end
from serve_app.control.drift.destination import CaptureDestination
from serve_app.control.drift.store import DriftRecord, DriftStore, Key, to_document
from serve_app.control.persistence.database import Database
from serve_app.control.registry import find_version
from serve_app.control.state import StateStore
from serve_app.dataplane.capture.recorder import CaptureReport
from serve_app.dataplane.capture.reference import read_reference
from serve_app.domain.capture import CapturePolicy, DriftDocument, VersionDrift, WindowDocument
from serve_app.domain.drift import LEVELS, DriftLevel
from serve_app.domain.drift_window import (
    FeatureDrift,
    FeatureWindow,
    compare_windows,
    merge_windows,
    worst_level,
)
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.errors import Conflict, NotFound, RelayError, Unavailable
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)

_PERIOD = 5.0  # seconds between two rounds, which update gauges and store changes
_SOURCES = 1000  # whose last numbers are remembered


class DriftService:
    """The operations of ``ControlAPI`` on drift.

    ``load`` is called before every other method; ``run`` stores changes. ``open_archive`` returns the
    directory with a version's archive, and blocks.
    """

    def __init__(
        self,
        state: StateStore,
        database: Database,
        meters: Meters,
        open_archive: Callable[[ModelSpec], Path],
        settings: Settings,
    ) -> None:
        self._state = state
        self._store = DriftStore(database)
        self._meters = meters
        self._open_archive = open_archive
        self._destination = CaptureDestination(settings)
        self._records: dict[Key, DriftRecord] = {}
        self._changed: set[Key] = set()  # since they were stored
        self._measured: set[Key] = set()  # changed since their gauges were set
        self._levels: dict[Key, DriftLevel] = {}
        self._numbers: dict[str, int] = {}
        self._storing = asyncio.Lock()

    async def load(self) -> None:
        """Load the stored statistics."""
        self._records = await asyncio.to_thread(self._store.load)
        self._measured = set(self._records)

    async def run(self) -> None:
        """Update gauges and store changes until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD)
            try:
                await self._read_references()
                self._drop_outdated()
                await self._update_gauges()
                await self._save()
            except Unavailable as error:
                log.warning("drift statistics could not be stored; trying again: %s", error)
            except Exception:
                log.exception("drift statistics could not be updated; trying again")

    def put(self, source: str, number: int, report: CaptureReport) -> None:
        """Add the report of a replica; one with a number that is not higher is ignored."""
        last = self._numbers.pop(source, 0)
        self._numbers[source] = max(last, number)  # the newest stand last
        while len(self._numbers) > _SOURCES:
            del self._numbers[next(iter(self._numbers))]
        spec = self._find_spec(report.ref)
        if number <= last or spec is None or spec.digest != report.digest:
            return
        policy, key = spec.capture, (report.ref.name, report.ref.version)
        if policy is None:
            return
        record = self._find_record(key, spec)
        record.captured += report.captured
        for reason, count in report.dropped.items():
            record.dropped[reason] = record.dropped.get(reason, 0) + count
        if report.last_error_time > record.last_error_time:
            record.last_error, record.last_error_time = report.last_error, report.last_error_time
        if report.window is not None:
            self._measured.add(key)
            if record.add(report.window, policy):
                self._changed.add(key)

    async def store_capture(self, ref: ModelRef, name: str, data: bytes) -> str:
        """Write a file of a replica to the version's object store; return an error, or an empty text."""
        spec = self._find_spec(ref)
        policy = spec.capture if spec is not None else None
        if policy is None or not policy.is_remote:
            return f"{ref.app} has no object store for captured requests"
        return await asyncio.to_thread(self._destination.write, policy.destination, ref, name, data)

    async def get_drift(self, model: str, version: str | None) -> DriftDocument:
        await self._read_references()
        self._drop_outdated()
        find_version(self._state.registry, model, version)
        versions = self._state.registry.models[model].versions
        specs = [versions[name] for name in ([version] if version else sorted(versions))]
        found = [await self._describe(spec, policy) for spec in specs if (policy := spec.capture) is not None]
        if not found:
            raise NotFound(
                f"Model {model}{f' {version}' if version else ''} captures no requests. "
                "Add capture: {} to its model-config.yaml, and register it again."
            )
        return {"model": model, "versions": found}

    async def reset_drift(self, model: str, version: str) -> DriftDocument:
        spec = find_version(self._state.registry, model, version)
        record = self._records.get((model, version))
        policy = spec.capture
        if policy is None or record is None or not record.windows:
            raise Conflict(
                f"Model {model} {version} has no current window, which could become its reference; "
                "send requests to a version with capture, and reset it then."
            )
        record.reference = merge_windows(record.windows, policy.max_features)
        record.source, record.windows = "reset", []
        self._changed.add((model, version))
        self._measured.add((model, version))
        await self._save()
        return await self.get_drift(model, version)

    async def close(self) -> None:
        """Store all statistics."""
        self._changed |= set(self._records)
        try:
            await self._save()
        except Unavailable as error:
            log.warning("The drift statistics since the last storing are lost: %s", error)

    def _find_record(self, key: Key, spec: ModelSpec) -> DriftRecord:
        """Return the record of a version's archive, a new one in place of that of a replaced archive."""
        record = self._records.get(key)
        if record is not None and record.digest != spec.digest:
            self._drop(key)
            record = None
        if record is None:
            record = self._records[key] = DriftRecord(spec.digest)
        return record

    def _find_spec(self, ref: ModelRef) -> ModelSpec | None:
        record = self._state.registry.models.get(ref.name)
        return record.versions.get(ref.version) if record is not None else None

    # References

    async def _read_references(self) -> None:
        """Read the reference file of each version that has not read its file yet."""
        for spec in list(self._state.registry):
            policy = spec.capture if spec.graph is None and "capture" in spec.config else None
            if policy is None or not isinstance(policy.reference, str):
                continue
            key = (spec.name, spec.version)
            record = self._find_record(key, spec)
            if record.reference is None:
                await self._read_reference(spec, policy, policy.reference, record)

    async def _read_reference(
        self, spec: ModelSpec, policy: CapturePolicy, name: str, record: DriftRecord
    ) -> None:
        def read() -> FeatureWindow:
            return read_reference(self._open_archive(spec) / name, policy, name)

        try:
            reference = await asyncio.to_thread(read)
        except (OSError, RelayError) as error:  # it was read at the registration
            record.last_error = f"the reference {name} cannot be read: {error}"
            record.last_error_time = round(time.time(), 3)
            log.warning("%s: %s", spec.ref.app, record.last_error)
            return
        if record.reference is not None:  # ``reset_drift`` has set one meanwhile
            return
        record.reference, record.source = reference, "file"
        self._changed.add((spec.name, spec.version))
        self._measured.add((spec.name, spec.version))

    def _find_reference(
        self, spec: ModelSpec, policy: CapturePolicy
    ) -> tuple[FeatureWindow | None, WindowDocument | None]:
        """Return a version's reference once it is complete, and its description."""
        record = self._records.get((spec.name, spec.version))
        source = "requests" if record is None else record.source
        if source == "reset" or not policy.reference_version:
            reference = record.reference if record is not None else None
            complete = reference is not None and not (record and record.fills_reference(policy))
        else:
            other = self._state.registry.models[spec.name].versions.get(policy.reference_version)
            other_policy = other.capture if other is not None else None
            if other is None or other_policy is None or other_policy.reference_version:
                return None, None
            reference, described = self._find_reference(other, other_policy)
            if described is not None:
                described = {**described, "source": f"version:{other.version}"}
            return reference, described
        if reference is None:
            return None, None
        name = f"file:{policy.reference}" if source == "file" else source
        return (reference if complete else None), _describe_window(reference, name, complete)

    # Comparison

    async def _describe(self, spec: ModelSpec, policy: CapturePolicy) -> VersionDrift:
        record = self._records.get((spec.name, spec.version)) or DriftRecord(spec.digest)
        if policy.window_minutes:
            record.drop_old(time.time() - policy.window_minutes * 60)
        reference, described = self._find_reference(spec, policy)
        current = merge_windows(record.windows, policy.max_features) if record.windows else None
        features: list[FeatureDrift] = []
        if reference is not None and current is not None:
            # A complete reference and the sum do not change; 50 features take 30 ms.
            features = await asyncio.to_thread(compare_windows, reference, current)
        omitted = (current or reference or FeatureWindow(policy.max_features)).omitted
        return {
            "version": spec.version,
            "level": worst_level(features),
            "capture": {
                "sample": policy.sample,
                "format": policy.format,
                "destination": policy.destination,
                "captured": record.captured,
                "dropped": record.dropped,
                "last_error": record.last_error,
                "last_error_time": record.last_error_time,
            },
            "reference": described,
            "current": (
                _describe_window(current, "window", current.requests >= policy.window) if current else None
            ),
            "omitted_features": len(omitted),
            "features": features,
        }

    async def _update_gauges(self) -> None:
        keys, self._measured = self._measured, set()
        for model, version in keys:
            spec = self._find_spec(ModelRef(model, version))
            policy = spec.capture if spec is not None else None
            if spec is None or policy is None:
                continue
            found = await self._describe(spec, policy)
            gauges = [(feature["name"], feature["psi"], feature["ks"]) for feature in found["features"]]
            self._meters.set_drift(model, version, gauges, found["omitted_features"])
            self._log_level(spec, found)

    def _log_level(self, spec: ModelSpec, found: VersionDrift) -> None:
        """Log a level that is higher than before."""
        key = (spec.name, spec.version)
        before, self._levels[key] = self._levels.get(key, "none"), found["level"]
        if LEVELS.index(found["level"]) > LEVELS.index(before):
            names = [f"{f['name']} (PSI {f['psi']:.3g})" for f in found["features"] if f["level"] != "none"]
            log.warning("%s: %s drift of %s", spec.ref.app, found["level"], ", ".join(names[:10]))

    # Storing

    def _drop_outdated(self) -> None:
        """Drop the statistics of removed and replaced versions."""
        for (model, version), record in list(self._records.items()):
            spec = self._find_spec(ModelRef(model, version))
            if spec is None or spec.digest != record.digest or spec.capture is None:
                self._drop((model, version))

    def _drop(self, key: Key) -> None:
        del self._records[key]
        self._levels.pop(key, None)
        self._changed.add(key)
        self._meters.forget_drift(*key)

    async def _save(self) -> None:
        async with self._storing:
            # A save that outlives its caller could overwrite the next one.
            await run_to_end(self._save_changed())

    async def _save_changed(self) -> None:
        changed, self._changed = self._changed, set()
        if not changed:
            return
        try:
            records = {key: self._records.get(key) for key in changed}
            documents = {key: to_document(r) if r is not None else None for key, r in records.items()}
            await asyncio.to_thread(self._store.save, documents)
        except BaseException:
            self._changed |= changed
            raise


def _describe_window(window: FeatureWindow, source: str, complete: bool) -> WindowDocument:
    return {
        "source": source,
        "requests": window.requests,
        "complete": complete,
        "since": round(window.since, 3),
        "until": round(window.until, 3),
    }
