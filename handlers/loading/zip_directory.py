"""Zip files of unknown origin: their central directory is counted before zipfile parses it.

zipfile keeps an object of 600 bytes for each entry, which takes 46 bytes in the file.
"""

from __future__ import annotations

import struct
import zipfile
from typing import IO, Any

_SIGNATURE = b"PK\x01\x02"
_HEADER_BYTES = 46
_LENGTHS = struct.Struct("<3H")  # of name, extra field and comment
_LENGTHS_OFFSET = 28
_MAX_ENTRY_BYTES = 512  # of the directory, on average
_MIN_DIRECTORY_BYTES = 1 << 17  # that are always read; the end of the file with its comment has half of it


class TooManyEntries(ValueError):
    """A zip file with more entries than permitted."""


def open_zip(file: IO[bytes], max_entries: int) -> zipfile.ZipFile:
    """Open a zip file for reading. Raises TooManyEntries, and the errors of zipfile."""
    source: Any = _CountedFile(file, max_entries)
    archive = zipfile.ZipFile(source)
    source.is_open = True
    return archive


class _CountedFile:
    """A file that counts the entries of a central directory in what is read until ``is_open``."""

    def __init__(self, file: IO[bytes], max_entries: int) -> None:
        self._file = file
        self._max_entries = max_entries
        self.is_open = False

    def read(self, size: int = -1) -> bytes:
        if self.is_open:
            return self._file.read(size)
        if size > max(_MIN_DIRECTORY_BYTES, _MAX_ENTRY_BYTES * self._max_entries):
            raise TooManyEntries(f"its directory has {size} bytes")
        data = self._file.read(size)
        position = count = 0
        while data.startswith(_SIGNATURE, position) and position + _HEADER_BYTES <= len(data):
            count += 1
            if count > self._max_entries:
                raise TooManyEntries(f"it has more than {self._max_entries} entries")
            position += _HEADER_BYTES + sum(_LENGTHS.unpack_from(data, position + _LENGTHS_OFFSET))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
