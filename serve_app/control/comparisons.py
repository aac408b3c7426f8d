"""What comparing shadows with live versions has come to, and the inputs that are kept: stored, of one pair a row."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app import documents
from serve_app.control.database import COMPARISONS, DISAGREEMENTS, Database
from serve_app.policy import Shadow
from serve_app.shadow.disagreements import Disagreement
from serve_app.shadow.figures import Figures

log = logging.getLogger("torchrelay.comparisons")

Key = tuple[str, str]  # model, and live version


@dataclass
class Account:
    """The figures of one live version and the shadow of its model; ``digests`` are those of both archives."""

    shadow: Shadow
    digests: tuple[str, str]
    figures: Figures
    since: float = field(default_factory=time.time)  # in seconds since the epoch


class Comparisons:
    """The stored accounts. Blocking: call it from a thread, and from one at a time. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stored: dict[Key, dict[str, float]] = {}  # the disagreements that are there, and their distances

    def load(self) -> dict[Key, Account]:
        """What is stored. An account that cannot be read, such as another release's, is dropped: it is only figures."""
        accounts: dict[Key, Account] = {}
        with self._database.transaction() as connection:
            for row in connection.execute(sa.select(COMPARISONS)).all():
                key = row.model, row.version
                try:
                    accounts[key] = _read(orjson.loads(row.document))
                except (KeyError, TypeError, ValueError) as error:
                    log.warning("what the shadow of %s %s came to is dropped, it cannot be read: %s", *key, error)
                    for table in (COMPARISONS, DISAGREEMENTS):
                        connection.execute(sa.delete(table).where(*_is(table, key)))
            for row in connection.execute(sa.select(DISAGREEMENTS)):
                kept = Disagreement(row.input, row.distance, orjson.loads(row.document))
                accounts[row.model, row.version].figures.worst.put(kept)
        self._stored = {key: _distances(account) for key, account in accounts.items()}
        return accounts

    def save(self, changed: Mapping[Key, Account | None]) -> None:
        """Store these accounts, and forget those that are None; all of it or nothing."""
        with self._database.transaction() as connection:
            for key, account in changed.items():
                self._save(connection, key, account)
        for key, account in changed.items():
            self._stored[key] = _distances(account)

    def _save(self, connection: Connection, key: Key, account: Account | None) -> None:
        connection.execute(sa.delete(COMPARISONS).where(*_is(COMPARISONS, key)))
        if account is not None:
            row = {"model": key[0], "version": key[1], "document": _written(account)}
            connection.execute(sa.insert(COMPARISONS).values(**row))
        before, after = self._stored.get(key, {}), _distances(account)
        for kept in [kept for kept in before if before[kept] != after.get(kept)]:
            connection.execute(sa.delete(DISAGREEMENTS).where(*_is(DISAGREEMENTS, key), DISAGREEMENTS.c.input == kept))
        new = [
            {
                "model": key[0],
                "version": key[1],
                "input": kept.key,
                "distance": kept.distance,
                "document": orjson.dumps(kept.said),
            }
            for kept in (account.figures.worst if account is not None else ())
            if before.get(kept.key) != kept.distance
        ]
        if new:
            connection.execute(sa.insert(DISAGREEMENTS), new)


def _distances(account: Account | None) -> dict[str, float]:
    return {kept.key: kept.distance for kept in account.figures.worst} if account is not None else {}


def _is(table: sa.Table, key: Key) -> tuple[sa.ColumnElement[bool], ...]:
    return table.c.model == key[0], table.c.version == key[1]


def _written(account: Account) -> bytes:
    said = {"shadow": documents.write(account.shadow), "digests": account.digests, "since": account.since}
    return orjson.dumps({**said, "figures": account.figures.write()})


def _read(said: dict[str, Any]) -> Account:
    shadow = documents.read(Shadow, said["shadow"])
    live, other = said["digests"]
    return Account(shadow, (live, other), Figures.read(shadow.keep, said["figures"]), said["since"])
