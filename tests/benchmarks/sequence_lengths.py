"""Rows of many lengths, and the archive whose model takes them in buckets."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.benchmarks.archives import configured

SHORTEST, LONGEST = 8, 128  # tokens; every length between them is as likely as any other


def bodies(count: int = 512) -> tuple[bytes, ...]:
    """JSON lists of token ids, always the same ones."""
    draw = random.Random(0)
    sizes = [draw.randint(SHORTEST, LONGEST) for _ in range(count)]
    return tuple(json.dumps([draw.randrange(1, 1000) for _ in range(size)]).encode() for size in sizes)


def bucketed(archive: Path, folder: Path) -> Path:
    """Copy an archive with ``bucket_by_length`` in its model-config.yaml."""
    return configured(archive, folder, "bucketed", "bucket_by_length: true\n")
