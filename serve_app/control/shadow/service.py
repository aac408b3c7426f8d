"""The service of shadow statistics: it adds up the reports of all processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from serve_app.control.cancellation import run_to_end
from serve_app.control.persistence.database import Database
from serve_app.control.registry import ModelRecord, find_version
from serve_app.control.result_history import ResultHistory
from serve_app.control.shadow.store import Key, ShadowRecord, ShadowStore
from serve_app.control.state import StateStore
from serve_app.dataplane.experiment_collector import quantile
from serve_app.dataplane.shadow.mirror import ShadowPair
from serve_app.dataplane.shadow.stats import OUTCOMES, ShadowStats
from serve_app.domain import validation
from serve_app.domain.traffic_policy import ShadowComparison, ShadowDocument, ShadowHistory, ShadowPolicy
from serve_app.errors import NotFound, Unavailable

log = logging.getLogger(__name__)

_PERIOD = 1.0  # seconds that may be lost when this process is killed
_SOURCES = 1000  # whose last numbers are remembered


class ShadowService:
    """The operations of ``ControlAPI`` on shadows.

    ``load`` is called before every other method; ``run`` stores changes.
    """

    def __init__(self, state: StateStore, database: Database, history: ResultHistory) -> None:
        self._state = state
        self._history = history
        self._comparisons = ShadowStore(database)
        self._records: dict[Key, ShadowRecord] = {}
        self._changed: set[Key] = set()
        self._numbers: dict[str, int] = {}
        self._storing = asyncio.Lock()

    async def load(self) -> None:
        """Load the stored statistics."""
        self._records = await asyncio.to_thread(self._comparisons.load)

    async def run(self) -> None:
        """Store changes once a second until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD)
            try:
                await self._store()
            except Unavailable as error:
                log.warning("The results of shadows could not be stored; trying again: %s", error)
            except Exception:
                log.exception("The results of shadows could not be stored; trying again")

    def put(self, source: str, number: int, seen: list[tuple[ShadowPair, ShadowStats]]) -> None:
        """Add the comparisons of a process; a report with a number that is not higher is ignored."""
        last = self._numbers.pop(source, 0)
        self._numbers[source] = max(last, number)  # the newest stand last
        if number <= last:
            return
        while len(self._numbers) > _SOURCES:
            del self._numbers[next(iter(self._numbers))]
        for pair, figures in seen:
            self._add(pair, figures)

    async def get_shadow(self, model: str) -> ShadowDocument:
        find_version(self._state.registry, model, None)
        self._drop_outdated()
        shadow = self._state.registry.models[model].policy.shadow
        accounts = {live: account for (name, live), account in sorted(self._records.items()) if name == model}
        if shadow is None and not accounts:
            raise NotFound(
                f"Model {model} has no shadow. "
                f'Give it one: PUT /models/{model}/traffic with {{"shadow": {{"version": VERSION}}}}.'
            )
        return {
            "model": model,
            "shadow": validation.write(shadow) if shadow is not None else None,
            "against": [_to_document(live, account) for live, account in accounts.items()],
        }

    async def get_shadow_history(self, model: str) -> ShadowHistory:
        await self.get_shadow(model)  # raises
        return {
            "model": model,
            "against": [
                {"version": live, "points": await self._history.get_points(f"{name}/{live}")}  # type: ignore[typeddict-item]
                for name, live in sorted(self._records)
                if name == model
            ],
        }

    async def reset_shadow(self, model: str) -> None:
        find_version(self._state.registry, model, None)
        for key in [key for key in self._records if key[0] == model]:
            self._drop(key)
        await self._store()

    def _add(self, pair: ShadowPair, figures: ShadowStats) -> None:
        record = self._state.registry.models.get(pair.model)
        digests = _digests(record, pair.live, pair.shadow)
        if record is None or digests is None:
            return
        key = (pair.model, pair.live)
        account = self._records.get(key)
        if account is None or account.shadow.stats_key != pair.shadow.stats_key or account.digests != digests:
            if record.policy.shadow is None or record.policy.shadow.stats_key != pair.shadow.stats_key:
                return  # of a shadow that is no more
            account = self._records[key] = ShadowRecord(pair.shadow, digests, ShadowStats(pair.shadow.keep))
        account.figures.add(figures)
        self._changed.add(key)

    def _drop_outdated(self) -> None:
        """Drop statistics of removed versions and of previous shadows."""
        for (model, live), account in list(self._records.items()):
            record = self._state.registry.models.get(model)
            now = record.policy.shadow if record is not None else None
            if _digests(record, live, account.shadow) != account.digests or (
                now is not None and now.stats_key != account.shadow.stats_key
            ):
                self._drop((model, live))

    def _drop(self, key: Key) -> None:
        del self._records[key]
        self._changed.add(key)

    async def _store(self) -> None:
        async with self._storing:
            # A save that outlives its caller could overwrite the next one.
            await run_to_end(self._save_changed())

    async def _save_changed(self) -> None:
        self._drop_outdated()
        changed, self._changed = self._changed, set()
        if not changed:
            return
        try:
            # Figures go on changing on this thread meanwhile, so what is stored is what they are now.
            now = {key: _copied(self._records.get(key)) for key in changed}
            await asyncio.to_thread(self._comparisons.save, now)
        except BaseException:
            self._changed |= changed
            raise
        await self._record_history(now)

    async def _record_history(self, stored: Mapping[Key, ShadowRecord | None]) -> None:
        for (model, live), account in stored.items():
            subject = f"{model}/{live}"
            if account is None:
                await self._history.delete(subject)
            elif self._history.is_due(subject, account.since):
                calls = account.figures.calls
                await self._history.append(
                    subject, {name: calls[name] for name in ("agreed", "disagreed", "error")}
                )

    async def close(self) -> None:
        """Store pending changes."""
        try:
            await self._store()
        except Unavailable as error:
            log.warning("The results of shadows since the last storing are lost: %s", error)


def _copied(account: ShadowRecord | None) -> ShadowRecord | None:
    if account is None:
        return None
    figures = ShadowStats(account.shadow.keep)
    figures.add(account.figures)
    return ShadowRecord(account.shadow, account.digests, figures, account.since)


def _digests(record: ModelRecord | None, live: str, shadow: ShadowPolicy) -> tuple[str, str] | None:
    """Return the digests of both archives; None where a version was removed."""
    if record is None or live not in record.versions or shadow.version not in record.versions:
        return None
    return record.versions[live].digest, record.versions[shadow.version].digest


def _to_document(live: str, account: ShadowRecord) -> ShadowComparison:
    """Return a live version's shadow statistics as JSON."""
    figures = account.figures
    calls = figures.calls
    compared = calls["agreed"] + calls["disagreed"]
    answered = compared + calls["error"]
    measures = {name: total / count for name, (count, total) in sorted(figures.measures.items())}
    return {
        "version": live,
        "shadow": account.shadow.version,
        "since": account.since,
        "calls": calls,
        "reasons": {
            outcome: figures.counts[outcome] for outcome in OUTCOMES if any(figures.counts.get(outcome, ()))
        },
        "agreement_rate": calls["agreed"] / compared if compared else None,
        "error_rate": calls["error"] / answered if answered else None,
        "label_flip_rate": measures.get("label_flipped"),
        "measures": measures,
        "latency": {version: _latency(bins) for version, bins in figures.latency.items()},
        "disagreements": [kept.document for kept in figures.worst_mismatches],
    }


def _latency(bins: dict[int, int]) -> dict[str, float]:
    return {f"p{q * 100:g}_ms": round(quantile(bins, q) * 1000, 3) for q in (0.5, 0.95, 0.99)}
