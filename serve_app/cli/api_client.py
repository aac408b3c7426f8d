"""The client of commands: addresses and keys of a running server, and errors that end the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from serve_app.cli.terminal import fail
from serve_app.client import NO_RETRIES, AuthenticationError, Client, ServerError, TransportError
from serve_app.settings import is_loopback

Inference = Annotated[str, typer.Option(envvar="TORCHRELAY_INFERENCE", help="The inference address.")]
Token = Annotated[
    str,
    typer.Option(
        envvar="TORCHRELAY_TOKEN",
        help="The key for requests; by default that of a key_file.json in this folder.",
    ),
]
ManagementUrl = Annotated[str, typer.Option(envvar="TORCHRELAY_MANAGEMENT", help="The management address.")]

INFERENCE = "http://127.0.0.1:8080"
MANAGEMENT = "http://127.0.0.1:8081"
_KEY_FILE = Path("key_file.json")


class CliClient(Client):
    """A client whose errors end the command with the server's message."""

    def __init__(self, management: str, token: str, inference: str = "", timeout: float = 120.0) -> None:
        self._address = management
        super().__init__(
            inference or os.environ.get("TORCHRELAY_INFERENCE", INFERENCE),
            management,
            timeout,
            token=token,
            key_file=key_file(management),
            retries=NO_RETRIES,
        )

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        error = exception[1]
        if isinstance(error, AuthenticationError):
            advice = (
                "Set a key with TORCHRELAY_TOKEN or --token, or run this beside the server's key_file.json."
            )
            fail(f"{error}\n{advice}")
        if isinstance(error, ServerError):
            fail(str(error))
        if isinstance(error, TransportError):
            fail(f"No server responds at {self._address}: {error}")


def use_server(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Store the server for the commands of a group: ``CliClient(*context.obj)``."""
    context.obj = management, token


def key_file(management: str) -> Path | None:
    """Return the key file in this folder, for a server of this machine; None for other hosts.

    Its keys must not be sent to another host.
    """
    return _KEY_FILE if is_loopback(urlsplit(management).hostname or "") else None
