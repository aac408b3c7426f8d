"""Candidates on a running server: each is a model of its own, which is removed after its measurement.

A run has a folder ``.tune/RUN`` in the model store, with the candidates' archives and a locked file. The lock
ends with the process, so a folder without a lock belongs to a run that was killed: the next run
removes its models and archives. Servers do not load archives of hidden folders when they start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from serve_app.client import Client, NotFoundError, ServerError, TransportError
from serve_app.load_test.candidate import Candidate
from serve_app.model_store.archive import CONFIG, MANIFEST
from serve_app.model_store.cache import pack
from serve_app.settings import ModelStoreSettings

_FOLDER = ".tune"
_LOCK = "lock"
_MARK = ".tune-"  # in the names of candidates' models


class TuningError(Exception):
    """An error: tuning cannot start or go on; the message has the reason and the fix."""


class CandidateDeployments:
    """The candidates of one run on one server, as a context manager that removes all of them.

    ``directories`` are the unpacked archives by variant, each with its model-config.yaml. ``parameters`` are
    those of every registration. Entering removes what killed runs have left, and raises TuningError where
    another run is active in this model store.
    """

    def __init__(
        self,
        client: Client,
        model_store: Path,
        model: str,
        run: str,
        directories: Mapping[str, Path],
        parameters: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._store = model_store
        self._model = model
        self._run = run
        self._directories = directories
        self._parameters = parameters
        self._folder = model_store / _FOLDER / run
        self._lock: int | None = None
        self._count = 0
        self._registered: set[str] = set()

    def __enter__(self) -> CandidateDeployments:
        remove_leftovers(self._client, self._store)
        self._folder.mkdir(parents=True, mode=0o755)
        self._lock = _try_lock(self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _uninterrupted():
            for name in sorted(self._registered):
                with contextlib.suppress(ServerError, TransportError):
                    self._unregister(name)
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run's folder may be there
                self._folder.parent.rmdir()
            if self._lock is not None:
                os.close(self._lock)

    @contextlib.contextmanager
    def deploy(self, candidate: Candidate) -> Iterator[str]:
        """Register a candidate, yield the name of its model, and remove it.

        Raises ServerError where the server refuses it or its workers do not start.
        """
        archive = self._pack(candidate)
        self._count += 1
        name = f"{self._model}{_MARK}{self._run}-{self._count}"
        self._registered.add(name)
        try:
            options: dict[str, Any] = {**self._parameters, "model_name": name, "synchronous": True}
            options |= {"batch_size": candidate.batch_size, "initial_workers": candidate.workers}
            if candidate.max_batch_delay:
                options["max_batch_delay"] = candidate.max_batch_delay
            if any(self._directories[candidate.variant].glob("*.pt2")):
                options["trusted"] = True  # the graph was exported here
            self._client.register(archive.relative_to(self._store).as_posix(), **options)
            yield name
        finally:
            with _uninterrupted():
                self._unregister(name)
                archive.unlink(missing_ok=True)

    def memory(self, name: str) -> int | None:
        """Return the bytes of the workers of a candidate's model, or None where none is known."""
        workers = self._client.describe(name)[0]["workers"]
        return sum(worker["memoryUsage"] for worker in workers) or None

    def _unregister(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):
            self._client.unregister(name)
        self._registered.discard(name)

    def _pack(self, candidate: Candidate) -> Path:
        archive = self._folder / f"candidate-{self._count}.mar"
        write_archive(self._directories[candidate.variant], candidate, archive)
        return archive


def write_archive(directory: Path, candidate: Candidate, archive: Path, version: str = "") -> None:
    """Pack a variant's directory with the candidate's configuration; ``version`` replaces the manifest's."""
    work = archive.with_name(f".{archive.name}.d")
    shutil.copytree(
        directory, work, copy_function=_link_or_copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    try:
        configure_directory(work, candidate, version)
        pack(work, archive, ModelStoreSettings())
    finally:
        shutil.rmtree(work, ignore_errors=True)


def configure_directory(directory: Path, candidate: Candidate, version: str = "") -> None:
    """Write the candidate's values into the model-config.yaml of an unpacked archive."""
    manifest: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):  # a model folder
        manifest = json.loads((directory / MANIFEST).read_bytes())
    name = manifest.get("model", {}).get("configFile") or CONFIG
    _replace(directory / name, yaml.safe_dump(candidate.configure(read_config(directory)), sort_keys=False))
    if manifest:
        manifest["model"] |= {"configFile": name} | ({"modelVersion": version} if version else {})
        _replace(directory / MANIFEST, json.dumps(manifest, indent=2))


def read_config(directory: Path) -> dict[str, Any]:
    """Return the model-config.yaml of an unpacked archive, or an empty one."""
    name = CONFIG
    with contextlib.suppress(FileNotFoundError):
        name = json.loads((directory / MANIFEST).read_bytes())["model"].get("configFile") or CONFIG
    try:
        return yaml.safe_load((directory / name).read_text("utf-8")) or {}
    except FileNotFoundError:
        return {}


def check_access(client: Client, model: str) -> None:
    """Raise ServerError where the server does not let this client register and remove models."""
    with contextlib.suppress(NotFoundError):
        client.unregister(f"{model}{_MARK}none")


def remove_leftovers(client: Client, model_store: Path) -> list[str]:
    """Remove the models and archives of runs that were killed; return the models' names.

    Raises TuningError where another run is active.
    """
    folders = [folder for folder in (model_store / _FOLDER).glob("*") if folder.is_dir()]
    removed: list[str] = []
    for folder in folders:
        lock = _try_lock(folder)
        if lock is None:
            raise TuningError(
                f"Another run of torchrelay tune uses {folder}. Measurements at the same time disturb each "
                "other; wait until it has ended."
            )
        try:
            mark = f"{_MARK}{folder.name}-"
            for name in [m["modelName"] for m in client.models() if mark in m["modelName"]]:
                with contextlib.suppress(NotFoundError):
                    client.unregister(name)
                removed.append(name)
            shutil.rmtree(folder)
        finally:
            os.close(lock)
    return removed


def _try_lock(folder: Path) -> int | None:
    """Return the descriptor of a run's locked file, or None where its process is alive."""
    import fcntl  # late: clients on Windows have the other commands

    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM: a second one must not leave models behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


def _replace(file: Path, text: str) -> None:
    """Write a new file: the old one may be a hard link."""
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, "utf-8")
