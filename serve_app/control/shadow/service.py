"""What the shadows of all models come to: added up from every process, asked for, and forgotten."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from serve_app import documents
from serve_app.control import registry as change
from serve_app.control.comparisons import Account, Comparisons, Key
from serve_app.control.database import Database
from serve_app.control.registry import Record
from serve_app.deployments.ledger import Ledger
from serve_app.errors import NotFound, Unavailable
from serve_app.policy import Shadow
from serve_app.shadow.figures import OUTCOMES, Figures
from serve_app.shadow.mirror import Pair
from serve_app.telemetry.observations import quantile

log = logging.getLogger("torchrelay.shadows")

_PERIOD = 1.0  # seconds that may be lost when this process is killed
_SOURCES = 1000  # whose last numbers are remembered


class Shadows:
    """Of ``controlplane.Keeper``: shadow and forget_shadow. ``load`` comes before everything, ``run`` stores."""

    def __init__(self, ledger: Ledger, database: Database) -> None:
        self._ledger = ledger
        self._comparisons = Comparisons(database)
        self._accounts: dict[Key, Account] = {}
        self._changed: set[Key] = set()
        self._numbers: dict[str, int] = {}
        self._storing = asyncio.Lock()

    async def load(self) -> None:
        """Take up what was stored."""
        self._accounts = await asyncio.to_thread(self._comparisons.load)

    async def run(self) -> None:
        """Store what comes, once a second."""
        while True:
            await asyncio.sleep(_PERIOD)
            try:
                await self._store()
            except Unavailable as error:
                log.warning("what shadows came to could not be stored; trying again: %s", error)
            except Exception:
                log.exception("what shadows came to could not be stored; trying again")

    def put(self, source: str, number: int, seen: list[tuple[Pair, Figures]]) -> None:
        """Add what a process has compared; its payloads have rising numbers, and the same one counts once."""
        last = self._numbers.pop(source, 0)
        self._numbers[source] = max(last, number)  # the newest stand last
        if number <= last:
            return
        while len(self._numbers) > _SOURCES:
            del self._numbers[next(iter(self._numbers))]
        for pair, figures in seen:
            self._add(pair, figures)

    async def shadow(self, model: str) -> dict[str, Any]:
        change.find(self._ledger.registry, model, None)
        self._sweep()
        shadow = self._ledger.registry.models[model].policy.shadow
        accounts = {live: account for (name, live), account in sorted(self._accounts.items()) if name == model}
        if shadow is None and not accounts:
            raise NotFound(
                f"Model {model} has no shadow. "
                f'Give it one: PUT /models/{model}/traffic with {{"shadow": {{"version": VERSION}}}}.'
            )
        return {
            "model": model,
            "shadow": documents.write(shadow) if shadow is not None else None,
            "against": [_said(live, account) for live, account in accounts.items()],
        }

    async def forget_shadow(self, model: str) -> None:
        change.find(self._ledger.registry, model, None)
        for key in [key for key in self._accounts if key[0] == model]:
            self._drop(key)
        await self._store()

    def _add(self, pair: Pair, figures: Figures) -> None:
        record = self._ledger.registry.models.get(pair.model)
        digests = _digests(record, pair.live, pair.shadow)
        if record is None or digests is None:
            return
        key = (pair.model, pair.live)
        account = self._accounts.get(key)
        if account is None or account.shadow.terms != pair.shadow.terms or account.digests != digests:
            if record.policy.shadow is None or record.policy.shadow.terms != pair.shadow.terms:
                return  # of a shadow that is no more
            account = self._accounts[key] = Account(pair.shadow, digests, Figures(pair.shadow.keep))
        account.figures.add(figures)
        self._changed.add(key)

    def _sweep(self) -> None:
        """Drop what is of versions that are no more, and of what was compared before the shadow of now."""
        for (model, live), account in list(self._accounts.items()):
            record = self._ledger.registry.models.get(model)
            now = record.policy.shadow if record is not None else None
            if _digests(record, live, account.shadow) != account.digests or (
                now is not None and now.terms != account.shadow.terms
            ):
                self._drop((model, live))

    def _drop(self, key: Key) -> None:
        del self._accounts[key]
        self._changed.add(key)

    async def _store(self) -> None:
        async with self._storing:
            self._sweep()
            changed, self._changed = self._changed, set()
            if not changed:
                return
            try:
                # Figures go on changing on this thread meanwhile, so what is stored is what they are now.
                now = {key: _copied(self._accounts.get(key)) for key in changed}
                await asyncio.to_thread(self._comparisons.save, now)
            except BaseException:
                self._changed |= changed
                raise

    async def close(self) -> None:
        """Store what is not stored yet."""
        try:
            await self._store()
        except Unavailable as error:
            log.warning("the last of what shadows came to is lost: %s", error)


def _copied(account: Account | None) -> Account | None:
    if account is None:
        return None
    figures = Figures(account.shadow.keep)
    figures.add(account.figures)
    return Account(account.shadow, account.digests, figures, account.since)


def _digests(record: Record | None, live: str, shadow: Shadow) -> tuple[str, str] | None:
    """Of the archives of both versions; None where one of them is gone."""
    if record is None or live not in record.versions or shadow.version not in record.versions:
        return None
    return record.versions[live].digest, record.versions[shadow.version].digest


def _said(live: str, account: Account) -> dict[str, Any]:
    """One live version and the shadow: counts, rates of what was compared, and the worst disagreements."""
    figures = account.figures
    calls = figures.calls
    compared = calls["agreed"] + calls["disagreed"]
    answered = compared + calls["error"]
    measures = {name: mean.value for name, mean in sorted(figures.measures.items())}
    return {
        "version": live,
        "shadow": account.shadow.version,
        "since": account.since,
        "calls": calls,
        "reasons": {outcome: figures.counts[outcome] for outcome in OUTCOMES if any(figures.counts.get(outcome, ()))},
        "agreement_rate": calls["agreed"] / compared if compared else None,
        "error_rate": calls["error"] / answered if answered else None,
        "label_flip_rate": measures.get("label_flipped"),
        "measures": measures,
        "latency": {version: _latency(bins) for version, bins in figures.latency.items()},
        "disagreements": [kept.said for kept in figures.worst],
    }


def _latency(bins: dict[int, int]) -> dict[str, float]:
    return {f"p{q * 100:g}_ms": round(quantile(bins, q) * 1000, 3) for q in (0.5, 0.95, 0.99)}
