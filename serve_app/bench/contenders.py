"""One row of a table: a server asked for one model over HTTP, or a model without a server."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from serve_app.bench import Load, Request, Result, peers, report, send
from serve_app.bench.archives import MODELS
from serve_app.bench.peers import PeerFailed


@dataclass(frozen=True)
class Contender:
    """One row of a table: its name, and how it is measured."""

    name: str
    measure: Callable[[Load], Result]


def over_http(
    name: str, url: str, model: str, headers: Mapping[str, str] | None = None, bodies: Sequence[bytes] = ()
) -> Contender:
    """A contender that answers a model's requests at ``url``, and has just answered one rightly.

    It is sent ``bodies`` in turn where they are given, else the model's own.
    """
    ask(url, model, headers)
    asked = MODELS[model]
    request = Request(url, body=asked.body, bodies=bodies, content_type=asked.content_type, headers=headers or {})
    return Contender(name, partial(send, request))


def ask(url: str, model: str, headers: Mapping[str, str] | None = None) -> dict:
    """One checked answer of a model. Raises PeerFailed when it is wrong or none."""
    sent = {"content-type": MODELS[model].content_type, **(headers or {})}
    try:
        answer = httpx.post(url, content=MODELS[model].body, headers=sent, timeout=30)
        decoded = answer.json()
        if answer.status_code == 200 and MODELS[model].check(decoded):
            return decoded
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise PeerFailed(f"{url} gave no answer of {model}: {error!r}") from error
    raise PeerFailed(f"{url} gave a wrong answer of {model}: {answer.status_code} {answer.text[:200]}")


def bare_loop(model: str, threads: int) -> Contender:
    """The same model in a process of its own, without a server."""

    def measure(load: Load) -> Result:
        command = [sys.executable, "-m", "serve_app.bench.bare_loop", model, str(threads), str(load.seconds)]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=env, cwd=peers.ROOT, capture_output=True, text=True)
        if done.returncode:
            raise PeerFailed(f"the bare loop of {model} ended with {done.returncode}: {done.stderr.strip()}")
        found = json.loads(done.stdout)
        nan = math.nan  # a batch has a time, a request has none here
        return Result("loop", 0, found["seconds"], found["rows"], found["rows"], nan, nan, nan, nan)

    return Contender(report.LOOP, measure)
