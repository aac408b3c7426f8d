"""Write Grafana's dashboards from panels.yaml, and the PrometheusRule from rules.yaml.

``python cluster/monitoring/generate.py`` writes ``dashboards/*.json`` and ``prometheusrule.yaml``.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
HEADER = "# Written by generate.py from rules.yaml; do not edit.\n"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8  # of a row of panels; Grafana's grid has 24 columns

Document = dict[str, Any]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def generate() -> dict[Path, str]:
    """Return the contents of all generated files."""
    panels = yaml.safe_load((FOLDER / "panels.yaml").read_text())
    files = {
        FOLDER / f"dashboards/{name}.json": _format(build_dashboard(name, source))
        for name, source in panels.items()
    }
    files[FOLDER / "prometheusrule.yaml"] = HEADER + yaml.safe_dump(
        build_prometheus_rule(), sort_keys=False, width=110
    )
    return files


def _format(dashboard: Document) -> str:
    """Return a dashboard as JSON with one line for each panel."""
    head = json.dumps({key: value for key, value in dashboard.items() if key != "panels"})
    panels = ",\n".join(json.dumps(panel) for panel in dashboard["panels"])
    return f'{head[:-1]},\n"panels": [\n{panels}\n]}}\n'


def build_dashboard(name: str, source: Document) -> Document:
    """Return a dashboard of Grafana."""
    return {
        "uid": f"torchrelay-{name}",
        "title": source["title"],
        "tags": ["torchrelay"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _build_variables(source.get("variables", {}))},
        "panels": _build_panels(source["rows"]),
    }


def _build_variables(variables: dict[str, str]) -> list[Document]:
    datasource = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return [
        datasource,
        *(
            {
                "name": name,
                "type": "query",
                "datasource": DATASOURCE,
                "query": {"query": query, "refId": name},
                "refresh": 2,  # with the time range
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
            for name, query in variables.items()
        ),
    ]


def _build_panels(rows: dict[str, list[Document]]) -> list[Document]:
    ids, top, panels = count(1), 0, []
    for title, row in rows.items():
        position = {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1}
        panels.append({"id": next(ids), "type": "row", "title": title, "gridPos": position, "panels": []})
        for index, panel in enumerate(row):
            x, y = index % COLUMNS * WIDTH, top + 1 + index // COLUMNS * HEIGHT
            position = {"x": x, "y": y, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": next(ids), "gridPos": position, **_build_panel(panel)})
        top += 1 + (len(row) + COLUMNS - 1) // COLUMNS * HEIGHT
    return panels


def _build_panel(panel: Document) -> Document:
    kind = panel.get("type", "timeseries")
    form = "heatmap" if kind == "heatmap" else "time_series"
    targets = [
        {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
        | {"format": form}
        for index, (legend, expr) in enumerate(panel["queries"].items())
    ]
    return {
        "type": kind,
        "title": panel["title"],
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel["unit"]}, "overrides": []},
        "targets": targets,
    }


def build_prometheus_rule() -> Document:
    """Return the rules as the custom resource of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "torchrelay", "labels": {"app.kubernetes.io/name": "torchrelay"}},
        "spec": yaml.safe_load((FOLDER / "rules.yaml").read_text()),
    }


if __name__ == "__main__":
    for path, content in generate().items():
        path.write_text(content)
        print(path)
