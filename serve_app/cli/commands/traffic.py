"""`torchrelay traffic`: show and change the traffic policy of a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token
from serve_app.cli.arguments import WHOLE, Pair, pair_option, parse_share, read_document
from serve_app.cli.terminal import AsJson, errors, show_document
from serve_app.client import Client


def _parse_key(text: str) -> dict[str, str]:
    kind, _, name = text.partition(":")
    if kind not in ("header", "cookie", "json") or not name:
        raise typer.BadParameter(
            f"{text!r} is not of a form such as header:x-user, cookie:user or json:$.user.id."
        )
    return {kind: name}


def _read_policy(source: str) -> dict[str, Any]:
    document = read_document(source)
    if not isinstance(document, dict):
        raise typer.BadParameter('a policy is a JSON object, such as {"policy": "default"}.')
    return document


def traffic(
    model: Annotated[str, typer.Argument()],
    weights: Annotated[
        list[Pair] | None,
        pair_option("VERSION=SHARE", "90% or 9000 basis points; all shares, one option each.", parse_share),
    ] = None,
    sticky: Annotated[
        Any,
        typer.Option(
            parser=_parse_key,
            metavar="KIND:NAME",
            help="header:x-user, cookie:user or json:$.user: the same value gets the same version.",
        ),
    ] = None,
    not_sticky: Annotated[
        bool, typer.Option("--not-sticky", help="Choose a version for each request.")
    ] = False,
    salt: Annotated[str | None, typer.Option(help="Assign clients to versions anew.")] = None,
    label: Annotated[
        list[Pair] | None,
        pair_option("LABEL=VERSION", "A label of a version; LABEL= removes it.", allow_empty=True),
    ] = None,
    header: Annotated[
        str | None,
        typer.Option(help='The header with which testers choose a version or a label; "" removes it.'),
    ] = None,
    shadow: Annotated[
        Pair | None,
        pair_option("VERSION=SHARE", "Send copies of 10% of the requests there.", parse_share),
    ] = None,
    no_shadow: Annotated[bool, typer.Option("--no-shadow", help="Stop the shadow.")] = False,
    whole_policy: Annotated[
        Any,
        typer.Option(
            "--set",
            parser=_read_policy,
            metavar="FILE|JSON",
            help="A whole policy, as JSON or YAML; - is the standard input.",
        ),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Return to the default policy.")] = False,
    as_json: AsJson = False,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Show the traffic policy of a model, or change it.

    Only the given parts change. Every replica has applied the change when the command returns.
    """
    if (sticky and not_sticky) or (shadow and no_shadow):
        raise typer.BadParameter("an option and its opposite; use one of them.")
    changes: dict[str, Any] = {"key": None, "salt": None} if not_sticky else {}
    if no_shadow:
        changes["shadow"] = None
    given = {
        "versions": _unique("--weights", weights),
        "key": sticky,
        "salt": salt,
        "labels": _unique("--label", label),
        "header": header,
        "shadow": shadow and {"version": shadow.name, "percent": shadow.value / 100},
    }
    changes |= {part: value for part, value in given.items() if value is not None}
    if (whole_policy is not None) + default + bool(changes) > 1:
        raise typer.BadParameter(
            "--set and --default replace the whole policy; use one of them, without other options."
        )
    with CliClient(management, token) as client:
        document = _send(client, model, changes, whole_policy, default)
        if "active" not in document:  # stored, and not yet applied everywhere
            errors.print(document["status"], style="yellow", highlight=False)
            document = client.traffic(model)
    show_document(document, render, as_json)


def _send(client: Client, model: str, changes: dict[str, Any], whole_policy: Any, default: bool) -> Any:
    """Change the policy, if there is a change; return the response."""
    if default:
        return client.reset_traffic(model)
    if whole_policy is not None:
        return client.set_traffic(model, whole_policy)
    policy = client.traffic(model)
    return client.set_traffic(model, apply_changes(policy, changes)) if changes else policy


def _unique(option: str, pairs: list[Pair] | None) -> dict[str, Any] | None:
    """Return the pairs of an option by their names. Raises BadParameter for a name that is given twice."""
    if not pairs:
        return None
    names = [pair.name for pair in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise typer.BadParameter(f"{repeated[0]} is given twice.", param_hint=option)
    return dict(pairs)


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
        share = versions.get(version) if versions else WHOLE * (version == active["default"])
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
        lines.append(f"sticky: clients with the same {kind} {name} get the same version")
    elif document["policy"] == "weighted":
        lines.append("weighted: a version is chosen for each request")
    if document.get("header"):
        lines.append(f"testers: the header {document['header']} chooses a version or a label")
    return Group(table, *map(escape, lines))


def _percent(share: int | None) -> str:
    return f"{share / 100:g} %" if share else "–"
