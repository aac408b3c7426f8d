"""The results of a batch prediction: a folder with one file for each block, and the job's description.

A file appears whole, so the files that are there are the blocks that are done.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec

from serve_app.batch_prediction.blocks import Format
from serve_app.batch_prediction.rows import RowResult

JOB_FILE = "_job.json"
_PART = re.compile(r"part-(\d+)\.(?:jsonl|parquet)")


class BatchOutputError(Exception):
    """An error of the folder of results; the message has the remedy."""


class ResultFolder:
    """The folder of a job's results, on a disk or in an object store; ``options`` are its file system's."""

    def __init__(self, path: str, format: Format, options: Mapping[str, Any]) -> None:
        self._system, self._root = fsspec.url_to_fs(path, **options)
        self._path = path
        self._format = format

    def open(self, job: Mapping[str, Any], overwrite: bool = False) -> set[int]:
        """Return the blocks that are done; write the description of a new job.

        Raises BatchOutputError for a folder with the results of another job or with other files, unless
        ``overwrite`` removes them.
        """
        if overwrite and self._system.exists(self._root):
            self._remove_results()
        names = self._names()
        if JOB_FILE not in names:
            if names:
                raise BatchOutputError(f"{self._path} is not empty; pass another folder, or --overwrite")
            self._system.makedirs(self._root, exist_ok=True)
            self._write(JOB_FILE, json.dumps(job, indent=2).encode())
            return set()
        with self._system.open(self._join(JOB_FILE), "rb") as file:
            earlier = json.load(file)
        changed = sorted(key for key in job.keys() | earlier.keys() if job.get(key) != earlier.get(key))
        if changed:
            raise BatchOutputError(
                f"{self._path} has results of another job (other {', '.join(changed)}); pass another "
                "folder, or --overwrite"
            )
        return {int(part[1]) for name in names if (part := _PART.fullmatch(name))}

    def write_part(self, index: int, file: str, results: Sequence[RowResult]) -> None:
        """Write the results of a block, whose rows are in ``file``."""
        name = f"part-{index:05d}.{self._format}"
        if self._format == "jsonl":
            lines = (json.dumps(_record(file, result)) + "\n" for result in results)
            return self._write(name, "".join(lines).encode())
        return self._write(name, _write_parquet(file, results))

    def _names(self) -> list[str]:
        if not self._system.exists(self._root):
            return []
        self._system.invalidate_cache()
        paths = self._system.ls(self._root, detail=False)
        return [
            name for path in paths if (name := posixpath.basename(path.rstrip("/"))) and path != self._root
        ]

    def _remove_results(self) -> None:
        for name in self._names():
            if name == JOB_FILE or _PART.fullmatch(name):
                self._system.rm(self._join(name))

    def _write(self, name: str, content: bytes) -> None:
        """Write a file that appears whole: object stores do so, local ones by a rename."""
        if "file" not in self._system.protocol:
            return self._system.pipe_file(self._join(name), content)
        partial = self._join(f".{name}.partial")
        self._system.pipe_file(partial, content)
        return self._system.mv(partial, self._join(name))

    def _join(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def _record(file: str, result: RowResult) -> dict[str, Any]:
    place: dict[str, Any] = {"file": file, "row": result.number}
    if result.reason:
        return {**place, "error": {"reason": result.reason, "message": result.message}}
    return {**place, "prediction": result.prediction}


def _write_parquet(file: str, results: Sequence[RowResult]) -> bytes:
    """Return a table of the results; predictions are JSON texts, so that all parts have one schema."""
    import pyarrow
    from pyarrow import parquet

    columns = {
        "file": pyarrow.array([file] * len(results), pyarrow.string()),
        "row": pyarrow.array([result.number for result in results], pyarrow.int64()),
        "prediction": pyarrow.array(
            [None if r.reason else json.dumps(r.prediction) for r in results], pyarrow.string()
        ),
        "error_reason": pyarrow.array([r.reason or None for r in results], pyarrow.string()),
        "error_message": pyarrow.array([r.message or None for r in results], pyarrow.string()),
    }
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()
