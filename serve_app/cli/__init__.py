"""The command line: ``torchrelay``, and ``torchserve`` in torchserve.py."""

from __future__ import annotations


def main() -> None:
    from serve_app.cli.app import app  # late: whoever imports a file of this room needs no other

    app()
