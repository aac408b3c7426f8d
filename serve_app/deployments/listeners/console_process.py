"""The console's process, a child of Management: it starts with the first visit and ends when it is unused."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from serve_app.errors import Unavailable
from serve_app.settings import Settings

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 5.0
_POLL_S = 0.02
# The console needs no other variable, and the server's environment has secrets.
_PASSED_VARIABLES = ("HOME", "LANG", "LC_ALL", "PATH", "PYTHONPATH", "TMPDIR", "TZ", "VIRTUAL_ENV")
_MODULE = "serve_app.console.server"


class ConsoleProcess:
    """The console of one server, behind a Unix socket that only the server's user may open."""

    def __init__(self, settings: Settings, inference_port: int) -> None:
        self._settings = settings
        self._inference_port = inference_port
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> str:
        """Start the console unless it runs, and return its socket once it accepts connections.

        Raises Unavailable after ten seconds, or where the console ends or NiceGUI is missing.
        """
        async with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._socket
            await asyncio.to_thread(self._end)
            if importlib.util.find_spec("nicegui") is None:
                raise Unavailable("The console needs NiceGUI: pip install 'torchrelay[console]'.")
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="torchrelay-console-")
            self._process = await asyncio.to_thread(self._spawn)
            await self._wait_until_ready(self._process)
            return self._socket

    def close(self) -> None:
        """End the console, and wait until it has ended. Blocking."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()

    def _end(self) -> None:
        """End the process with its standard input; kill it where that takes too long."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _socket(self) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name, "console.sock"))

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the process; its output goes to this process's."""
        Path(self._socket).unlink(missing_ok=True)
        environment = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
        # The working directory of a Ray worker need not be on its module path.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", _MODULE, self._socket, str(self._settings.console.idle_timeout)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, env={**environment, **self._addresses()})

    def _addresses(self) -> dict[str, str]:
        management = self._settings.management
        scheme = "https" if management.certificate_file else "http"
        addresses = {
            "INFERENCE": f"http://127.0.0.1:{self._inference_port}",
            "MANAGEMENT": f"{scheme}://{_connectable(management.host)}:{management.port}",
            "METRICS": f"{scheme}://{_connectable(management.metrics_host)}:{management.metrics_port}",
        }
        if management.certificate_file:
            addresses["CERTIFICATE"] = str(self._settings.root / management.certificate_file)
        return {f"TORCHRELAY_CONSOLE_{name}": value for name, value in addresses.items()}

    async def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not _accepts(self._socket):
            if (code := process.poll()) is not None:
                raise Unavailable(f"The console ended with code {code}; the server's log has the cause.")
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable("The console is starting; load the page again in some seconds.")
            await asyncio.sleep(_POLL_S)


def _connectable(host: str) -> str:
    """Return the host at which this machine reaches a listener."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(path)
        return True
    return False
