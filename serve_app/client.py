"""A small client of the two REST APIs, for the command line and for scripts."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx


class ServerError(Exception):
    """The server said no: ``status`` and its message."""

    def __init__(self, status: int, message: str, detail: str = "") -> None:
        super().__init__(status, message, detail)
        self.status = status
        self.message = message
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message} ({self.status})" + (f"\n{self.detail}" if self.detail else "")


class Client:
    """Speaks to the inference port and to the management port of one server.

    ``token`` is the key that requests show. Without one it is looked up in ``key_file``, which is the server's
    own and may come later; ``verify`` is the client's side of TLS, as httpx takes it.
    """

    def __init__(
        self,
        inference: str = "http://127.0.0.1:8080",
        management: str = "http://127.0.0.1:8081",
        timeout: float = 120.0,
        token: str = "",
        key_file: Path | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        def client(address: str, kind: Literal["inference", "management"]) -> httpx.Client:
            if token:
                keys: httpx.Auth | None = _Bearer(token)
            elif key_file is not None:
                keys = _KeyFile(key_file, kind, management)
            else:
                keys = None
            return httpx.Client(base_url=address, timeout=timeout, auth=keys, verify=verify)

        self._inference = client(inference, "inference")
        self._management = client(management, "management")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._inference.close()
        self._management.close()

    def ready(self) -> bool:
        """Whether the server has its table, and every version that start-up wanted is ready or has failed."""
        try:
            return self._inference.get("/health/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def predict(self, model: str, body: bytes, content_type: str = "", version: str | None = None) -> bytes:
        path = f"/predictions/{model}" + (f"/{version}" if version else "")
        headers = {"content-type": content_type} if content_type else {}
        return _checked(self._inference.post(path, content=body, headers=headers)).content

    def models(self) -> list[dict[str, Any]]:
        """Every model by name: ``modelName`` and ``modelUrl`` of its default version."""
        models: list[dict[str, Any]] = []
        token: str | None = "0"
        while token is not None:
            page = _checked(self._management.get("/models", params={"next_page_token": token})).json()
            models += page["models"]
            token = page.get("nextPageToken")
        return models

    def describe(self, model: str, version: str = "all") -> list[dict[str, Any]]:
        return _checked(self._management.get(f"/models/{model}/{version}")).json()

    def register(self, url: str, **parameters: Any) -> str:
        """Register an archive; ``parameters`` are those of ``POST /models``."""
        answer = self._management.post("/models", params={"url": url, **_asked(parameters)}, timeout=None)
        return _checked(answer).json()["status"]

    def events(self, model: str, **parameters: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """How a model comes up: stages, and what is said of each, to the end; ``parameters`` are the route's."""
        path = f"/models/{quote(model, safe='')}/events"
        # The server breaks its silence every 15 seconds.
        with self._management.stream("GET", path, params=_asked(parameters), timeout=60) as answer:
            if not answer.is_success:
                answer.read()
            stage = ""
            for line in _checked(answer).iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    stage = value
                elif field == "data":
                    yield stage, json.loads(value)

    def scale(self, model: str, version: str | None = None, **parameters: Any) -> str:
        """Change how many workers a version has; ``parameters`` are those of ``PUT /models/{model}``."""
        path = f"/models/{model}" + (f"/{version}" if version else "")
        return _checked(self._management.put(path, params=_asked(parameters), timeout=None)).json()["status"]

    def set_default(self, model: str, version: str) -> str:
        return _checked(self._management.put(f"/models/{model}/{version}/set-default")).json()["status"]

    def unregister(self, model: str, version: str | None = None) -> str:
        path = f"/models/{model}" + (f"/{version}" if version else "")
        return _checked(self._management.delete(path)).json()["status"]

    def traffic(self, model: str) -> dict[str, Any]:
        """A model's traffic policy, and under ``in_force`` who gets how much of its calls now."""
        return _checked(self._management.get(_traffic(model))).json()

    def set_traffic(self, model: str, policy: Any) -> dict[str, Any]:
        """Set the whole policy; what ``traffic`` says then, or ``status`` where a part of the server is late."""
        return _checked(self._management.put(_traffic(model), json=policy)).json()

    def reset_traffic(self, model: str) -> dict[str, Any]:
        """Every call gets the default version again; the answer is as of ``set_traffic``."""
        return _checked(self._management.delete(_traffic(model))).json()

    def begin_experiment(self, model: str, document: Any) -> dict[str, Any]:
        """Deal a model's calls out to the arms of an experiment; the answer has its ``id``."""
        return _checked(self._management.post(f"/models/{quote(model, safe='')}/experiments", json=document)).json()

    def experiments(self, model: str | None = None) -> list[dict[str, Any]]:
        """Those of a model (None: of all), the newest first, without their figures."""
        path = f"/models/{quote(model, safe='')}/experiments" if model else "/experiments"
        return _checked(self._management.get(path)).json()["experiments"]

    def experiment(self, id: str) -> dict[str, Any]:
        """What is known by now."""
        return _checked(self._management.get(f"/experiments/{quote(id, safe='')}")).json()

    def stop_experiment(self, id: str) -> dict[str, Any]:
        return _checked(self._management.delete(f"/experiments/{quote(id, safe='')}")).json()

    def forget_experiment(self, id: str) -> str:
        """Drop one that was stopped, with what was measured."""
        path = f"/experiments/{quote(id, safe='')}"
        return _checked(self._management.delete(path, params={"forget": "true"})).json()["status"]

    def reward(self, id: str, *events: dict[str, Any]) -> dict[str, int]:
        """How many of them were ``counted``, and how many ``repeated`` what had been counted before."""
        return _checked(self._management.post(f"/experiments/{quote(id, safe='')}/events", json=list(events))).json()

    def begin_rollout(self, model: str, document: Any) -> dict[str, Any]:
        """Let the version ``to`` of ``document`` take over a model's calls step by step."""
        return _checked(self._management.post(_rollout(model), json=document)).json()

    def rollout(self, model: str) -> dict[str, Any]:
        """How far a model's last rollout is, its figures, its guardrails and its decisions."""
        return _checked(self._management.get(_rollout(model))).json()

    def steer_rollout(self, model: str, verb: Literal["pause", "resume", "abort"]) -> dict[str, Any]:
        return _checked(self._management.post(f"{_rollout(model)}/{verb}")).json()

    def shadow(self, model: str) -> dict[str, Any]:
        """How the answers of a model's shadow agree with the live ones, and the worst disagreements."""
        return _checked(self._management.get(_shadow(model))).json()

    def forget_shadow(self, model: str) -> str:
        """Drop these figures, and the inputs that are kept."""
        return _checked(self._management.delete(_shadow(model))).json()["status"]


_Flow = Generator[httpx.Request, httpx.Response, None]


class _Bearer(httpx.Auth):
    """Every request shows this key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def auth_flow(self, request: httpx.Request) -> _Flow:
        request.headers["authorization"] = f"Bearer {self._key}"
        yield request


class _KeyFile(httpx.Auth):
    """Every request shows the key of its kind in a server's key_file.json, and one that has expired is renewed."""

    def __init__(self, path: Path, kind: Literal["inference", "management"], management: str) -> None:
        self._path = path
        self._kind = kind
        self._token = httpx.URL(management).join("/token")

    def auth_flow(self, request: httpx.Request) -> _Flow:
        if self._sign(request, self._kind):
            response = yield request
            if response.headers.get("x-torchrelay-reason") == "expired_token":
                renewal = httpx.Request("GET", self._token, params={"type": self._kind})
                self._sign(renewal, "API")
                yield renewal
                self._sign(request, self._kind)
                yield request
        else:
            yield request

    def _sign(self, request: httpx.Request, kind: str) -> bool:
        """Put the file's key into the request; False where there is none (yet)."""
        try:
            request.headers["authorization"] = f"Bearer {json.loads(self._path.read_text())[kind]['key']}"
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True


def _traffic(model: str) -> str:
    return f"/models/{quote(model, safe='')}/traffic"


def _rollout(model: str) -> str:
    return f"/models/{quote(model, safe='')}/rollout"


def _shadow(model: str) -> str:
    return f"/models/{quote(model, safe='')}/shadow"


def _asked(parameters: dict[str, Any]) -> dict[str, Any]:
    def word(value: Any) -> Any:
        return str(value).lower() if isinstance(value, bool) else value

    return {key: word(value) for key, value in parameters.items() if value is not None}


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        body = response.json()
        raise ServerError(response.status_code, body["message"], body.get("detail", ""))
    except (ValueError, KeyError, TypeError):
        raise ServerError(response.status_code, response.text or response.reason_phrase) from None
