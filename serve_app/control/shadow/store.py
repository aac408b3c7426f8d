"""The store of shadow statistics and mismatched inputs: one row for each pair of versions."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.control.persistence.database import Database, upsert
from serve_app.control.persistence.schema import SHADOW_MISMATCHES, SHADOW_STATS
from serve_app.dataplane.shadow.mismatches import Mismatch
from serve_app.dataplane.shadow.stats import ShadowStats
from serve_app.domain import validation
from serve_app.domain.traffic_policy import ShadowPolicy

log = logging.getLogger(__name__)

Key = tuple[str, str]  # model, and live version


@dataclass
class ShadowRecord:
    """The statistics of one live version and its shadow; ``digests`` are those of both archives."""

    shadow: ShadowPolicy
    digests: tuple[str, str]
    figures: ShadowStats
    since: float = field(default_factory=time.time)  # in seconds since the epoch


class ShadowStore:
    """The stored statistics. Blocking: call it from a thread, one at a time. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stored: dict[Key, dict[str, float]] = {}  # the mismatches that are there: their distances

    def load(self) -> dict[Key, ShadowRecord]:
        """Return the stored records.

        A record that cannot be read, such as another release's, is dropped: it holds only statistics.
        """
        accounts: dict[Key, ShadowRecord] = {}
        with self._database.transaction() as connection:
            for row in connection.execute(sa.select(SHADOW_STATS)).all():
                key = row.model, row.version
                try:
                    accounts[key] = _read(orjson.loads(row.document))
                except (KeyError, TypeError, ValueError) as error:
                    log.warning(
                        "what the shadow of %s %s came to is dropped, it cannot be read: %s", *key, error
                    )
                    for table in (SHADOW_STATS, SHADOW_MISMATCHES):
                        connection.execute(sa.delete(table).where(*_is(table, key)))
            for row in connection.execute(sa.select(SHADOW_MISMATCHES)):
                kept = Mismatch(row.input, row.distance, orjson.loads(row.document))
                accounts[row.model, row.version].figures.worst_mismatches.add(kept)
        self._stored = {key: _distances(account) for key, account in accounts.items()}
        return accounts

    def save(self, changed: Mapping[Key, ShadowRecord | None]) -> None:
        """Store these records, and delete those that are None, in one transaction."""
        with self._database.transaction() as connection:
            for key, account in changed.items():
                self._save(connection, key, account)
        for key, account in changed.items():
            self._stored[key] = _distances(account)

    def _save(self, connection: Connection, key: Key, account: ShadowRecord | None) -> None:
        model, version = key
        if account is None:
            connection.execute(sa.delete(SHADOW_STATS).where(*_is(SHADOW_STATS, key)))
        else:
            upsert(
                connection,
                SHADOW_STATS,
                [{"model": model, "version": version, "document": _written(account)}],
            )
        before, after = self._stored.get(key, {}), _distances(account)
        outdated = SHADOW_MISMATCHES.c.input.in_(before.keys() - after.keys())
        connection.execute(sa.delete(SHADOW_MISMATCHES).where(*_is(SHADOW_MISMATCHES, key), outdated))
        new = [
            {
                "model": model,
                "version": version,
                "input": kept.key,
                "distance": kept.distance,
                "document": orjson.dumps(kept.document),
            }
            for kept in (account.figures.worst_mismatches if account is not None else ())
            if before.get(kept.key) != kept.distance
        ]
        upsert(connection, SHADOW_MISMATCHES, new)


def _distances(account: ShadowRecord | None) -> dict[str, float]:
    return (
        {kept.key: kept.distance for kept in account.figures.worst_mismatches} if account is not None else {}
    )


def _is(table: sa.Table, key: Key) -> tuple[sa.ColumnElement[bool], ...]:
    return table.c.model == key[0], table.c.version == key[1]


def _written(account: ShadowRecord) -> bytes:
    document = {
        "shadow": validation.write(account.shadow),
        "digests": account.digests,
        "since": account.since,
    }
    return orjson.dumps({**document, "figures": account.figures.to_dict()})


def _read(document: dict[str, Any]) -> ShadowRecord:
    shadow = validation.read(ShadowPolicy, document["shadow"])
    live, other = document["digests"]
    return ShadowRecord(
        shadow, (live, other), ShadowStats.from_dict(shadow.keep, document["figures"]), document["since"]
    )
