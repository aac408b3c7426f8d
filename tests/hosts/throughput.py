"""Throughput between hosts against that on one: ``python -m tests.hosts.throughput [SECONDS]``, as root.

Two hosts and one replica. wrk, in a third namespace, sends to the replica's host and to the other one: by
HAProxy and its route, and directly to the gateway's port, whose way is a Unix socket or Ray's handle.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hosts.host_cluster import Hosts, network
from tests.support.archives import ECHO, make_archive

ROUNDS = 3
_GATEWAY_PORT = 30000  # the first of Ray Serve's ports on each host


def measure(url: str, script: Path, seconds: int) -> float:
    """Return the requests per second of 16 connections; every response must be a success."""
    command = ["wrk", "-t1", "-c16", f"-d{seconds}s", "-s", str(script), url]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in output and "Socket errors" not in output, output
    found = re.search(r"Requests/sec:\s+([\d.]+)", output)
    assert found is not None, output
    return float(found[1])


def main(seconds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, network():
        hosts = Hosts(Path(folder), 2)
        try:
            hosts.start()
            script = Path(folder, "post.lua")
            script.write_text('wrk.method = "POST"; wrk.body = "x"\n')
            archive = make_archive(Path(folder), "echo", ECHO)
            hosts.register(archive, initial_workers=1).raise_for_status()
            node = hosts.management.get("/models/echo").json()[0]["workers"][0]["node"]
            for name, port in (("HAProxy", 8080), ("gateway", _GATEWAY_PORT)):
                rates: dict[bool, list[float]] = {True: [], False: []}
                for _ in range(ROUNDS):
                    for host in hosts:
                        url = f"http://{host.address}:{port}/predictions/echo"
                        rates[host.address == node].append(measure(url, script, seconds))
                local, remote = statistics.median(rates[True]), statistics.median(rates[False])
                rate = f"{local:.0f} requests/s on one host, {remote:.0f} between hosts"
                print(f"{name}: {rate}, ratio {remote / local:.2f}")
        finally:
            hosts.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
