"""The health check of a container, which follows the configuration of the server that runs in it.

A container engine runs it every few seconds, so it imports neither the client nor the settings. The server's
start writes its address to the file that TORCHRELAY_HEALTH_FILE names, as the image does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FILE = "TORCHRELAY_HEALTH_FILE"
DEFAULT = "http://127.0.0.1:8080"
_PATH = "/health/live"
_TIMEOUT_S = 2.5  # less than the image's HEALTHCHECK has


def write_address(address: str) -> None:
    """Write the address of a server that starts, if the variable names a file.

    A file that cannot be written is a warning: orchestrators with probes of their own need none.
    """
    if not (name := os.environ.get(FILE)):
        return
    path = Path(name)
    try:
        path.unlink(missing_ok=True)  # of another user's start, or a link
        with path.open("x") as file:
            file.write(f"{address}\n")
    except OSError as error:
        print(
            f"WARNING - {FILE}={name}: {error.strerror}; the health check looks at {DEFAULT}. Name a file "
            "in a folder that this user can write.",
            file=sys.stderr,
        )


def read_address() -> str:
    """Return the address of the server that was started last, or the default one."""
    try:
        return Path(os.environ.get(FILE) or os.devnull).read_text().strip() or DEFAULT
    except OSError:  # nothing has started, or Ray's own command has
        return DEFAULT


def find_problem(address: str) -> str:
    """Return the reason for which the server at an address is not live; empty where it is."""
    import http.client
    from urllib.parse import urlsplit

    try:
        url = urlsplit(address)
        host, port = url.hostname or "", url.port
    except ValueError as error:
        return f"{address!r} is no address of a server: {error}"
    if url.scheme not in ("http", "https") or not host:
        return f"{address!r} is no address of a server, such as {DEFAULT}"
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    if url.scheme == "https":
        import ssl

        # The server is this container's own, and its certificate has the name by which others reach it.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
    try:
        connection.request("GET", _PATH)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{address}{_PATH}: {error or type(error).__name__}"
    finally:
        connection.close()
    return "" if status == 200 else f"{address}{_PATH} is {status}"


def run(address: str = "") -> int:
    """Print the problem of a server, by default of the one that was started here; return the exit code."""
    problem = find_problem(address.rstrip("/") or read_address())
    print(problem or "live")
    return 1 if problem else 0
