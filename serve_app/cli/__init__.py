"""The command line: ``torchrelay``, and ``torchserve`` in torchserve.py."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command ``torchrelay``; exit with a message where Python is too old to import it."""
    if sys.version_info < (3, 10):  # noqa: UP036, a checkout runs with any interpreter
        version = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"torchrelay needs Python 3.10 to 3.13, and {sys.executable} is {version}. Create an environment "
            "with one of those: python3.11 -m venv .venv"
        )
    if sys.argv[1:] == ["health"]:  # run every few seconds, without the imports of the other commands
        from serve_app.cli import health

        sys.exit(health.run())
    from serve_app.cli.app import app  # late: other modules of the package need none of the commands

    app()


def torchserve_main() -> None:
    """Run the command ``torchserve``; exit with a message where the extra ``server`` is missing."""
    from serve_app.cli.errors import StartError, require_server

    try:
        require_server()
    except StartError as error:
        sys.exit(str(error))
    from serve_app.cli.torchserve import main

    main()
