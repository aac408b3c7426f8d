"""The command line: ``torchrelay start|stop|status|models|bench``."""

from __future__ import annotations

from serve_app.cli.app import app


def main() -> None:
    app()
