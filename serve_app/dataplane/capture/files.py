"""The files of captured requests: JSON lines or Parquet, in a folder with a bound."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from serve_app.model_store.atomic_dir import sync

SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet"}
_COLUMNS = ("request_id", "time", "model", "version", "inputs", "output")
_MAX_SEGMENT = 8 << 20  # bytes of a file


class CaptureFiles:
    """The files of one process in a folder that the version's other replicas on the node share.

    A file is closed after ``period`` seconds or at its size. The oldest files are removed beyond
    ``max_bytes``. Every method blocks, and belongs to one thread.
    """

    def __init__(self, folder: Path, process: str, format: str, max_bytes: int, period: float) -> None:
        self.folder = folder
        self._process = process
        self._suffix = SUFFIXES[format]
        self._max_bytes = max_bytes
        self._period = period
        self._segment_bytes = min(_MAX_SEGMENT, max_bytes // 4)
        self._path: Path | None = None
        self._file: BinaryIO | None = None  # of JSON lines
        self._rows: list[dict[str, Any]] = []  # of a Parquet file, until it is written
        self._size = 0
        self._opened_at = 0.0
        self._number = 0
        self._unwritten = self._removed = 0  # records

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append records. Raises OSError, and then appends none of them."""
        if not records:
            return
        if self._file is not None and self._path is not None and not self._path.exists():
            self._forget()  # another replica removed the oldest file
        if self._path is None:
            self._open()
        lines = [orjson.dumps(record, default=str) + b"\n" for record in records]
        if self._file is None:
            self._rows += records
        else:
            self._append(self._file, b"".join(lines))
        self._size += sum(map(len, lines))
        self.roll()

    def _append(self, file: BinaryIO, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:  # a full disk takes a part before it refuses the rest
                view = view[file.write(view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), self._size)  # half a line would be no JSON
            self._forget()
            raise

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = self.folder / f"{stamp}-{self._number:04d}-{self._process}{self._suffix}"
        if self._suffix == ".jsonl":
            self._file = path.open("ab", buffering=0)
        self._path, self._size, self._opened_at = path, 0, time.monotonic()

    def roll(self) -> None:
        """Close the current file when it is due. Raises OSError."""
        is_old = time.monotonic() - self._opened_at >= self._period
        if self._path is not None and self._size and (is_old or self._size >= self._segment_bytes):
            self.close()
            self.remove_oldest()

    def close(self) -> None:
        """Close the current file. Raises OSError."""
        path, rows = self._path, self._rows
        try:
            if rows and path is not None:
                _write_parquet(path, rows)
        except OSError:
            self._unwritten += len(rows)
            raise
        finally:
            self._forget()

    def take_unwritten(self) -> int:
        """Return the number of accepted records that could not be written, since the last call."""
        taken, self._unwritten = self._unwritten, 0
        return taken

    def take_removed(self) -> int:
        """Return the number of records in removed files, since the last call."""
        taken, self._removed = self._removed, 0
        return taken

    def _forget(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._path, self._file, self._rows, self._size = None, None, [], 0

    def remove_oldest(self) -> None:
        """Remove the oldest files beyond the bound. Raises OSError."""
        files = [(path, path.stat().st_size) for path in self.find_files()]
        excess = sum(size for _, size in files) - self._max_bytes
        for path, size in files:
            if excess <= 0:
                break
            if path != self._path:
                self._removed += _count_records(path)
                path.unlink(missing_ok=True)
                excess -= size

    def find_files(self) -> list[Path]:
        """Return the files of every process, the oldest first."""
        return sorted(path for path in self.folder.glob(f"*{self._suffix}"))

    def find_closed(self, orphan_age: float) -> list[Path]:
        """Return this process's closed files, and those of others that are unchanged for so many seconds."""
        limit = time.time() - orphan_age
        closed = []
        for path in self.find_files():
            with contextlib.suppress(FileNotFoundError):
                is_own = path.stem.endswith(f"-{self._process}")
                if path != self._path and (is_own or path.stat().st_mtime < limit):
                    closed.append(path)
        return closed


def _count_records(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):  # of a damaged file
        if path.suffix == ".jsonl":
            return path.read_bytes().count(b"\n")
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    return 0


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as a Parquet file; ``inputs`` and ``output`` are columns of JSON."""
    import pyarrow  # late: an optional package
    import pyarrow.parquet

    def cell(row: dict[str, Any], column: str) -> Any:
        value = row[column]
        return orjson.dumps(value, default=str).decode() if column in ("inputs", "output") else value

    table = pyarrow.table({column: [cell(row, column) for row in rows] for column in _COLUMNS})
    partial = path.with_suffix(".partial")
    try:
        pyarrow.parquet.write_table(table, partial)
        sync(partial)  # an empty file of this name would stay after a power failure
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
