"""The command line: ``torchrelay``, and ``torchserve`` in torchserve.py."""

from __future__ import annotations

import sys


def main() -> None:
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
