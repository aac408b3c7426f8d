"""The loop that follows a repository of models: new, changed and removed versions are applied."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from serve_app.control import registry_changes
from serve_app.control.lifecycle_events import EventLog
from serve_app.control.models import ModelService
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.registry import get_record
from serve_app.control.state import StateStore
from serve_app.domain.model import ModelRef, ModelSpec, Registration
from serve_app.domain.urls import redact_url
from serve_app.errors import Conflict, DownloadFailed, RelayError, Unavailable
from serve_app.model_store.repository import Repository, RepositoryListing, RepositoryVersion, version_order
from serve_app.settings import Settings

log = logging.getLogger(__name__)

_SETTLE_S = 2.0  # between the two reads at start-up, unless the period is shorter
_MAX_WAIT = 240  # reads after which an entry that fails is tried again; at first after one
_EVENT_NAME = "repository"  # of events on the repository as a whole


@dataclass(frozen=True)
class _AppliedEntry:
    """The last version of an entry that was registered, or was found registered."""

    fingerprint: str
    name: str
    version: str
    digest: str

    @property
    def ref(self) -> ModelRef:
        return ModelRef(self.name, self.version)


@dataclass
class _FailedEntry:
    """An entry that could not be registered, and after how many reads it is tried again."""

    fingerprint: str
    wait: int = 1
    remaining: int = 1


class RepositoryPoller:
    """A loop that makes the registry agree with a repository: with the versions whose URL is below its own.

    A change counts once two reads in a row show it, so that an upload in progress is not served. An error of
    one version is logged and recorded as an event, and the others are applied. Nothing is removed while the
    repository, or a version's part of it, cannot be read. Nothing is removed from an empty repository either,
    because a volume that is not mounted is empty, too.
    """

    def __init__(
        self,
        state: StateStore,
        models: ModelService,
        reconcile_loop: ReconcileLoop,
        events: EventLog,
        settings: Settings,
    ) -> None:
        self._state = state
        self._models = models
        self._reconcile_loop = reconcile_loop
        self._events = events
        self._settings = settings.repository
        self._repository = Repository(settings.repository, settings.store, settings.root)
        self._file = settings.state_dir / "repository.json"
        self._last: RepositoryListing | None = None
        self._applied: dict[str, _AppliedEntry] = {}
        self._failed: dict[str, _FailedEntry] = {}
        self._reported: dict[str, str] = {}  # the last message by subject
        self._loaded = asyncio.Event()

    async def load(self) -> None:
        """Apply the repository at start-up."""
        try:
            if self._settings.url:
                self._applied = await asyncio.to_thread(self._read_applied)
                await self.poll(at_startup=True)
                await asyncio.sleep(min(_SETTLE_S, self._settings.period))
                await self.poll(at_startup=True)
        finally:
            self._loaded.set()

    async def run(self) -> None:
        """Follow the repository from its loading on, until cancelled."""
        await self._loaded.wait()
        while self._settings.url:
            await asyncio.sleep(self._settings.period)
            await self.poll()

    async def poll(self, at_startup: bool = False) -> None:
        """Read the repository once, and apply what is unchanged since the last read."""
        try:
            listing = await asyncio.to_thread(self._repository.list)
            await self._apply(listing, at_startup)
            self._reported.pop(self._repository.url, None)
        except DownloadFailed as error:
            problem = Unavailable(f"The repository {self._shown} cannot be read: {error.detail}")
            self._report(self._repository.url, _EVENT_NAME, "", problem)
        except RelayError as error:
            self._report(self._repository.url, _EVENT_NAME, "", error)
        except Exception:
            log.exception("the repository %s could not be applied; trying again", self._shown)

    @property
    def _shown(self) -> str:
        return redact_url(self._repository.url)

    async def _apply(self, listing: RepositoryListing, at_startup: bool) -> None:
        for url, message in listing.problems.items():
            self._report(url, _EVENT_NAME, "", Unavailable(message))
        if not listing.entries and any(self._repository.contains(spec.url) for spec in self._state.registry):
            raise Unavailable(
                f"The repository {self._shown} is empty, so its versions stay registered. Is its volume "
                "mounted? Unregister its last model over the management API."
            )
        last, self._last = self._last, listing
        for url in last.problems.keys() - listing.problems.keys() if last is not None else ():
            self._reported.pop(url, None)
        if last is None:
            return
        before = dict(self._applied)
        for url, entry in listing.entries.items():
            if last.entries.get(url) == entry and entry.is_complete and self._is_due(entry):
                await self._register(entry, listing, at_startup)
        await self._remove(listing, last)
        if self._settings.latest_is_default and not self._settings.dry_run:
            await self._promote()
        if self._applied != before:
            await asyncio.to_thread(self._write_applied)

    # Registrations

    def _is_due(self, entry: RepositoryVersion) -> bool:
        """Return whether an entry is new, has changed, or failed so long ago that it is tried again."""
        applied = self._applied.get(entry.url)
        if applied is not None and applied.fingerprint == entry.fingerprint:
            return self._state.registry.archives.get(applied.ref) != applied.digest
        failed = self._failed.get(entry.url)
        if failed is None or failed.fingerprint != entry.fingerprint:
            return True
        failed.remaining -= 1
        return failed.remaining <= 0

    async def _register(self, entry: RepositoryVersion, listing: RepositoryListing, at_startup: bool) -> None:
        name = f"{entry.model} {entry.version}" if entry.version else entry.model or "its model"
        if self._settings.dry_run:
            self._note(entry.url, f"would register {name} from {redact_url(entry.url)}")
            return
        registration = Registration(entry.url, model_name=entry.model, version=entry.version)
        history = self._models.open_history(registration)
        changed = False

        async def check(spec: ModelSpec) -> None:
            nonlocal changed
            changed = not await asyncio.to_thread(self._repository.is_unchanged, entry)
            if changed:
                raise Conflict(f"{redact_url(entry.url)} changed while it was read.")
            self._check_conflict(spec, entry, listing)
            self._applied[entry.url] = _AppliedEntry(entry.fingerprint, spec.name, spec.version, spec.digest)

        before = self._applied.get(entry.url)
        try:
            with self._events.record_failure(history):
                registered = await self._models.apply_archive(registration, history, check, at_startup)
        except Exception as error:
            self._restore(entry.url, before)
            if changed:  # it is applied once it is stable
                self._events.discard(history)
                return
            self._fail(entry)
            if not isinstance(error, RelayError):
                log.exception("%s could not be registered", redact_url(entry.url))
                return
            detail = getattr(error, "detail", "")
            self._log(entry.url, f"{redact_url(entry.url)} is not registered: {error} {detail}".strip())
            return
        self._failed.pop(entry.url, None)
        self._reported.pop(entry.url, None)
        if registered is not None:
            self._models.watch(history, registered)

    def _check_conflict(self, spec: ModelSpec, entry: RepositoryVersion, listing: RepositoryListing) -> None:
        """Raise Conflict where the version comes from another place."""
        for url, applied in self._applied.items():
            if applied.ref == spec.ref and url != entry.url and url in listing.entries:
                raise Conflict(
                    f"{spec.name} {spec.version} is in the repository at {redact_url(url)} too; remove one."
                )
        record = self._state.registry.models.get(spec.name)
        known = record.versions.get(spec.version) if record is not None else None
        if known is not None and known.digest != spec.digest and not self._repository.contains(known.url):
            raise Conflict(
                f"{spec.name} {spec.version} was registered from {redact_url(known.url)}, and the repository "
                "has another archive of it; unregister that version, or give the archive another one."
            )

    def _restore(self, url: str, before: _AppliedEntry | None) -> None:
        if before is None:
            self._applied.pop(url, None)
        else:
            self._applied[url] = before

    def _fail(self, entry: RepositoryVersion) -> None:
        """Record a failure; an unchanged entry is tried again after twice as many reads as before."""
        failed = self._failed.get(entry.url)
        wait = min(2 * failed.wait, _MAX_WAIT) if failed and failed.fingerprint == entry.fingerprint else 1
        self._failed[entry.url] = _FailedEntry(entry.fingerprint, wait, wait)

    # Removals

    async def _remove(self, listing: RepositoryListing, last: RepositoryListing) -> None:
        """Unregister the versions that were missing in both listings."""
        for url in self._applied.keys() - listing.entries.keys() - last.entries.keys():
            if not self._is_unreadable(url, listing, last):
                del self._applied[url]
        for url in self._failed.keys() - listing.entries.keys():
            del self._failed[url]
        removed: dict[str, list[str]] = {}
        for spec in self._state.registry:
            if self._repository.contains(spec.url) and self._is_missing(spec, listing, last):
                removed.setdefault(spec.name, []).append(spec.version)
        for name, versions in removed.items():
            await self._unregister(name, versions)

    def _is_missing(self, spec: ModelSpec, listing: RepositoryListing, last: RepositoryListing) -> bool:
        if spec.url in listing.entries:  # an archive that has another version now
            applied = self._applied.get(spec.url)
            return applied is not None and applied.ref != spec.ref
        return spec.url not in last.entries and not self._is_unreadable(spec.url, listing, last)

    def _is_unreadable(self, url: str, *listings: RepositoryListing) -> bool:
        return any(
            url == problem or url.startswith(f"{problem}/")
            for listing in listings
            for problem in listing.problems
        )

    async def _unregister(self, name: str, versions: list[str]) -> None:
        """Unregister versions of a model; where its default one goes, its highest other one replaces it."""
        state = self._state
        for version in sorted(versions, key=lambda v: v == state.registry.models[name].default):
            ref, subject = ModelRef(name, version), f"{name}/{version}"
            if self._settings.dry_run:
                self._note(subject, f"would unregister {name} {version}")
                continue
            try:
                async with state.exclusive():
                    registry = state.registry
                    record = get_record(registry, name)
                    remaining = set(record.versions) - set(versions)
                    if version == record.default and remaining:
                        highest = max(remaining, key=version_order)
                        registry, _ = registry_changes.set_default(registry, name, highest)
                    after, _ = registry_changes.unregister(registry, name, version)
                    # The same archive may return, and is then new.
                    archives = {key: digest for key, digest in after.archives.items() if key != ref}
                    await state.commit_with_status(replace(after, archives=archives))
            except RelayError as error:
                self._report(subject, name, version, error)
                continue
            self._reported.pop(subject, None)
            self._models.finish_history(ref)
            log.info("%s %s has left the repository and is unregistered", name, version)

    # Defaults

    async def _promote(self) -> None:
        """Make the highest version of each of the repository's models its default once it is ready."""
        for name, record in list(self._state.registry.models.items()):
            owned = [v for v, spec in record.versions.items() if self._repository.contains(spec.url)]
            if not owned or (highest := max(owned, key=version_order)) == record.default:
                continue
            spec = record.versions[highest]
            phase = self._reconcile_loop.get_status(spec.ref).phase
            if phase != "ready" and not (spec.is_pooled or phase == "idle"):
                continue
            subject = f"{name} default"
            try:
                await self._models.set_default(name, highest)
                self._reported.pop(subject, None)
            except RelayError as error:
                self._report(subject, name, highest, error)

    # Reports

    def _log(self, subject: str, message: str) -> bool:
        """Log a message once, until it changes or its cause has gone; return whether it is new."""
        is_new = self._reported.get(subject) != message
        if is_new:
            self._reported[subject] = message
            log.error("repository %s: %s", self._shown, message)
        return is_new

    def _report(self, subject: str, model: str, version: str, error: RelayError) -> None:
        """Log an error once, and add it to the events."""
        detail = getattr(error, "detail", "")
        if self._log(subject, f"{error} {detail}".strip()):
            history = self._events.open(model, version=version, url=self._shown)
            with contextlib.suppress(RelayError), self._events.record_failure(history):
                raise error

    def _note(self, subject: str, message: str) -> None:
        """Log a change that a dry run does not make, once."""
        if self._reported.get(subject) != message:
            self._reported[subject] = message
            log.warning("repository %s, dry run: %s", self._shown, message)

    # What was applied, so that a start need not fetch everything again

    def _read_applied(self) -> dict[str, _AppliedEntry]:
        try:
            document: Mapping[str, Any] = json.loads(self._file.read_text())
            return {url: _AppliedEntry(**values) for url, values in document.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read, so the repository is fetched anew: %s", self._file, error)
            return {}

    def _write_applied(self) -> None:
        partial = self._file.with_suffix(".partial")
        try:
            partial.write_text(json.dumps({url: asdict(entry) for url, entry in self._applied.items()}))
            os.replace(partial, self._file)
        except OSError as error:
            log.warning("%s cannot be written, so a start fetches the repository anew: %s", self._file, error)
