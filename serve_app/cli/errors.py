"""The error of commands that start a server."""

from __future__ import annotations

from handlers import extras

# What the server cannot start without, and `torchrelay` itself does not need.
_SERVER_PACKAGES = ("psutil", "ray", "torch")


class StartError(Exception):
    """An error message for the operator whose server did not start."""


def require_server() -> None:
    """Check that the extra ``server`` is installed. Raises StartError with the command that installs it."""
    missing = [package for package in _SERVER_PACKAGES if not extras.is_installed(package)]
    if missing:
        command = extras.install_command(missing[0])
        raise StartError(f"It needs {', '.join(missing)}, not installed in this environment: {command}")
