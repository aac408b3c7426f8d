"""`torchrelay traffic`: show and change the traffic policy of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
import yaml
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token, console, errors

_ALL = 10_000  # basis points
_Texts = Optional[list[str]]  # noqa: UP045
_Text = Optional[str]  # noqa: UP045


def traffic(
    model: Annotated[str, typer.Argument()],
    weights: Annotated[
        _Texts,
        typer.Option(metavar="VERSION=SHARE", help="90% or 9000 basis points; all shares, one option each."),
    ] = None,
    sticky: Annotated[
        _Text,
        typer.Option(
            metavar="KIND:NAME",
            help="header:x-user, cookie:user or json:$.user: the same value gets the same version.",
        ),
    ] = None,
    not_sticky: Annotated[
        bool, typer.Option("--not-sticky", help="Choose a version for each request.")
    ] = False,
    salt: Annotated[_Text, typer.Option(help="Assign callers to versions anew.")] = None,
    label: Annotated[
        _Texts, typer.Option(metavar="LABEL=VERSION", help="A label of a version; LABEL= removes it.")
    ] = None,
    header: Annotated[
        _Text, typer.Option(help='The header with which testers choose a version or a label; "" removes it.')
    ] = None,
    shadow: Annotated[
        _Text, typer.Option(metavar="VERSION=SHARE", help="Send copies of 10% of the requests there.")
    ] = None,
    no_shadow: Annotated[bool, typer.Option("--no-shadow", help="Stop the shadow.")] = False,
    whole_policy: Annotated[
        _Text,
        typer.Option(
            "--set", metavar="FILE|JSON", help="A whole policy, as JSON or YAML; - is the standard input."
        ),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Return to the default policy.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The management API's JSON.")] = False,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Show the traffic policy of a model, or change it.

    Only the given parts change. Every replica has applied the change when the command returns.
    """
    if (sticky and not_sticky) or (shadow and no_shadow):
        raise typer.BadParameter("an option and its opposite; use one of them.")
    changes = _parse_changes(weights, sticky, salt, label, header, shadow)
    if not_sticky:
        changes["key"] = changes["salt"] = None
        if salt is not None:
            changes["salt"] = salt
    if no_shadow:
        changes["shadow"] = None
    if (whole_policy is not None) + default + bool(changes) > 1:
        raise typer.BadParameter(
            "--set and --default replace the whole policy; use one of them, without other options."
        )
    new_policy = _read_document(whole_policy) if whole_policy is not None else None
    with CliClient(management, token) as client:
        if default:
            document = client.reset_traffic(model)
        elif whole_policy is not None:
            document = client.set_traffic(model, new_policy)
        elif changes:
            document = client.set_traffic(model, apply_changes(client.traffic(model), changes))
        else:
            document = client.traffic(model)
        if "active" not in document:  # stored, and not yet applied everywhere
            errors.print(document["status"], style="yellow", highlight=False)
            document = client.traffic(model)
    if as_json:
        console.print_json(data=document)
    else:
        console.print(render(document))


def _parse_changes(
    weights: list[str] | None,
    sticky: str | None,
    salt: str | None,
    label: list[str] | None,
    header: str | None,
    shadow: str | None,
) -> dict[str, Any]:
    """Return the parts of a policy that these options set."""
    changes: dict[str, Any] = {}
    if weights:
        changes["versions"] = {version: _share(share) for version, share in _pairs("--weights", weights)}
    if sticky:
        changes["key"] = _key(sticky)
    if salt is not None:
        changes["salt"] = salt
    if label:
        changes["labels"] = dict(_pairs("--label", label, empty=True))
    if header is not None:
        changes["header"] = header
    if shadow:
        [(version, share)] = _pairs("--shadow", [shadow])
        changes["shadow"] = {"version": version, "percent": _share(share) / 100}
    return changes


def apply_changes(policy: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a policy's document with these changes, without None and empty values."""
    labels = {**policy.get("labels", {}), **changes.get("labels", {})}
    shadow, new = policy.get("shadow", {}), changes.get("shadow")
    if new and shadow.get("version") == new["version"]:  # keep the comparison settings
        changes = {**changes, "shadow": {**shadow, **new}}
    after = {**policy, **changes, "labels": {name: version for name, version in labels.items() if version}}
    after = {name: value for name, value in after.items() if value and name not in ("policy", "active")}
    kind = "sticky" if "key" in after else "weighted" if "versions" in after else "default"
    return {"policy": kind, **after}


def render(document: dict[str, Any]) -> RenderableType:
    """Return a policy with the active shares as a table."""
    active, versions, shadow = document["active"], document.get("versions", {}), document.get("shadow", {})
    labels: dict[str, list[str]] = {}
    for name, version in document.get("labels", {}).items():
        labels.setdefault(version, []).append(name)
    named = {*active["versions"], active["default"], *versions, *labels, shadow.get("version", "")}
    table = Table("version", "of the requests", "policy", "labels", "")
    for version in sorted(named - {""}):
        notes = ["default"] if version == active["default"] else []
        if version == shadow.get("version"):
            notes.append(f"shadow of {shadow.get('percent', 100.0):g} %")
        share = versions.get(version) if versions else _ALL * (version == active["default"])
        table.add_row(
            escape(version),
            _percent(active["versions"].get(version, 0)),
            _percent(share),
            escape(", ".join(labels.get(version, []))),
            ", ".join(notes),
        )
    lines = []
    if active["by"] != "policy":
        lines.append(
            f"The {active['by']} {active['id']} splits the requests; the policy applies when it has ended."
        )
    if key := document.get("key"):
        [(kind, name)] = key.items()
        lines.append(f"sticky: callers with the same {kind} {name} get the same version")
    elif document["policy"] == "weighted":
        lines.append("weighted: a version is chosen for each request")
    if document.get("header"):
        lines.append(f"testers: the header {document['header']} chooses a version or a label")
    return Group(table, *map(escape, lines))


def _percent(share: int | None) -> str:
    return f"{share / 100:g} %" if share else "–"


def _pairs(option: str, options: Iterable[str], empty: bool = False) -> list[tuple[str, str]]:
    pairs: dict[str, str] = {}
    for pair in options:
        name, equals, value = pair.partition("=")
        if not name or not equals or not (value or empty):
            raise typer.BadParameter(
                f"{pair!r} is not of a form such as 2.0=10% or canary=2.0.", param_hint=option
            )
        if name in pairs:
            raise typer.BadParameter(f"{name} is given twice.", param_hint=option)
        pairs[name] = value
    return list(pairs.items())


def _share(text: str) -> int:
    """Return the basis points of a percentage or of a number of basis points."""
    try:
        points = Decimal(text.removesuffix("%")) * (100 if text.endswith("%") else 1)
        if points.is_finite() and points == int(points) and 0 <= points <= _ALL:
            return int(points)
    except InvalidOperation:
        pass
    raise typer.BadParameter(
        f"{text!r} is not a share; write 90% (to a hundredth of a percent) or 9000, which are basis points."
    )


def _key(text: str) -> dict[str, str]:
    kind, _, name = text.partition(":")
    if kind not in ("header", "cookie", "json") or not name:
        raise typer.BadParameter(
            f"{text!r} is not of a form such as header:x-user, cookie:user or json:$.user.id.",
            param_hint="--sticky",
        )
    return {kind: name}


def _read_document(source: str) -> Any:
    """Return a document from the argument itself, a file, or the standard input."""
    try:
        text = source
        if not source.lstrip().startswith("{"):
            text = sys.stdin.read() if source == "-" else Path(source).read_text()
        document = yaml.safe_load(text)
    except OSError as error:
        raise typer.BadParameter(f"{source}: {error.strerror}", param_hint="--set") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"neither JSON nor YAML: {error}", param_hint="--set") from None
    if not isinstance(document, dict):
        raise typer.BadParameter(
            'a policy is a JSON object, such as {"policy": "default"}.', param_hint="--set"
        )
    return document
