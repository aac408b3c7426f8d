"""The server of ``torchrelay serve``: on loopback, without keys, with a new state in ``.torchrelay``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.errors import StartError
from serve_app.cli.server_process import ServerProcess
from serve_app.cli.torchserve_flags import DEV_CONFIG, default_config

_DEFAULT_PORT = 8080


class DevServer:
    """A server whose files are in ``.torchrelay`` of the working directory.

    Other ports than the default one take the two after it for management and metrics, and have no gRPC.
    """

    def __init__(self, port: int = _DEFAULT_PORT) -> None:
        self._config = Path.cwd() / DEV_CONFIG
        self.home = self._config.parent
        self.store = self.home / "model_store"
        self._port = port

    def find_running(self) -> ServerProcess | None:
        """Return the server that runs here, or None."""
        if not self._config.is_file():
            return None
        process = ServerProcess(self._config, default_config("serve.env"))
        return process if process.processes() else None

    def create(self) -> ServerProcess:
        """Return a server with a fresh state, not yet started. Raises StartError."""
        try:
            shutil.rmtree(self.home, ignore_errors=True)
            self.store.mkdir(parents=True)
            (self.home / ".gitignore").write_text("*\n")
            self._config.write_text(yaml.safe_dump(self._document(), sort_keys=False))
        except OSError as error:
            raise StartError(f"{error.filename}: {error.strerror}; start it in a writable folder") from None
        ports = ("management.port", "management.metrics_port", "grpc.port", "grpc.management_port")
        names = dict.fromkeys(("http_options.port", *ports), "--port")
        return ServerProcess(self._config, default_config("serve.env"), names)

    def _document(self) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load(default_config("app.yaml").read_text())
        document["http_options"] |= {"host": "127.0.0.1", "port": self._port}
        args = document["applications"][0]["args"]
        args["home"] = str(self.home)
        args["store"] = {"model_store": "model_store"}
        args["control"] = {"state_dir": "state", "load_models": "none", "enable_model_api": True}
        args["inference"] = {"handler_errors": "traceback"}  # for the author, who is the only client
        args["telemetry"] = {"log_dir": str(self.home / "logs"), "metrics_dir": str(self.home / "logs")}
        if self._port != _DEFAULT_PORT:
            args["management"] |= {"port": self._port + 1, "metrics_port": self._port + 2}
            args["grpc"] = {"port": 0, "management_port": 0}
        return document
