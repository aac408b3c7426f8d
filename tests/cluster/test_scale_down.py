"""Connections that outlive replicas: pauses longer than a replica drains, and bodies that arrive slowly."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.archives import ECHO, make_archive
from tests.support.server import Server

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PAUSE_S = 2.5  # longer than RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
ROUNDS = 4


class Client(threading.Thread):
    """A client of one connection that pauses between requests, or within the body of each."""

    def __init__(self, server: Server, is_slow: bool, stopped: threading.Event) -> None:
        super().__init__(daemon=True)
        self._address = server.url.removeprefix("http://")
        self._is_slow, self._stopped = is_slow, stopped
        self.results: Counter[str] = Counter()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=60)
        while not self._stopped.is_set():
            try:
                connection.putrequest("POST", "/predictions/shrinking")
                connection.putheader("Content-Length", "2")
                connection.endheaders(b"a")
                if self._is_slow:
                    time.sleep(PAUSE_S)
                connection.send(b"b")
                response = connection.getresponse()
                response.read()
                self.results[str(response.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self.results[type(error).__name__] += 1
            if not self._is_slow:
                self._stopped.wait(PAUSE_S)
        connection.close()


def test_a_smaller_number_of_replicas_loses_no_request_of_open_connections(
    server: Server, tmp_path: Path
) -> None:
    assert server.register(make_archive(tmp_path, "shrinking", ECHO)).status_code == 200
    stopped = threading.Event()
    clients = [Client(server, is_slow, stopped) for is_slow in (False, True) for _ in range(8)]
    for number, client in enumerate(clients):
        client.start()
        time.sleep(PAUSE_S / len(clients) * (number % 2))  # at different times
    for _ in range(ROUNDS):
        for workers in (3, 1):
            parameters = {"min_worker": workers, "max_worker": workers, "synchronous": "true"}
            scaled = server.management.put("/models/shrinking", params=parameters)
            assert scaled.status_code == 200, scaled.text
        stopped.wait(2 * PAUSE_S)
    stopped.set()
    for client in clients:
        client.join()
    results = sum((client.results for client in clients), Counter[str]())
    assert results.keys() == {"200"}, results
    server.management.delete("/models/shrinking")
