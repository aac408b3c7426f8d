"""The client of commands: addresses and keys of a running server, and errors that end the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from serve_app.client import NO_RETRIES, AuthenticationError, Client, ServerError
from serve_app.settings import is_loopback

console = Console()
errors = Console(stderr=True)

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

    def __init__(self, management: str, token: str) -> None:
        self._address = management
        inference = os.environ.get("TORCHRELAY_INFERENCE", INFERENCE)
        super().__init__(
            inference, management, token=token, key_file=key_file(management), retries=NO_RETRIES
        )

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        error = exception[1]
        if isinstance(error, ServerError):
            exit_with_error(error)
        if isinstance(error, httpx.TransportError):
            errors.print(f"No server responds at {self._address}: {escape(str(error))}", highlight=False)
            raise typer.Exit(1) from None


def key_file(management: str) -> Path | None:
    """Return the key file in this folder, for a server of this machine; None for other hosts.

    Its keys must not be sent to another host.
    """
    return _KEY_FILE if is_loopback(httpx.URL(management).host) else None


def exit_with_error(error: ServerError) -> NoReturn:
    """Print the server's message and exit with 1."""
    errors.print(escape(str(error)), style="red", highlight=False)
    if isinstance(error, AuthenticationError):
        errors.print(
            "Set a key with TORCHRELAY_TOKEN or --token, or run this beside the server's key_file.json."
        )
    raise typer.Exit(1) from None
