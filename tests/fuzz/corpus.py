"""The stored inputs of every target: one zip for each, whose bytes depend on the inputs alone."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def read_corpus(name: str) -> list[bytes]:
    """Return the stored inputs of a target."""
    file = CORPUS / f"{name}.zip"
    if not file.exists():
        return []
    with zipfile.ZipFile(file) as packed:
        return [packed.read(entry) for entry in packed.namelist()]


def write_corpus(name: str, inputs: Iterable[bytes], limit: int) -> int:
    """Store at most ``limit`` inputs of a target, the smallest first; return their number."""
    kept = sorted(set(inputs), key=lambda data: (len(data), data))[:limit]
    CORPUS.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for data in kept:
            packed.writestr(zipfile.ZipInfo(sha256(data).hexdigest()[:16]), data)
    return len(kept)
