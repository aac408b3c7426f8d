"""The loads of a trial: requests to a candidate's model in an open loop, and in a closed one."""

from __future__ import annotations

import json
import math
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from serve_app.load_test import generation_load, send
from serve_app.load_test.candidate_deployments import TuningError
from serve_app.load_test.generation_load import TokenLoadRequest
from serve_app.load_test.profile import LoadProfile, LoadRequest
from serve_app.load_test.rate_search import LoadStep

_WARMUP = 0.5  # seconds before each step that are not counted
_MIN_REQUESTS = 200  # of a step, for its p99
_MAX_STEP = 10  # times the given seconds, for slow models
_LIMITS_PER_STEP = 10  # a queue that grows by a tenth has reached the limit by then
_OPEN_CONNECTIONS = 256
_TYPES = {".json": "application/json", ".txt": "text/plain"}


@dataclass(frozen=True)
class SampleRequests:
    """The bodies that are sent in turn, with their content type."""

    bodies: Sequence[bytes]
    content_type: str

    @classmethod
    def read(cls, files: Sequence[Path]) -> SampleRequests:
        """Read sample files, whose type follows from their names. Raises TuningError for several types."""
        types = {
            _TYPES.get(f.suffix) or mimetypes.guess_type(f.name)[0] or "application/octet-stream"
            for f in files
        }
        if len(types) > 1:
            raise TuningError(
                f"The samples are of several types ({', '.join(sorted(types))}); pass files of one type with "
                "--data."
            )
        try:
            return cls([file.read_bytes() for file in files], types.pop())
        except OSError as error:
            raise TuningError(f"{error.filename} cannot be read: {error.strerror}.") from None


class TrialLoad(Protocol):
    """A load of one kind."""

    def send_open(self, model: str, rate: float, length: int) -> LoadStep:
        """Send requests at a rate, in ``length`` times the usual seconds."""

    def send_closed(self, model: str, connections: int) -> LoadStep:
        """Send requests of that many clients."""


class PredictionLoad:
    """A load of predictions; ``limit`` is in seconds, ``headers`` has the key of the inference port."""

    def __init__(
        self,
        inference: str,
        samples: SampleRequests,
        limit: float,
        seconds: float,
        headers: Callable[[], Mapping[str, str]],
    ) -> None:
        self._inference = inference
        self._samples = samples
        self._limit = limit
        self._seconds = seconds
        self._headers = headers

    def send_open(self, model: str, rate: float, length: int) -> LoadStep:
        seconds = step_seconds(self._seconds * length, self._limit, rate)
        return self._send(model, LoadProfile(_OPEN_CONNECTIONS, rate, seconds, **self._common))

    def send_closed(self, model: str, connections: int) -> LoadStep:
        return self._send(model, LoadProfile(connections, None, self._seconds, **self._common))

    @property
    def _common(self) -> dict[str, Any]:
        return {"warmup": _WARMUP, "limit": self._limit, "timeout": request_timeout(self._limit)}

    def _send(self, model: str, profile: LoadProfile) -> LoadStep:
        request = LoadRequest(
            f"{self._inference}/predictions/{model}",
            bodies=self._samples.bodies,
            content_type=self._samples.content_type,
            headers=self._headers(),
        )
        result = send(request, profile, "asyncio")
        return LoadStep(
            rate=profile.rate,
            connections=profile.connections,
            seconds=result.seconds,
            requests=result.requests,
            completed=result.completed,
            within=result.within or 0,
            failed=result.failed,
            p50=result.p50,
            p99=result.p99,
            mean=result.mean,
            lag=result.lag,
            errors=dict(result.errors),
        )


class GenerationLoad:
    """A load of text generation over OpenAI's API; the limit is that of the time to first token."""

    def __init__(
        self,
        inference: str,
        bodies: Sequence[Mapping[str, Any]],
        limit: float,
        seconds: float,
        headers: Callable[[], Mapping[str, str]],
    ) -> None:
        self._inference = inference
        self._bodies = bodies
        self._limit = limit
        self._seconds = seconds
        self._headers = headers

    @staticmethod
    def parse(samples: SampleRequests) -> list[dict[str, Any]]:
        """Return the bodies of samples: objects with a prompt or messages, or texts as prompts.

        Raises TuningError.
        """
        found: list[dict[str, Any]] = []
        for body in samples.bodies:
            try:
                text = body.decode()
                value = json.loads(text) if samples.content_type == "application/json" else text
            except ValueError as error:
                raise TuningError(f"A sample of text generation is no text or JSON: {error}.") from None
            document = {"prompt": value} if isinstance(value, str) else value
            if isinstance(document, dict) and "inputs" in document:
                document = {"prompt": document.pop("inputs"), **document}
            if not isinstance(document, dict) or not {"prompt", "messages"} & set(document):
                raise TuningError(
                    "A sample of text generation has neither prompt nor messages; pass a text or a JSON "
                    "object of OpenAI's API with --data."
                )
            if "max_new_tokens" in document:
                document["max_tokens"] = document.pop("max_new_tokens")
            found.append(document)
        return found

    def send_open(self, model: str, rate: float, length: int) -> LoadStep:
        seconds = step_seconds(self._seconds * length, self._limit, rate, requests=_MIN_REQUESTS // 10)
        return self._send(model, LoadProfile(_OPEN_CONNECTIONS, rate, seconds, **self._common))

    def send_closed(self, model: str, connections: int) -> LoadStep:
        return self._send(model, LoadProfile(connections, None, self._seconds * 2, **self._common))

    @property
    def _common(self) -> dict[str, Any]:
        return {"warmup": _WARMUP, "limit": self._limit, "timeout": 60.0}

    def _send(self, model: str, profile: LoadProfile) -> LoadStep:
        bodies = [{**body, "model": model} for body in self._bodies]
        request = TokenLoadRequest(f"{self._inference}/v1", bodies, self._headers())
        result = generation_load.run(request, profile)
        return LoadStep(
            rate=profile.rate,
            connections=profile.connections,
            seconds=result.seconds,
            requests=result.requests,
            completed=result.completed,
            within=result.within or 0,
            failed=result.failed,
            p50=result.ttft_p50,
            p99=result.ttft_p99,
            mean=result.latency_mean,
            errors=dict(result.errors),
            generation={
                "ttft_p50": result.ttft_p50,
                "ttft_p99": result.ttft_p99,
                "itl_p50": result.itl_p50,
                "itl_p99": result.itl_p99,
                "tokens_per_second": result.tokens / result.seconds,
            },
        )


def step_seconds(seconds: float, limit: float, rate: float, requests: int = _MIN_REQUESTS) -> float:
    """Return the seconds of a step: enough requests for a p99, and for a growing queue to reach the limit."""
    return min(max(seconds, limit * _LIMITS_PER_STEP, requests / rate), seconds * _MAX_STEP)


def request_timeout(limit: float) -> float:
    """Return the seconds after which a request has failed: far above the limit."""
    return max(2.0, 5 * limit) if math.isfinite(limit) else 30.0
