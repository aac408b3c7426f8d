"""The pages of the reference, generated from the code and from the commented configuration files.

They are part of the site only (docs/build_site.py) and are not committed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torchrelay
import typer.cli
import yaml
from typer.main import get_command

import serve_app.proto.contents as messages
from serve_app import errors
from serve_app.cli.app import app
from serve_app.protocols import openapi
from serve_app.protocols.http.json_errors import TABLE as TORCHSERVE_STATUSES
from serve_app.protocols.openai.errors import TABLE as OPENAI_STATUSES
from serve_app.protocols.openinference.errors import TABLE as OPEN_INFERENCE_STATUSES
from serve_app.telemetry.metric_definitions import METRICS
from serve_app.telemetry.torchserve import catalog
from serve_app.torchserve_config.keys import reference as torchserve_keys

ROOT = Path(__file__).parent.parent


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines) + "\n"


def _escape(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def settings() -> str:
    """Return the settings of configs/settings.yaml: a section for each mapping at the top level."""
    page = ["# Settings", _introduction(ROOT / "configs/settings.yaml")]
    section: list[tuple[str, str, str]] = []
    comment: list[str] = []
    group = ""  # of the nested keys that follow
    for line in _body(ROOT / "configs/settings.yaml"):
        entry = re.fullmatch(r"( *)(\w+): ?(.*)", line)
        if not entry:
            comment = [*comment, line.strip(" #")] if line.strip() else []
            continue
        indent, key, value = entry.groups()
        if not value and not indent:
            page += [_settings_table(section), f"## `{key}`", " ".join(comment)]
            section = []
        else:
            group = f"{key}." if not value else group if len(indent) > 2 else ""
            name = key if not value else f"{group}{key}"
            section.append((f"`{name}`", f"`{value}`" if value else "", " ".join(comment)))
        comment = []
    return "\n\n".join(part for part in [*page, _settings_table(section)] if part)


def _settings_table(rows: list[tuple[str, str, str]]) -> str:
    top = [row for row in rows if row[0] == "`home`"]
    shown = table(["key", "default", "meaning"], [row for row in rows if row not in top]) if rows else ""
    return shown + ("\n## Top level\n\n" + table(["key", "default", "meaning"], top) if top else "")


def model_config() -> str:
    """Return the keys of configs/models/model-config.yaml: a section for each group of lines."""
    path = ROOT / "configs/models/model-config.yaml"
    page, rows = ["# Keys of model-config.yaml", _introduction(path)], list[tuple[str, str, str]]()
    for line in _body(path):
        if entry := re.fullmatch(r"(# )?(\w+): (.*?)(?:\s+# (.*))?", line):
            optional, key, value, meaning = entry.groups()
            rows.append((f"`{key}`", "" if optional else f"`{value}`", meaning or f"such as `{value}`"))
        elif line.startswith("# "):
            page += [table(["key", "default", "meaning"], rows) if rows else "", f"## {line[2:]}"]
            rows = []
    return "\n\n".join([part for part in page if part] + [table(["key", "default", "meaning"], rows)])


def _introduction(path: Path) -> str:
    """Return the comment at the start of a file as text; indented lines are code."""
    lines = path.read_text().split("\n\n", 1)[0].splitlines()
    text = [line.removeprefix("#").removeprefix(" ") for line in lines if line.startswith("#")]
    return "\n".join(f"  {line}" if line.startswith("  ") else line for line in text)


def _body(path: Path) -> Iterator[str]:
    text = path.read_text()
    start = re.search(r"^(?!#)", text, re.MULTILINE)
    yield from text[start.start() if start else 0 :].splitlines()


def command_line() -> str:
    command = get_command(app)
    return typer.cli.get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="torchrelay", title="Command line"
    )


def metrics() -> str:
    ours = ((f"`{m.name}`", m.kind, ", ".join(m.labels), m.help) for m in METRICS)
    recent = " and ".join(f"`{m.name}`" for m in METRICS if m.keeps_recent)
    theirs = ((f"`{f.name}`", f.kind, f.unit, ", ".join(f.dimensions)) for f in catalog.DEFAULT)
    return "\n".join(
        [
            "# Metrics\n",
            "`GET /metrics` on port 8082 covers the whole cluster. Prometheus adds `_total` to the name of a "
            "counter, and `_bucket`, `_sum` and `_count` to that of a histogram.\n",
            f"{recent} have `_recent`, too, on pages whose `name[]` has it: in the label `values` the latest "
            "100 values of all processes, the oldest first; its value is the time since which is counted.\n",
            "## Torchrelay's\n",
            table(["metric", "kind", "labels", "meaning"], ours),
            "## TorchServe's\n",
            table(["metric", "kind", "unit", "labels"], theirs),
        ]
    )


def error_reasons() -> str:
    """Return the reasons of errors with their statuses, conditions and remedies."""
    remedies = yaml.safe_load((ROOT / "serve_app/cli/remedies.yaml").read_text())
    classes = error_classes()
    rows = [_error(reason, classes.get(reason, []), remedy) for reason, remedy in remedies.items()]
    return "\n".join(
        [
            "# Errors\n",
            "Each error response has the header `x-torchrelay-reason`. The statuses are those of "
            "TorchServe's API, the Open Inference Protocol and OpenAI's API. A `PredictionException` of a "
            "handler has the status that the handler chose.\n",
            table(["reason", "TorchServe", "Open Inference", "OpenAI", "condition", "remedy"], rows),
        ]
    )


def error_classes() -> dict[str, list[type[errors.RelayError]]]:
    """Return the classes of all server errors by their reasons."""
    import serve_app.local  # with both, every module that defines an error is imported
    import serve_app.main  # noqa: F401

    found: dict[str, list[type[errors.RelayError]]] = {}
    for cls in _tree(errors.RelayError):
        if cls.__module__.startswith("serve_app.") and "reason" in cls.__dict__:
            found.setdefault(cls.reason, []).append(cls)
    return found


def _tree(cls: type[errors.RelayError]) -> Iterator[type[errors.RelayError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


def _error(reason: str, classes: Sequence[type[errors.RelayError]], remedy: str) -> tuple[str, ...]:
    conditions = [_condition(cls) for cls in classes]
    statuses = [
        " or ".join(sorted({_status(cls, table) for cls in classes}))
        for table in (TORCHSERVE_STATUSES, OPEN_INFERENCE_STATUSES, OPENAI_STATUSES)
    ]
    return (f"`{reason}`", *statuses, " ".join(filter(None, conditions)), remedy)


def _condition(cls: type[errors.RelayError]) -> str:
    """Return the first paragraph of the docstring, or the message where the class has none."""
    text = cls.__dict__.get("__doc__") or ""
    return text.split("\n\n")[0].replace("``", "`") or re.sub(r"{\w+(!r)?}", "…", cls.template)


def _status(cls: type[errors.RelayError], statuses: Mapping[type[BaseException], Any]) -> str:
    found = next(statuses[parent] for parent in cls.__mro__ if parent in statuses)
    return str(found[0] if isinstance(found, tuple) else found)


def http_api() -> str:
    ports = {
        "Inference port (8080)": openapi.inference().content,
        "Management port (8081)": openapi.management().content,
        "Metrics port (8082)": openapi.metrics().content,
    }
    introduction = (
        "# HTTP APIs\n\nEach port describes itself: `/openapi.json` is this document as OpenAPI 3.1, with "
        "all schemas, and `/docs` a page where requests can be sent.\n"
    )
    return "\n".join([introduction, *(part for name, port in ports.items() for part in _port(name, port))])


def _port(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {name}\n"
    operations = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method != "options"
    ]
    for tag in document["tags"]:
        yield f"### {tag['name']}\n\n{tag['description']}\n"
        for method, path, operation in operations:
            if operation["tags"] == [tag["name"]]:
                yield _operation(method, path, operation)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    text = [f"#### `{method.upper()} {path}`", operation["summary"]]
    parameters = [
        (f"`{each['name']}`", each["in"], each["description"])
        for each in operation["parameters"]
        if each["in"] != "path"
    ]
    if parameters:
        text.append(table(["parameter", "in", "meaning"], parameters))
    for title, contents in _contents(operation):
        text.append(f"{title}: " + ", ".join(contents))
    return "\n\n".join(text) + "\n"


def _contents(operation: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    if body := operation.get("requestBody"):
        yield "Body", [f"`{media}`" for media in body["content"]]
    yield "Statuses", sorted(f"`{status}`" for status in operation["responses"])


def grpc_api() -> str:
    sources = ("inference.proto", "management.proto", "open_inference_grpc.proto")
    folder = Path(messages.__file__).parent
    parts = [f"## {name}\n\n```proto\n{(folder / name).read_text()}```\n" for name in sources]
    introduction = (
        "# gRPC APIs\n\nPort 7070 serves inference, port 7071 management. Both have health checks "
        "(`grpc.health.v1`) and reflection.\n"
    )
    return "\n".join([introduction, *parts])


def python_api() -> str:
    """Return directives for the public names, which mkdocstrings replaces by their documentation."""
    names = [name for name in torchrelay.__all__ if name != "__version__"]
    parts = [f"::: {_path(getattr(torchrelay, name), name)}\n" for name in names]
    return "\n".join(
        [
            "# Python API\n\n`import torchrelay` loads neither torch nor Ray; each name is imported when it "
            "is first used. Other names can change in any release.\n",
            *parts,
        ]
    )


def _path(value: Any, name: str) -> str:
    module = getattr(value, "__module__", "")
    return f"{module if module != 'builtins' else 'serve_app.client'}.{getattr(value, '__name__', name)}"


def torchserve_configuration() -> str:
    return (
        "# Keys of config.properties\n\n"
        "`torchrelay migrate config.properties` writes the equivalent app.yaml and reports on each key.\n\n"
        f"{torchserve_keys()}\n"
    )


PAGES = {
    "settings.md": settings,
    "model-config.md": model_config,
    "command-line.md": command_line,
    "metrics.md": metrics,
    "errors.md": error_reasons,
    "http-api.md": http_api,
    "grpc-api.md": grpc_api,
    "python-api.md": python_api,
    "config-properties.md": torchserve_configuration,
}


def write(folder: Path) -> None:
    """Write all pages, and the OpenAPI documents beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, generate in PAGES.items():
        (folder / name).write_text(generate())
    for port in ("inference", "management"):
        document = getattr(openapi, port)().content
        (folder / f"openapi-{port}.json").write_text(json.dumps(document, indent=1))
