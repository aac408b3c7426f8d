"""The loads of a trial: requests to a candidate's model in an open loop, and in a closed one."""

from __future__ import annotations

import json
import math
import mimetypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

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

S = TypeVar("S")


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


class TrialLoad(ABC, Generic[S]):
    """A load of one kind; ``limit`` is in seconds, ``headers`` has the key of the inference port."""

    min_requests = _MIN_REQUESTS
    closed_length = 1  # of a closed loop, in the usual seconds

    def __init__(
        self,
        inference: str,
        samples: S,
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
        """Send requests at a rate, in ``length`` times the usual seconds."""
        seconds = step_seconds(self._seconds * length, self._limit, rate, self.min_requests)
        return self._send(model, self._profile(_OPEN_CONNECTIONS, rate, seconds))

    def send_closed(self, model: str, connections: int) -> LoadStep:
        """Send requests of that many clients."""
        return self._send(model, self._profile(connections, None, self._seconds * self.closed_length))

    def _profile(self, connections: int, rate: float | None, seconds: float) -> LoadProfile:
        return LoadProfile(
            connections, rate, seconds, warmup=_WARMUP, limit=self._limit, timeout=self._request_timeout()
        )

    def _request_timeout(self) -> float:
        return max(2.0, 5 * self._limit) if math.isfinite(self._limit) else 30.0  # far above the limit

    @abstractmethod
    def _send(self, model: str, profile: LoadProfile) -> LoadStep:
        """Send the requests of a step."""


class PredictionLoad(TrialLoad[SampleRequests]):
    """A load of predictions."""

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


class GenerationLoad(TrialLoad[Sequence[Mapping[str, Any]]]):
    """A load of text generation over OpenAI's API; the limit is that of the time to first token."""

    min_requests = _MIN_REQUESTS // 10
    closed_length = 2

    def _request_timeout(self) -> float:
        return 60.0

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

    def _send(self, model: str, profile: LoadProfile) -> LoadStep:
        bodies = [{**body, "model": model} for body in self._samples]
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
