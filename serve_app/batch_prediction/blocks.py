"""Blocks of an input: consecutive rows of a JSONL or Parquet file, on a disk or in an object store.

Paths are those of fsspec: local ones, ``s3://``, ``gs://``. A path is a file, a folder or a pattern.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, cast

import fsspec

from serve_app.batch_prediction.rows import BatchRow

Format = Literal["jsonl", "parquet"]
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}


class BatchInputError(Exception):
    """An error of an input that no row can be read from; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class InputBlock:
    """Consecutive rows of one file; ``start`` and ``end`` are bytes of JSONL, or rows of Parquet."""

    index: int
    file: str
    format: Format
    first: int  # the number of its first row
    rows: int  # lines of JSONL, empty ones included
    start: int
    end: int
    row_group: int = 0


@dataclass(frozen=True)
class BatchInput:
    """The files of an input; ``identity`` changes when the contents of a file do."""

    files: tuple[str, ...]
    format: Format
    identity: tuple[str, ...]


def open_input(path: str, options: Mapping[str, Any]) -> BatchInput:
    """Return the files of ``path``; ``options`` are those of its file system. Raises BatchInputError."""
    try:
        system, root = fsspec.url_to_fs(path, **options)
        found = sorted(system.glob(root)) if any(c in root for c in "*?[") else [root]
        if len(found) == 1 and system.isdir(found[0]):
            found = sorted(name for name in system.find(found[0]) if _suffix(name) in SUFFIXES)
        files = [name for name in found if system.isfile(name)]
        if not files:
            raise BatchInputError(
                f"{path}: no file is there; pass a .jsonl or .parquet file, or a folder of them"
            )
        identity = tuple(str(system.ukey(name)) for name in files)
    except (OSError, ValueError, ImportError) as error:
        raise BatchInputError(f"{path}: {error}") from error
    formats = {SUFFIXES.get(_suffix(name)) for name in files}
    if len(formats) != 1 or None in formats:
        raise BatchInputError(f"{path}: its files must all end in .jsonl, or all in .parquet")
    names = tuple(cast(str, system.unstrip_protocol(name)) for name in files)
    return BatchInput(names, cast(Format, formats.pop()), identity)


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def split_blocks(source: BatchInput, size: int, options: Mapping[str, Any]) -> Iterator[InputBlock]:
    """Yield the blocks of all files, of at most ``size`` rows each. Raises BatchInputError."""
    index = 0
    for file in source.files:
        split = _split_lines if source.format == "jsonl" else _split_row_groups
        for first, rows, start, end, group in split(file, size, options):
            yield InputBlock(index, file, source.format, first, rows, start, end, group)
            index += 1


def _split_lines(
    file: str, size: int, options: Mapping[str, Any]
) -> Iterator[tuple[int, int, int, int, int]]:
    with fsspec.open(file, "rb", **options) as stream:
        first, rows, start, end = 1, 0, 0, 0
        for line in stream:
            rows += 1
            end += len(line)
            if rows == size:
                yield first, rows, start, end, 0
                first, rows, start = first + rows, 0, end
        if rows:
            yield first, rows, start, end, 0


def _split_row_groups(
    file: str, size: int, options: Mapping[str, Any]
) -> Iterator[tuple[int, int, int, int, int]]:
    with _open_parquet(file, options) as parquet:
        first = 0
        for group in range(parquet.num_row_groups):
            length = parquet.metadata.row_group(group).num_rows
            for start in range(0, length, size):
                rows = min(size, length - start)
                yield first + start, rows, start, start + rows, group
            first += length


def _open_parquet(file: str, options: Mapping[str, Any]) -> Any:
    import pyarrow
    from pyarrow import parquet

    system, path = fsspec.url_to_fs(file, **options)
    try:
        return parquet.ParquetFile(path, filesystem=system)
    except (pyarrow.ArrowException, OSError) as error:
        raise BatchInputError(f"{file}: this is no Parquet file: {error}") from error


def read_block(block: InputBlock, column: str | None, options: Mapping[str, Any]) -> list[BatchRow]:
    """Return the rows of a block; a row that cannot be read has a ``problem``.

    With ``column`` the body of a row is that column's value: text, bytes, or anything else as JSON. Otherwise
    it is the line of JSONL, or the columns of Parquet as a JSON object.
    """
    if block.format == "parquet":
        return list(_read_parquet(block, column, options))
    with fsspec.open(block.file, "rb", **options) as stream:
        stream.seek(block.start)
        lines: Sequence[bytes] = stream.read(block.end - block.start).split(b"\n")
    numbered = enumerate(lines[: block.rows], block.first)
    return [_read_line(number, line, column) for number, line in numbered if line.strip()]


def _read_line(number: int, line: bytes, column: str | None) -> BatchRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BatchRow(number, problem=f"line {number} is not JSON: {error}")
    if column is None:
        return BatchRow(number, line.strip(), "application/json")
    if not isinstance(value, dict) or value.get(column) is None:
        return BatchRow(number, problem=f"line {number} has no value {column!r}")
    return _row_of_value(number, value[column])


def _read_parquet(block: InputBlock, column: str | None, options: Mapping[str, Any]) -> Iterator[BatchRow]:
    with _open_parquet(block.file, options) as parquet:
        if column is not None and column not in parquet.schema_arrow.names:
            names = ", ".join(parquet.schema_arrow.names)
            raise BatchInputError(f"{block.file}: there is no column {column!r}; it has {names}")
        columns = None if column is None else [column]
        table = parquet.read_row_group(block.row_group, columns=columns)
    for number, record in enumerate(table.slice(block.start, block.rows).to_pylist(), block.first):
        if column is not None and record[column] is None:
            yield BatchRow(number, problem=f"row {number} has no value {column!r}")
        else:
            yield _row_of_value(number, record if column is None else record[column])


def _row_of_value(number: int, value: Any) -> BatchRow:
    if isinstance(value, str):
        return BatchRow(number, value.encode(), "text/plain")
    if isinstance(value, bytes):
        return BatchRow(number, value, "application/octet-stream")
    return BatchRow(number, json.dumps(value, default=_to_json).encode(), "application/json")


def _to_json(value: Any) -> Any:
    """Return a value of Parquet that JSON lacks: bytes as base64, dates and decimals as text."""
    convert: Callable[[Any], Any] = str
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return convert(value)
