"""The dashboards, rules and monitors agree with metrics, manifests and their sources."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.telemetry.metric_definitions import METRICS
from serve_app.telemetry.torchserve import catalog
from tests.support import prometheus_server
from tests.support.error_classes import list_subclasses

CLUSTER = Path(__file__).parents[2] / "cluster"
MONITORING = CLUSTER / "monitoring"
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in (MONITORING / "dashboards").glob("*.json")}
# Ray's, and those that Prometheus makes itself.
OTHERS = {"ray_node_gpus_utilization", "ray_node_gram_used", "ray_resources", "up"}

needs_promtool = pytest.mark.skipif(not prometheus_server.installed, reason=prometheus_server.MISSING)


def promtool(*words: str) -> str:
    done = subprocess.run(
        ["promtool", *words], cwd=MONITORING, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def queries() -> list[str]:
    panels = [panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"]]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def exported_names() -> set[str]:
    """Return the names of all samples on the metrics page."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    own = {metric.name + suffix for metric in METRICS for suffix in suffixes[metric.kind]}
    return own | {family.name for family in catalog.DEFAULT}


def metric_names(expression: str) -> set[str]:
    """Return the names of the metrics in a query: what no selector, duration, grouping or function is."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(by|without) \([^)]*\)", "", expression)
    return set(re.findall(r"\b[A-Za-z_][\w:]*\b(?!\()", bare)) - {"and", "or", "sum"}


def test_generated_files_agree_with_their_sources() -> None:
    spec = importlib.util.spec_from_file_location("generate", MONITORING / "generate.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    generated = module.generate()
    assert {path: path.read_text() for path in generated} == generated, "run cluster/monitoring/generate.py"
    assert {path for path in generated if path.suffix == ".json"} == set(MONITORING.glob("dashboards/*.json"))


def test_every_metric_of_a_query_is_exported() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    known = exported_names() | OTHERS | recorded
    for expression in (*queries(), *(rule["expr"] for rule in RULES)):
        assert (names := metric_names(expression)) and names <= known, expression


def test_no_two_panels_overlap() -> None:
    for name, dashboard in DASHBOARDS.items():
        cells: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            grid = panel["gridPos"]
            assert grid["x"] + grid["w"] <= 24
            taken = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
            assert not taken & cells, f"{name}: {panel['title']}"
            cells |= taken
        assert dashboard["uid"] == f"torchrelay-{name}"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_is_explained(alert: dict[str, Any]) -> None:
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    for text in alert["annotations"].values():
        assert text.endswith("."), text
    assert alert["labels"]["severity"] in ("info", "warning", "critical")


def test_failures_are_reasons_of_errors() -> None:
    reasons = {error.reason for error in list_subclasses()} | {"internal"}
    [rule] = [rule for rule in RULES if rule.get("record") == "model_version:torchrelay_failures:rate5m"]
    [statuses] = re.findall(r'status=~"([^"]*)"', rule["expr"])
    assert set(statuses.split("|")) <= reasons


@needs_promtool
@pytest.mark.integration
def test_promtool_accepts_the_rules() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", "rules.yaml")


@needs_promtool
@pytest.mark.integration
def test_every_alert_fires_and_is_silent_without_a_cause() -> None:
    cases = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    assert {case["name"] for case in cases} == {alert["alert"] for alert in ALERTS}
    for case in cases:
        silent, fires, *_ = case["promql_expr_test"]
        assert all(f'alertname="{case["name"]}"' in test["expr"] for test in case["promql_expr_test"])
        assert not silent["exp_samples"] and fires["exp_samples"], case["name"]
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yaml")


def test_kustomize_has_every_file() -> None:
    document = yaml.safe_load((MONITORING / "kustomization.yaml").read_text())
    assert all((MONITORING / resource).is_file() for resource in document["resources"])
    [generator] = document["configMapGenerator"]
    assert set(generator["files"]) == {f"dashboards/{name}.json" for name in DASHBOARDS}
    assert (
        document["namespace"]
        == yaml.safe_load((CLUSTER / "base/kustomization.yaml").read_text())["namespace"]
    )


def test_monitors_find_the_ports_of_the_pods() -> None:
    cluster = yaml.safe_load((CLUSTER / "base/rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    ours, rays = yaml.safe_load_all((MONITORING / "monitors.yaml").read_text())
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for monitor, groups in ((ours, [head]), (rays, [head, *workers])):
        labels = dict(monitor["spec"]["selector"]["matchLabels"])
        assert labels.pop("ray.io/node-type", None) == ("head" if monitor is ours else None)
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        for group in groups:
            assert labels.items() <= group["template"]["metadata"]["labels"].items()
            [container] = group["template"]["spec"]["containers"]
            [port] = [p["containerPort"] for p in container["ports"] if p["name"] == endpoint["port"]]
            assert port in prometheus_ports()
    [relabeling] = ours["spec"]["podMetricsEndpoints"][0]["relabelings"]
    assert relabeling == {"targetLabel": "job", "replacement": "torchrelay"}, "as the alerts have it"


def prometheus_ports() -> set[int]:
    """Return the ports that the network policy opens for Prometheus."""
    rules = yaml.safe_load((CLUSTER / "base/network.yaml").read_text())["spec"]["ingress"]
    [rule] = [rule for rule in rules if "name: prometheus" in yaml.safe_dump(rule)]
    return {port["port"] for port in rule["ports"]}
