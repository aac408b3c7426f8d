"""Encoding of experiment metrics as rows of the database."""

from __future__ import annotations

import json
import struct
import time
from itertools import chain
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from serve_app.control.persistence.database import ARM_STATS, METRIC_SOURCES
from serve_app.dataplane.experiment_collector import ArmStats

# The source whose number counts how often a store was opened: only the last one to open may write.
EPOCH_SOURCE = ""
_SOURCE_RETENTION = 7 * 86_400  # seconds for which the numbers of a process are kept


def start_epoch(connection: Connection) -> int:
    """Return the number of this epoch; a store of an earlier epoch can write nothing any more."""
    now = time.time()
    is_epoch = METRIC_SOURCES.c.source == EPOCH_SOURCE
    if (
        connection.execute(
            sa.update(METRIC_SOURCES).where(is_epoch).values(number=METRIC_SOURCES.c.number + 1)
        ).rowcount
        == 0
    ):
        connection.execute(sa.insert(METRIC_SOURCES).values(source=EPOCH_SOURCE, number=1, time=now))
    connection.execute(
        sa.delete(METRIC_SOURCES).where(~is_epoch, METRIC_SOURCES.c.time < now - _SOURCE_RETENTION)
    )
    return int(connection.execute(sa.select(METRIC_SOURCES.c.number).where(is_epoch)).scalar_one())


def load_values(connection: Connection) -> dict[str, dict[tuple[str, str], bytes]]:
    """Return the encoded values of all splits: split id -> (arm, name) -> value."""
    values: dict[str, dict[tuple[str, str], bytes]] = {}
    for row in connection.execute(sa.select(ARM_STATS)):
        values.setdefault(row.trial, {})[decode_name(row.arm), decode_name(row.name)] = bytes(row.value)
    return values


def encode_value(stats: ArmStats, name: str) -> bytes:
    """Encode the sums of ``name`` as (group, count, sum), or for an empty name all other counts."""
    if name:
        numbers = [(group, *sums) for group, sums in stats.sums.get(name, {}).items()]
        return struct.pack(f"<{3 * len(numbers)}d", *chain.from_iterable(numbers))
    return json.dumps({key: value for key, value in vars(stats).items() if key != "sums"}).encode()


def decode_value(stats: ArmStats, name: str, value: bytes) -> None:
    """Decode the result of ``encode_value`` into ``stats``."""
    if name:
        numbers = iter(struct.unpack(f"<{len(value) // 8}d", value))
        stats.sums[name] = {
            int(group): (count, total) for group, count, total in zip(numbers, numbers, numbers)
        }
        return
    counts = json.loads(value)
    counts["latency"] = {int(bin): count for bin, count in counts["latency"].items()}
    for field_name, count in counts.items():
        setattr(stats, field_name, count)


def replace_rows(connection: Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows in place of those with the same key; a row whose value is None is only deleted."""
    if not rows:
        return
    same_key = [column == sa.bindparam(column.name) for column in table.primary_key.columns]
    connection.execute(sa.delete(table).where(*same_key), rows)
    if remaining := [row for row in rows if row.get("value", b"") is not None]:
        connection.execute(sa.insert(table), remaining)


def encode_name(name: str) -> str:
    """Encode a name that an operator chose, because databases refuse some characters."""
    return name.encode("unicode_escape").decode("ascii")


def decode_name(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape")
