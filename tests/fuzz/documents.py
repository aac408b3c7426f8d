"""Documents and texts, built from the bytes of a fuzzer so that mutations keep their structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MAX_DEPTH = 8
_NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 10, 100, 9999, 10_000, 10_001, 1_000_000),
    *(2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63) - 1),
    *(0.0, -0.0, 0.5, 1.5, 3.0, 1e-9, 1e308, -1e308, float("inf"), float("-inf"), float("nan")),
)
_TEXTS = ("", " ", "é", "\x00", "\ud800", "a" * 300, "../x", "${x}", "1", "1.0", "true", "null", "{}", "[]")


class ByteReader:
    """A reader of a fuzzer's bytes; after their end it returns zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def empty(self) -> bool:
        return self._position >= len(self._data)

    def byte(self) -> int:
        if self.empty:
            return 0
        self._position += 1
        return self._data[self._position - 1]

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.byte() % len(choices)]

    def take(self, count: int) -> bytes:
        taken = self._data[self._position : self._position + count]
        self._position += count
        return taken

    def rest(self) -> bytes:
        return self.take(len(self._data))


def build_value(reader: ByteReader, words: Sequence[str], depth: int = 0) -> Any:
    """Return a JSON-like value; ``words`` are the keys and strings of the language under test."""
    kind = reader.byte()
    if kind < 64 and depth < _MAX_DEPTH:
        return {
            build_text(reader, words): build_value(reader, words, depth + 1)
            for _ in range(reader.byte() % 6)
            if not reader.empty
        }
    if kind < 96 and depth < _MAX_DEPTH:
        return [build_value(reader, words, depth + 1) for _ in range(reader.byte() % 6) if not reader.empty]
    if kind < 144:
        return build_text(reader, words)
    if kind < 208:
        return reader.pick(_NUMBERS)
    if kind < 232:
        return reader.byte()
    return reader.pick((None, True, False))


def build_text(reader: ByteReader, words: Sequence[str]) -> str:
    """Return a word of the language in nine of ten cases, else another string."""
    kind = reader.byte()
    if kind < 230:
        return str(words[(kind * 256 + reader.byte()) % len(words)])
    if kind < 245:
        return str(reader.pick(_TEXTS))
    return reader.take(reader.byte() % 12).decode("latin-1")


def build_object(data: bytes, words: Sequence[str]) -> dict[str, Any]:
    """Return an object whose keys are words."""
    reader = ByteReader(data)
    document: dict[str, Any] = {}
    while not reader.empty and len(document) < 12:
        document[build_text(reader, words)] = build_value(reader, words, 1)
    return document
