"""The client of commands: addresses and keys of a running server, and errors that end the command."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
import yaml

from serve_app.cli.terminal import fail
from serve_app.client import NO_RETRIES, AuthenticationError, Client, ServerError, TransportError
from serve_app.settings import HOME, is_loopback

Inference = Annotated[str, typer.Option(envvar="TORCHRELAY_INFERENCE", help="The inference address.")]
Token = Annotated[
    str,
    typer.Option(
        envvar="TORCHRELAY_TOKEN",
        help="The key for requests; by default of a key_file.json in this folder or in TORCHRELAY_HOME.",
    ),
]
ManagementUrl = Annotated[str, typer.Option(envvar="TORCHRELAY_MANAGEMENT", help="The management address.")]

INFERENCE = "http://127.0.0.1:8080"
MANAGEMENT = "http://127.0.0.1:8081"
_DEFAULT_PORTS = {"inference": 8080, "metrics": 8082}
_KEY_FILE = Path("key_file.json")


class CliClient(Client):
    """A client whose errors end the command with the server's message."""

    def __init__(
        self, management: str, token: str, inference: str = "", timeout: float = 120.0, metrics: str = ""
    ) -> None:
        self._address = management
        super().__init__(
            inference or os.environ.get("TORCHRELAY_INFERENCE", INFERENCE),
            management,
            timeout,
            token=token,
            key_file=key_file(management),
            metrics=metrics or sibling_address(management, "metrics"),
            retries=NO_RETRIES,
        )

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if isinstance(exception[1], (ServerError, TransportError)):
            fail(explain_error(exception[1], self._address))


def explain_error(error: ServerError | TransportError, management: str) -> str:
    """Return the message of an error, with what to do about it."""
    if isinstance(error, AuthenticationError):
        advice = "Set a key with TORCHRELAY_TOKEN or --token, or run this beside the server's key_file.json."
        return f"{error}\n{advice}"
    if isinstance(error, ServerError):
        remedy = find_remedy(error.reason)
        return f"{error}\n{remedy}" if remedy else str(error)
    return f"No server responds at {management}: {error}\n{_advise(error, management)}"


def use_server(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Store the server for the commands of a group: ``CliClient(*context.obj)``."""
    context.obj = management, token


def sibling_address(server: str, name: str) -> str:
    """Return the address of another port of the server, by its default number."""
    address = urlsplit(server)
    host = address.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{address.scheme}://{host}:{_DEFAULT_PORTS[name]}"


def next_major_version(versions: Iterable[str]) -> str:
    """Return the next whole number after those of ``versions``, as 3.0 after 2.1; without any 1.0."""
    numbers = (version.partition(".")[0] for version in versions)
    return f"{max((int(number) for number in numbers if number.isdecimal()), default=0) + 1}.0"


def find_remedy(reason: str) -> str:
    """Return what to do about an error of the server; empty where its message states that itself."""
    remedy: str = yaml.safe_load(Path(__file__).with_name("remedies.yaml").read_text()).get(reason, "")
    return "" if "he message" in remedy else remedy


def _advise(error: TransportError, address: str) -> str:
    """Return what to do where no server responds at an address."""
    text, (scheme, _, rest) = str(error).lower(), address.partition("://")
    if scheme == "https" and ("wrong_version_number" in text or "record layer" in text):
        return f"The port has no TLS: name http://{rest}"
    if scheme == "http" and "disconnected" in text:
        return f"The port may require TLS: try https://{rest}"
    if "certificate" in text:
        return "Trust the certificate with SSL_CERT_FILE=FILE."
    return (
        "Start a server with `torchrelay start`, or name the address of another one with --management or "
        "TORCHRELAY_MANAGEMENT."
    )


def key_file(management: str) -> Path | None:
    """Return the key file of a server of this machine; None for other hosts.

    It is in this folder or, as in the image, in that of TORCHRELAY_HOME. Its keys must not be sent to another
    host.
    """
    if not is_loopback(urlsplit(management).hostname or ""):
        return None
    return _KEY_FILE if _KEY_FILE.exists() else Path(os.environ.get(HOME, ""), _KEY_FILE)
