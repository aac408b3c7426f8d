"""Start Prometheus beside the server, with the rules of cluster/monitoring, and print a few queries.

Prometheus runs until Ctrl-C, or ends after the first results with --once.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import yaml

METRICS = os.environ.get("TORCHRELAY_METRICS", "http://127.0.0.1:8082")
RULES = Path(__file__).resolve().parents[2] / "cluster/monitoring/rules.yaml"
QUERIES = {
    "running replicas": "sum by (model, version) (torchrelay_replicas)",
    "requests per second": "sum by (model, status) (rate(torchrelay_requests_total[1m]))",
    "p99 latency in seconds": "histogram_quantile(0.99, sum by (model, le) "
    "(rate(torchrelay_request_latency_seconds_bucket[1m])))",
    "share of each rollout's new version": "torchrelay_rollout_percent",
    "differences in experiments": "torchrelay_experiment_difference",
    "active alerts": 'ALERTS{alertstate="firing"}',
}


def write_config(file: Path, interval: int) -> None:
    address = urlsplit(METRICS)
    scrape = {
        "job_name": "torchrelay",
        "scheme": address.scheme,
        "static_configs": [{"targets": [address.netloc]}],
    }
    seconds = f"{interval}s"
    config = {
        "global": {"scrape_interval": seconds, "scrape_timeout": seconds, "evaluation_interval": seconds},
        "rule_files": [str(RULES)],
        "scrape_configs": [scrape],
    }
    file.write_text(yaml.safe_dump(config, sort_keys=False))


@contextlib.contextmanager
def prometheus(program: str, port: int, interval: int) -> Iterator[str]:
    """Run Prometheus with its data in a temporary folder, and yield its address."""
    address = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="prometheus-") as temporary:
        folder = Path(temporary)
        write_config(folder / "prometheus.yml", interval)
        options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with (folder / "log").open("w+") as log:
            command = [program, *options, f"--web.listen-address={address}"]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                wait_until_ready(process, f"http://{address}", folder / "log")
                yield f"http://{address}"
            finally:
                process.terminate()
                process.wait()


def wait_until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    while True:
        if process.poll() is not None:
            sys.exit(f"Prometheus ended with code {process.returncode}:\n{log.read_text()}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        time.sleep(0.1)


def query(url: str, expression: str) -> list[dict]:
    response = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=30)
    return response.raise_for_status().json()["data"]["result"]


def show(url: str) -> None:
    """Print each query with its results and the address of its graph."""
    for title, expression in QUERIES.items():
        print(f"\n{title}: {expression}")
        print(f"  {url}/graph?g0.expr={quote(expression)}&g0.tab=0")
        for series in query(url, expression):
            labels = ", ".join(
                f"{name}={value}"
                for name, value in series["metric"].items()
                if name not in ("__name__", "instance", "job")
            )
            value = float(series["value"][1])
            if not isnan(value):  # of a quantile without requests
                print(f"  {labels}: {value:.6g}")


def main(options: argparse.Namespace) -> None:
    program = shutil.which("prometheus")
    if program is None:
        sys.exit(
            "The program `prometheus` was not found. On Debian and Ubuntu install the package `prometheus` "
            "(apt-get install prometheus); for others see https://prometheus.io/download."
        )
    try:
        httpx.get(f"{METRICS}/metrics", timeout=30).raise_for_status()
    except httpx.HTTPError as error:
        sys.exit(
            f"{METRICS}/metrics does not answer ({error}). Start the server by `make run`, or set "
            "TORCHRELAY_METRICS to its address."
        )
    with prometheus(program, options.port, options.interval) as url:
        print(f"Prometheus scrapes {METRICS}/metrics every {options.interval} s: {url}")
        print(f"its alerts: {url}/alerts")
        deadline = time.monotonic() + 60
        # Rates need two samples.
        while not query(url, f'count_over_time(up{{job="torchrelay"}}[{10 * options.interval}s]) > 2'):
            if time.monotonic() > deadline:
                sys.exit("Prometheus has scraped nothing within a minute.")
            time.sleep(0.2)
        show(url)
        if not options.once:
            print("\nCtrl-C ends Prometheus.")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus, on the loopback")
    parser.add_argument("--interval", type=int, default=5, help="seconds between two scrapes")
    parser.add_argument("--once", action="store_true", help="end after the first results")
    sys.stdout.reconfigure(line_buffering=True)
    main(parser.parse_args())
