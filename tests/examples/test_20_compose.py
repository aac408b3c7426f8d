"""The compose file of monitoring is valid, its files exist, and Prometheus runs with its configuration.

Docker and Grafana are not needed: the server and Prometheus run as processes.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import jsonschema
import pytest
import yaml

from tests.support import prometheus_server
from tests.support.ports import free_port
from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

EXAMPLE = ROOT / "examples/20_monitoring"
COMPOSE = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())


def test_the_file_is_valid() -> None:
    schema = json.loads((ROOT / "tests/data/compose_spec.json").read_text())
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"  # its own URL is wrong
    jsonschema.validate(COMPOSE, schema)


def test_its_files_exist_and_ports_are_of_this_machine() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            # The model store is made by `make run`.
            assert (
                source in COMPOSE["volumes"] or source.endswith("model_store") or (EXAMPLE / source).exists()
            )
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    build = COMPOSE["services"]["torchrelay"]["build"]
    assert f" AS {build['target']}" in (EXAMPLE / build["context"] / build["dockerfile"]).read_text()


def test_the_data_source_and_the_dashboards_are_found() -> None:
    [source] = yaml.safe_load((EXAMPLE / "grafana.yaml").read_text())["datasources"]
    address = urlsplit(source["url"])
    assert address.hostname in COMPOSE["services"]
    assert any(port.endswith(f":{address.port}") for port in COMPOSE["services"][address.hostname]["ports"])
    [provider] = yaml.safe_load((EXAMPLE / "dashboards.yaml").read_text())["providers"]
    mounted = {volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted


@pytest.mark.skipif(not prometheus_server.installed, reason=prometheus_server.MISSING)
def test_prometheus_scrapes_a_server_with_this_configuration(server: Server, tmp_path: Path) -> None:
    text = (EXAMPLE / "prometheus.yml").read_text()
    address = urlsplit(server.process.metrics).netloc
    text = text.replace("torchrelay:8082", address).replace("5s", "1s")
    text = text.replace("/etc/prometheus/rules.yaml", str(ROOT / "cluster/monitoring/rules.yaml"))
    (tmp_path / "prometheus.yml").write_text(text)
    url = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    command = ["prometheus", *options, f"--web.listen-address={url}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            query = {"query": 'up{job="torchrelay"}'}

            def is_up() -> bool:
                found = httpx.get(f"http://{url}/api/v1/query", params=query).json()["data"]["result"]
                return bool(found) and found[0]["value"][1] == "1"

            server.wait(is_up, description="a sample of the server")
            rules = httpx.get(f"http://{url}/api/v1/rules").json()["data"]["groups"]
            assert "TorchrelayHighErrorRate" in {rule["name"] for group in rules for rule in group["rules"]}
        finally:
            process.terminate()
