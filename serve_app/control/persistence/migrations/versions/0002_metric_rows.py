"""Plain rows and JSON in place of packed figures: experiment statistics, exposed units, counted events."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "metric_rows_2"
down_revision = "schema_1"

_FACTOR = 65_536  # an old number is its arm's index times this, plus its bucket
_CHUNK = 10_000


def upgrade() -> None:
    stats = op.create_table(
        "torchrelay_experiment_stats",
        sa.Column("trial", sa.Text, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
    )
    units = _create_hash_table(
        "torchrelay_exposed_units",
        sa.Column("arm", sa.JSON, nullable=False),
        sa.Column("bucket", sa.Integer, nullable=False),
    )
    events = _create_hash_table("torchrelay_counted_events")
    op.bulk_insert(stats, _read_stats())
    for old, table in (("units", units), ("events", events)):
        for rows in _read_hashes(old):
            keys = table.columns.keys()
            op.bulk_insert(table, [{key: row[key] for key in keys} for row in rows])
    op.drop_table("torchrelay_experiment_metrics")
    op.drop_table("torchrelay_exposures")


def _create_hash_table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return op.create_table(
        name,
        sa.Column("trial", sa.Text, primary_key=True),
        sa.Column("hash", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        *columns,
        sa.UniqueConstraint("trial", "number"),
        sqlite_with_rowid=False,
    )


def _read_stats() -> list[dict[str, str]]:
    """Return a document of each split from rows of one arm and name: counts as JSON, or packed sums."""
    splits: dict[str, dict[str, dict[str, Any]]] = {}
    rows = op.get_bind().execute(sa.text("SELECT trial, arm, name, value FROM torchrelay_experiment_metrics"))
    for trial, arm, name, value in rows:
        document = splits.setdefault(trial, {}).setdefault(_unescape(arm), {"sums": {}})
        if not name:
            document.update(json.loads(bytes(value)))
            continue
        triples = struct.iter_unpack("<3d", value)
        document["sums"][_unescape(name)] = {int(group): (count, total) for group, count, total in triples}
    return [{"trial": trial, "document": json.dumps(arms)} for trial, arms in splits.items()]


def _read_hashes(name: str) -> Iterator[list[dict[str, Any]]]:
    """Return rows from segments: hashes of 8 bytes, then for each a number of 4; the oldest segment first."""
    query = "SELECT trial, arms, value FROM torchrelay_exposures WHERE name = :name ORDER BY trial, part"
    segments = op.get_bind().execute(sa.text(query).columns(arms=sa.JSON), {"name": name}).all()
    numbers: dict[str, int] = {}
    for trial, arms, value in segments:
        count = len(value) // 12
        hashes = struct.unpack_from(f"<{count}q", value)
        codes = struct.unpack_from(f"<{count}I", value, 8 * count)
        first = numbers.get(trial, 0) + 1
        numbers[trial] = first + count - 1
        rows = [
            {
                "trial": trial,
                "hash": hash,
                "number": number,
                "arm": _unescape(arms[code // _FACTOR]) if arms else "",
                "bucket": code % _FACTOR,
            }
            for number, (hash, code) in enumerate(zip(hashes, codes), first)
        ]
        yield from (rows[start : start + _CHUNK] for start in range(0, count, _CHUNK))


def _unescape(text: str) -> str:
    return text.encode("ascii").decode("unicode_escape")
