"""`torchrelay console`: the web console of any server, in a process of this machine."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer

from serve_app.cli.api_client import MANAGEMENT, sibling_address
from serve_app.cli.terminal import console as terminal
from serve_app.cli.terminal import fail


def console(
    server: Annotated[
        str, typer.Option(envvar="TORCHRELAY_MANAGEMENT", help="The server's management address.")
    ] = MANAGEMENT,
    inference: Annotated[
        str, typer.Option(envvar="TORCHRELAY_INFERENCE", help="Its inference address; by default port 8080.")
    ] = "",
    metrics: Annotated[str, typer.Option(help="Its metrics address; by default port 8082.")] = "",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8088,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name of the console besides addresses; a pattern.")
    ] = None,
) -> None:
    """Serve the web console of a server, until Ctrl-C.

    A server serves its own console at /ui of the management port.
    """
    try:
        from serve_app.console.server import ConsoleListener, serve
        from serve_app.console.sessions import ServerAddresses
    except ModuleNotFoundError as error:
        fail(f"The console needs {error.name}: pip install 'torchrelay[console]'")
    address = urlsplit(server)
    if address.scheme not in ("http", "https") or not address.hostname:
        fail(f"--server is {server!r}; it must be an address such as {MANAGEMENT}.")
    addresses = ServerAddresses(
        inference or sibling_address(server, "inference"),
        server,
        metrics or sibling_address(server, "metrics"),
    )
    shown = f"[{host}]" if ":" in host else host
    terminal.print(f"The console of {server} is at http://{shown}:{port}; Ctrl-C ends it.", highlight=False)
    serve(addresses, ConsoleListener(host=host, port=port, allowed_hosts=tuple(allowed_host or ())))
