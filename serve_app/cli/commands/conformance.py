"""``torchrelay conformance``: a platform's contract, checked against any server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from rich.markup import escape

from handlers import extras
from serve_app.cli.api_client import INFERENCE, MANAGEMENT, Token, key_file
from serve_app.cli.terminal import console, fail
from serve_app.cli.vertex import HEALTH, PREDICT
from serve_app.client.keys import KeyFile, KeyKind
from serve_app.conformance import GRPC_CONTRACTS, NAMES, ServerUnderTest, run


def conformance(
    contract: Annotated[str, typer.Argument(help=", ".join(NAMES))],
    url: Annotated[
        str,
        typer.Option("--url", "--base-url", help=f"The server's address: {INFERENCE}, or host:port of gRPC."),
    ] = "",
    model: Annotated[str, typer.Option(help="The model's name, for protocols that have it.")] = "model",
    instance: Annotated[
        str, typer.Option(help="A valid input of the model, in JSON: what the contract wraps.")
    ] = '"text"',
    health: Annotated[
        str, typer.Option(envvar=HEALTH, help="The path of the probe, where the platform chooses it.")
    ] = "/ping",
    predict: Annotated[
        str, typer.Option(envvar=PREDICT, help="The path of predictions, where the platform chooses it.")
    ] = "/invocations",
    token: Token = "",
    timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a server against the documented contract of a platform or protocol, requirement by requirement.

    The server need not be Torchrelay. The exit code is 1 where a requirement is not met.
    """
    if contract not in NAMES:
        fail(f"There is no contract {contract}: there are {', '.join(NAMES)}.")
    value = _parse(instance)
    if contract in GRPC_CONTRACTS:
        opened = _open_grpc(contract, url, model, value, token, timeout)
    else:
        opened = _open_http(url or INFERENCE, model, value, (health, predict), token, timeout)
    with opened as server:
        outcomes = []
        for outcome in run(contract, server):
            outcomes.append(outcome)
            if not as_json:
                mark = "[red]differs[/]" if outcome.problem else "[green]ok[/]     "
                console.print(f"{mark} {escape(outcome.requirement)}", highlight=False, soft_wrap=True)
                if outcome.problem:
                    console.print(f"        {escape(outcome.problem)}", highlight=False, soft_wrap=True)
    if as_json:
        console.print_json(data=[dataclasses.asdict(outcome) for outcome in outcomes])
    if any(outcome.problem for outcome in outcomes):
        raise typer.Exit(1)


@contextmanager
def _open_http(
    url: str, model: str, instance: Any, paths: tuple[str, str], token: str, timeout: float
) -> Iterator[ServerUnderTest]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    keys = None if token else key_file(url)
    auth = None if keys is None else KeyFile(keys, "inference", MANAGEMENT)
    with httpx.Client(base_url=url, timeout=timeout, headers=headers, auth=auth) as client:
        yield ServerUnderTest(client, model, instance, *paths)


@contextmanager
def _open_grpc(
    contract: str, url: str, model: str, instance: Any, token: str, timeout: float
) -> Iterator[Any]:
    if not extras.is_installed("grpc"):
        fail(f"{contract} needs gRPC: {extras.install_command('grpc')}")
    from serve_app.conformance import grpc_protocols  # late: it needs the extra `server`

    _, port = GRPC_CONTRACTS[contract]
    address = url or f"127.0.0.1:{port}"
    try:
        parts = urlsplit(address if "://" in address else f"grpc://{address}")
        is_valid = bool(parts.hostname and parts.port) and parts.scheme in ("grpc", "grpcs", "http", "https")
        is_valid = is_valid and parts.path in ("", "/")
    except ValueError:
        is_valid = False
    if not is_valid:
        fail(f"--url {address}: a server of gRPC is host:port, or grpcs://host:port with TLS.")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    if not token and (keys := key_file(f"http://{parts.netloc}")) is not None:
        kind: KeyKind = "management" if "management" in contract else "inference"
        headers = KeyFile(keys, kind, MANAGEMENT).headers(kind)
    with grpc_protocols.connect(address.rstrip("/"), model, instance, timeout, headers) as server:
        yield server


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        fail(f"--instance {text}: it is no JSON: {error}. A text is written with quotes: '\"a text\"'.")
