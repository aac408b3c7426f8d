"""A Prometheus of the tests' own, in a temporary directory."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.ports import free_port
from tests.support.server import ROOT

MISSING = "needs Prometheus; on Debian and Ubuntu it is the package `prometheus`"
RULES = ROOT / "cluster/monitoring/rules.yaml"

installed = shutil.which("prometheus") is not None


class Prometheus:
    """A running Prometheus with the rules of this project, that scrapes every three seconds."""

    def __init__(self, home: Path, targets: dict[str, str]) -> None:
        """Start it; ``targets`` are addresses (host:port) by job."""
        config = {
            "global": {"scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [target]}]}
                for job, target in targets.items()
            ],
        }
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        options = [f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}"]
        self._http = httpx.Client(base_url=f"http://{address}/api/v1", timeout=60)
        with (home / "log").open("w") as log:
            self._process = subprocess.Popen(
                ["prometheus", *options, f"--web.listen-address={address}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query. Raises AssertionError where it is invalid."""
        response = self._http.get("/query", params={"query": expression})
        if response.status_code == 503:  # it is starting
            return []
        assert response.status_code == 200, f"{expression}: {response.text}"
        series: list[dict[str, Any]] = response.json()["data"]["result"]
        return series

    def wait(self, expression: str, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Wait until a query has data, and return its series."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(httpx.TransportError):  # it is starting
                if series := self.query(expression):
                    return series
            assert time.monotonic() < deadline, f"no data in {timeout:g} s: {expression}"
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._http.close()


@contextlib.contextmanager
def running_prometheus(**targets: str) -> Iterator[Prometheus]:
    """Start a Prometheus for ``targets`` by job, and delete its data at the end."""
    home = Path(tempfile.mkdtemp(prefix="relay-prometheus-"))
    server = Prometheus(home, targets)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(home)
