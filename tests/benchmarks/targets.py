"""One row of a table: a server asked for one model over HTTP, or a model without a server."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import httpx
import psutil

from serve_app.load_test import LoadProfile, LoadRequest, LoadResult, send
from tests.benchmarks import grpc_load, report, servers
from tests.benchmarks.archives import MODELS, Model
from tests.benchmarks.servers import Peer, PeerFailed


@dataclass(frozen=True)
class Contender:
    """One row of a table: its name, how it is measured, and the server whose CPU time is counted."""

    name: str
    measure: Callable[[LoadProfile], LoadResult]
    peer: Peer | None = None

    def processes(self) -> list[psutil.Process]:
        return self.peer.processes() if self.peer else []


def over_http(
    name: str,
    url: str,
    model: str | Model,
    headers: Mapping[str, str] | None = None,
    bodies: Sequence[bytes] = (),
    *,
    peer: Peer | None = None,
) -> Contender:
    """Return a contender that answers a model's requests at ``url``, after one correct answer.

    ``bodies`` are sent in turn where they are given, else the model's own.
    """
    ask(url, model, headers)
    requested = _model(model)
    request = LoadRequest(
        url, body=requested.body, bodies=bodies, content_type=requested.content_type, headers=headers or {}
    )
    return Contender(name, partial(send, request), peer)


def over_grpc(name: str, peer: Peer, registered: str, model: str) -> Contender:
    """Return a contender that answers ``model`` by gRPC on one connection; ``registered`` is its name
    there.
    """
    requested = MODELS[model]
    call = grpc_load.Call(
        peer.grpc, grpc_load.prediction(registered, body=requested.body), holds=requested.body
    )

    def measure(load: LoadProfile) -> LoadResult:
        try:
            return grpc_load.run(call, load)
        except OSError as error:
            raise PeerFailed(f"{peer.name} does not answer by gRPC at {peer.grpc}: {error}") from error

    found = measure(LoadProfile(seconds=0.2, warmup=0.0))
    if found.errors or not found.requests:
        raise PeerFailed(f"{peer.name} gave no good answer of {registered} by gRPC: {dict(found.errors)}")
    return Contender(name, measure, peer)


def ask(url: str, model: str | Model, headers: Mapping[str, str] | None = None) -> Any:
    """One checked answer of a model. Raises PeerFailed when it is wrong or none."""
    requested = _model(model)
    sent = {"content-type": requested.content_type, **(headers or {})}
    try:
        answer = httpx.post(url, content=requested.body, headers=sent, timeout=30)
        decoded = answer.json()
        if answer.status_code == 200 and requested.check(decoded):
            return decoded
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise PeerFailed(f"{url} gave no answer of {requested.name}: {error!r}") from error
    raise PeerFailed(
        f"{url} gave a wrong answer of {requested.name}: {answer.status_code} {answer.text[:200]}"
    )


def _model(model: str | Model) -> Model:
    return MODELS[model] if isinstance(model, str) else model


def _with(threads: int) -> dict[str, str]:
    """Return the environment of a process with so many threads for computing and tokenizing, as a replica
    has.
    """
    tokenizers = {"TOKENIZERS_PARALLELISM": "false"} if threads == 1 else {"RAYON_NUM_THREADS": str(threads)}
    return {**os.environ, "OMP_NUM_THREADS": str(threads), **tokenizers}


def bare_loop(model: str, threads: int) -> Contender:
    """Start the same model in a process of its own, without a server."""

    def measure(load: LoadProfile) -> LoadResult:
        command = [sys.executable, "-m", "tests.benchmarks.bare_loop", model, str(threads), str(load.seconds)]
        done = subprocess.run(command, env=_with(threads), cwd=servers.ROOT, capture_output=True, text=True)
        if done.returncode:
            raise PeerFailed(f"the bare loop of {model} ended with {done.returncode}: {done.stderr.strip()}")
        found = json.loads(done.stdout)
        nan = math.nan  # a batch has a time, a request has none here
        return LoadResult("loop", 0, found["seconds"], found["rows"], found["rows"], nan, nan, nan, nan)

    return Contender(report.LOOP, measure)


class Measurer:
    """A process of ours that stays and measures on request; each line it prints is JSON."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str], what: str) -> None:
        self._process, self._errors, self._what = process, errors, what

    def tell(self, word: object) -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``hear`` says why
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()

    def hear(self) -> Any:
        """Its next line. Raises PeerFailed when it ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._errors.seek(0)
        result = self._errors.read().strip()[-1000:]
        raise PeerFailed(f"the {self._what} ended with {self._process.wait()}: {result}")

    def loop(self, name: str) -> Contender:
        """Return the contender that loops for the given seconds and reports how many ``rows`` it
        processed.
        """

        def measure(load: LoadProfile) -> LoadResult:
            for seconds in (load.warmup, load.seconds):
                self.tell(seconds)
                found = self.hear()
            nan = math.nan  # a batch has a time, a request has none here
            return LoadResult("loop", 0, found["seconds"], found["rows"], found["rows"], nan, nan, nan, nan)

        return Contender(name, measure)


@contextlib.contextmanager
def measurer(module: str, *words: str, threads: int) -> Iterator[Measurer]:
    """``tests.benchmarks.MODULE`` with ``words``, in a process of its own that ends with the block."""
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *words]
    with tempfile.TemporaryFile("w+") as errors:
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        with subprocess.Popen(command, env=_with(threads), cwd=servers.ROOT, text=True, **streams) as process:
            try:
                yield Measurer(process, errors, f"{module} {words[0]}")
            finally:
                process.kill()
