"""Requests that a browser sends for a page of another site, and names that are rebound to this machine."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.security.attack import Outcome, Target, attack

_PAGE = "http://page.example"
_FORM = {"origin": _PAGE, "content-type": "text/plain"}


def _refused(response: httpx.Response) -> Outcome:
    return Outcome(
        f"{response.status_code} {response.headers.get('x-torchrelay-reason', '')}",
        response.status_code == 403,
    )


def _rebound(url: str) -> dict[str, str]:
    """Return the headers of a page whose name was bound to this machine after it was loaded."""
    host = f"page.example:{urlsplit(url).port}"
    return {"host": host, "origin": f"http://{host}"}


@attack("origins", "a form of another site registers a model", "200, registered", keys=False)
def register_by_form(target: Target) -> Outcome:
    response = httpx.post(
        f"{target.management}/models?url=echo-1.0.mar&model_name=planted", headers=_FORM, timeout=60
    )
    httpx.delete(f"{target.management}/models/planted", timeout=60)
    return _refused(response)


@attack("origins", "a request without Origin, marked cross-site, scales a model", "202", keys=False)
def scale_cross_site(target: Target) -> Outcome:
    headers = {"sec-fetch-site": "cross-site"}
    return _refused(httpx.put(f"{target.management}/models/echo?min_worker=1", headers=headers, timeout=60))


@attack("origins", "a rebound name lists and registers models", "200, 200", keys=False)
def rebind_management(target: Target) -> Outcome:
    headers = _rebound(target.management)
    listed = httpx.get(f"{target.management}/models", headers=headers, timeout=60)
    changed = httpx.post(
        f"{target.management}/models?url=echo-1.0.mar&model_name=planted", headers=headers, timeout=60
    )
    httpx.delete(f"{target.management}/models/planted", timeout=60)
    return Outcome(
        f"{listed.status_code}, {changed.status_code}", {listed.status_code, changed.status_code} == {403}
    )


@attack("origins", "a form of another site sends a prediction", "200, 200, 200, 200", keys=False)
def predict_by_form(target: Target) -> Outcome:
    statuses = [
        httpx.post(target.inference + path, headers=_FORM, content=body, timeout=60).status_code
        for path, body in (
            ("/predictions/echo", b"x"),
            ("/%70redictions/echo", b"x"),
            ("/v2/models/echo/infer", b'{"inputs": []}'),
            ("/v1/chat/completions", b'{"model": "echo", "messages": []}'),
        )
    ]
    return Outcome(", ".join(map(str, statuses)), set(statuses) == {403})


@attack("origins", "a rebound name reads predictions", "200", keys=False)
def rebind_inference(target: Target) -> Outcome:
    headers = _rebound(target.inference)
    return _refused(httpx.post(f"{target.inference}/predictions/echo", headers=headers, content=b"x"))


@attack("origins", "a rebound name opens a WebSocket", "101, open", keys=False)
def rebind_websocket(target: Target) -> Outcome:
    address = urlsplit(target.inference)
    host = f"page.example:{address.port}"
    try:
        with connect(
            f"ws://{host}/predictions/echo",
            sock=socket.create_connection((address.hostname, address.port)),
            origin=f"http://{host}",  # type: ignore[arg-type]
            proxy=None,
        ):
            return Outcome("101, open", resisted=False)
    except InvalidStatus as error:
        status = error.response.status_code
        return Outcome(f"{status}", status == 403)
