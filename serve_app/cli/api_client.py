"""What a command needs that asks a running server: its addresses, a key, and an end in the server's words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from serve_app.client import NEVER, AccessDenied, Client, ServerError
from serve_app.settings import is_loopback

console = Console()
errors = Console(stderr=True)

Inference = Annotated[str, typer.Option(envvar="TORCHRELAY_INFERENCE", help="The inference address.")]
Token = Annotated[
    str,
    typer.Option(envvar="TORCHRELAY_TOKEN", help="The key that requests show; else that of a key_file.json here."),
]
ManagementUrl = Annotated[str, typer.Option(envvar="TORCHRELAY_MANAGEMENT", help="The management address.")]

INFERENCE = "http://127.0.0.1:8080"
MANAGEMENT = "http://127.0.0.1:8081"
_KEY_FILE = Path("key_file.json")


class Talk(Client):
    """A client whose errors end the command in the server's words."""

    def __init__(self, management: str, token: str) -> None:
        self._address = management
        inference = os.environ.get("TORCHRELAY_INFERENCE", INFERENCE)
        super().__init__(inference, management, token=token, key_file=key_file(management), retries=NEVER)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, ServerError):
            refused(error)
        if isinstance(error, httpx.TransportError):
            errors.print(f"No server answers at {self._address}: {escape(str(error))}", highlight=False)
            raise typer.Exit(1) from None


def key_file(management: str) -> Path | None:
    """The key file in this folder, for a server of this machine: another one has no business with its keys."""
    return _KEY_FILE if is_loopback(httpx.URL(management).host) else None


def refused(error: ServerError) -> NoReturn:
    """End the command in the server's words."""
    errors.print(escape(str(error)), style="red", highlight=False)
    if isinstance(error, AccessDenied):
        errors.print("Give a key by TORCHRELAY_TOKEN or --token, or run this beside the server's key_file.json.")
    raise typer.Exit(1) from None
