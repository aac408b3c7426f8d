"""`torchrelay adapters`: load, list and unload the LoRA adapters of a language model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token, use_server
from serve_app.cli.terminal import console, errors

adapters_app = typer.Typer(
    help="Load, list and unload LoRA adapters of language models.", no_args_is_help=True
)
Version = Annotated[str, typer.Option(help="By default the default version.")]


@adapters_app.callback()
def adapters(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Manage the adapters of a server's models."""
    use_server(context, management, token)


@adapters_app.command("list")
def list_adapters(context: typer.Context, model: str, version: Version = "") -> None:
    """List the adapters of a model."""
    with CliClient(*context.obj) as client:
        found = client.adapters(model, version or None)
    table = Table("adapter", "requests name", "version", "from")
    for adapter in found:
        source = adapter["url"] or "the archive"
        table.add_row(adapter["name"], f"{model}:{adapter['name']}", adapter["version"], source)
    console.print(table)


@adapters_app.command()
def add(
    context: typer.Context,
    model: str,
    name: str,
    url: Annotated[str, typer.Argument(help="A name in the model store, or a URL.")],
    version: Version = "",
    sha256: Annotated[str, typer.Option(help="The expected digest of the archive.")] = "",
) -> None:
    """Load an adapter in every replica of a model."""
    with CliClient(*context.obj) as client:
        adapter = client.add_adapter(model, name, url, version or None, sha256=sha256 or None)
    console.print(f"requests for it name the model {model}:{name}", highlight=False)
    if "status" in adapter:
        errors.print(adapter["status"], highlight=False)


@adapters_app.command()
def remove(context: typer.Context, model: str, name: str, version: Version = "") -> None:
    """Unload an adapter; requests for it that are under way finish."""
    with CliClient(*context.obj) as client:
        console.print(client.remove_adapter(model, name, version or None), highlight=False)
