"""`torchrelay keys`: create, list, rotate and revoke keys."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer
from rich.table import Table

from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token, use_server
from serve_app.cli.arguments import Pair, pair_option
from serve_app.cli.terminal import console, errors

keys_app = typer.Typer(help="Create, list, rotate and revoke keys.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _parse_duration(text: str) -> float:
    """Return the seconds of ``90d``, ``12h``, ``30m`` or ``45s``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not of a form such as 90d, 12h, 30m or 45s.")
    return float(match[1]) * _UNITS[match[2]]


def _parse_limit(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number.") from None


@keys_app.callback()
def keys(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Manage the keys of a server, with a key that may manage every model."""
    use_server(context, management, token)


@keys_app.command("list")
def list_keys(context: typer.Context) -> None:
    """List the keys with their rights, models and limits."""
    with CliClient(*context.obj) as client:
        table = Table("key", "source", "rights", "models", "limits", "expires")
        for key in client.list_keys():
            limits = ", ".join(f"{name}={value:g}" for name, value in key["limits"].items())
            expires = (
                "never" if key["expires"] is None else time.strftime("%F %T", time.gmtime(key["expires"]))
            )
            row = key["name"], key["source"], ", ".join(key["rights"]), ", ".join(key["models"])
            table.add_row(*row, limits, expires)
    console.print(table)


@keys_app.command()
def create(
    context: typer.Context,
    name: str,
    role: Annotated[str, typer.Option(help="infer, observe or manage.")] = "infer",
    model: Annotated[list[str] | None, typer.Option(help="A pattern of models; repeatable.")] = None,
    limit: Annotated[
        list[Pair] | None,
        pair_option("LIMIT=NUMBER", "requests_per_second=50; one option each.", _parse_limit),
    ] = None,
    expires_in: Annotated[
        float | None, typer.Option(parser=_parse_duration, metavar="DURATION", help="90d, 12h; never.")
    ] = None,
) -> None:
    """Create a key and print it; it cannot be shown again."""
    with CliClient(*context.obj) as client:
        document = client.create_key(name, role, model or "*", dict(limit or []), expires_in)
    _print_key(document["key"], document.get("status"))


@keys_app.command()
def rotate(
    context: typer.Context,
    name: str,
    grace: Annotated[
        float, typer.Option(parser=_parse_duration, metavar="DURATION", help="The old key is valid so long.")
    ] = "1h",  # type: ignore[assignment]  # parsed like an argument
) -> None:
    """Replace a key and print the new one."""
    with CliClient(*context.obj) as client:
        document = client.rotate_key(name, grace)
    _print_key(document["key"], document.get("status"))


@keys_app.command()
def revoke(context: typer.Context, name: str) -> None:
    """Revoke a key: it is refused everywhere once this returns."""
    with CliClient(*context.obj) as client:
        console.print(client.revoke_key(name), highlight=False)


def _print_key(key: str, status: str | None) -> None:
    """Print a key alone to standard output, so that a script can store it."""
    print(key)
    if status is not None:
        errors.print(status, highlight=False)
