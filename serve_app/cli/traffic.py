"""`torchrelay traffic`: which version of a model gets which of its calls."""

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

from serve_app.cli.talk import MANAGEMENT, ManagementUrl, Talk, Token, console, errors

_WHOLE = 10_000  # basis points
_Words = Optional[list[str]]  # noqa: UP045
_Word = Optional[str]  # noqa: UP045


def traffic(
    model: Annotated[str, typer.Argument()],
    weights: Annotated[
        _Words, typer.Option(metavar="VERSION=SHARE", help="90% or 9000 basis points; all shares, one option each.")
    ] = None,
    sticky: Annotated[
        _Word, typer.Option(metavar="KIND:NAME", help="header:x-user, cookie:user or json:$.user: who shows it stays.")
    ] = None,
    not_sticky: Annotated[bool, typer.Option("--not-sticky", help="Deal out call by call.")] = False,
    salt: Annotated[_Word, typer.Option(help="Deal the same callers out anew.")] = None,
    label: Annotated[
        _Words, typer.Option(metavar="LABEL=VERSION", help="A path for a version; LABEL= takes it away.")
    ] = None,
    header: Annotated[_Word, typer.Option(help='In which testers name a version or a label; "" takes it away.')] = None,
    shadow: Annotated[_Word, typer.Option(metavar="VERSION=SHARE", help="Copies of 10% of the calls go there.")] = None,
    no_shadow: Annotated[bool, typer.Option("--no-shadow", help="No more copies.")] = False,
    whole: Annotated[
        _Word, typer.Option("--set", metavar="FILE|JSON", help="A whole policy, as JSON or YAML; - reads it from here.")
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="The default policy: forget all that was set.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As the management API has it.")] = False,
    management: ManagementUrl = MANAGEMENT,
    token: Token = "",
) -> None:
    """Show which version of a model gets which of its calls, or change it.

    What is not named stays as it is. The change is in force everywhere when the command comes back.
    """
    if (sticky and not_sticky) or (shadow and no_shadow):
        raise typer.BadParameter("an option and its opposite; name one of them.")
    changes: dict[str, Any] = {}
    if weights:
        changes["versions"] = {version: _share(share) for version, share in _pairs("--weights", weights)}
    if not_sticky:
        changes["key"] = changes["salt"] = None
    if sticky:
        changes["key"] = _key(sticky)
    if salt is not None:
        changes["salt"] = salt
    if label:
        changes["labels"] = dict(_pairs("--label", label, empty=True))
    if header is not None:
        changes["header"] = header
    if no_shadow:
        changes["shadow"] = None
    if shadow:
        [(version, share)] = _pairs("--shadow", [shadow])
        changes["shadow"] = {"version": version, "percent": _share(share) / 100}
    if (whole is not None) + default + bool(changes) > 1:
        raise typer.BadParameter("--set and --default say everything; name one of them, and nothing beside it.")
    document = _read(whole) if whole is not None else None
    with Talk(management, token) as client:
        if default:
            said = client.reset_traffic(model)
        elif whole is not None:
            said = client.set_traffic(model, document)
        elif changes:
            said = client.set_traffic(model, changed(client.traffic(model), changes))
        else:
            said = client.traffic(model)
        if "in_force" not in said:  # stored, and late somewhere
            errors.print(said["status"], style="yellow", highlight=False)
            said = client.traffic(model)
    if as_json:
        console.print_json(data=said)
    else:
        console.print(shown(said))


def changed(policy: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A policy's document with these changes; what is None or empty goes."""
    labels = {**policy.get("labels", {}), **changes.get("labels", {})}
    shadow, new = policy.get("shadow", {}), changes.get("shadow")
    if new and shadow.get("version") == new["version"]:  # how it is compared stays
        changes = {**changes, "shadow": {**shadow, **new}}
    after = {**policy, **changes, "labels": {name: version for name, version in labels.items() if version}}
    after = {name: value for name, value in after.items() if value and name not in ("policy", "in_force")}
    kind = "sticky" if "key" in after else "weighted" if "versions" in after else "default"
    return {"policy": kind, **after}


def shown(said: dict[str, Any]) -> RenderableType:
    """A policy and what is in force, for people."""
    in_force, versions, shadow = said["in_force"], said.get("versions", {}), said.get("shadow", {})
    labels: dict[str, list[str]] = {}
    for name, version in said.get("labels", {}).items():
        labels.setdefault(version, []).append(name)
    named = {*in_force["versions"], in_force["default"], *versions, *labels, shadow.get("version", "")}
    table = Table("version", "of the calls", "policy", "labels", "")
    for version in sorted(named - {""}):
        notes = ["default"] if version == in_force["default"] else []
        if version == shadow.get("version"):
            notes.append(f"shadow of {shadow.get('percent', 100.0):g} %")
        share = versions.get(version) if versions else _WHOLE * (version == in_force["default"])
        table.add_row(
            escape(version),
            _percent(in_force["versions"].get(version, 0)),
            _percent(share),
            escape(", ".join(labels.get(version, []))),
            ", ".join(notes),
        )
    lines = []
    if in_force["by"] != "policy":
        lines.append(f"The {in_force['by']} {in_force['id']} deals the calls out; the policy holds when it has ended.")
    if key := said.get("key"):
        [(kind, name)] = key.items()
        lines.append(f"sticky: whoever shows the same {kind} {name} gets the same version")
    elif said["policy"] == "weighted":
        lines.append("weighted: each call by itself")
    if said.get("header"):
        lines.append(f"testers: the header {said['header']} names a version or a label")
    return Group(table, *map(escape, lines))


def _percent(share: int | None) -> str:
    return f"{share / 100:g} %" if share else "–"


def _pairs(option: str, words: Iterable[str], empty: bool = False) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals or not (value or empty):
            raise typer.BadParameter(f"{word!r} has no form such as 2.0=10% or canary=2.0.", param_hint=option)
        if name in found:
            raise typer.BadParameter(f"{name} is named twice.", param_hint=option)
        found[name] = value
    return list(found.items())


def _share(text: str) -> int:
    """Basis points, from a percentage or from a number of them."""
    try:
        points = Decimal(text.removesuffix("%")) * (100 if text.endswith("%") else 1)
        if points.is_finite() and points == int(points) and 0 <= points <= _WHOLE:
            return int(points)
    except InvalidOperation:
        pass
    raise typer.BadParameter(
        f"{text!r} is no share; write 90% (to a hundredth of a percent) or 9000, which are basis points."
    )


def _key(text: str) -> dict[str, str]:
    kind, _, name = text.partition(":")
    if kind not in ("header", "cookie", "json") or not name:
        raise typer.BadParameter(
            f"{text!r} has no form such as header:x-user, cookie:user or json:$.user.id.", param_hint="--sticky"
        )
    return {kind: name}


def _read(said: str) -> Any:
    """A document that stands in the command, in a file, or comes in."""
    try:
        if not said.lstrip().startswith("{"):
            said = sys.stdin.read() if said == "-" else Path(said).read_text()
        document = yaml.safe_load(said)
    except OSError as error:
        raise typer.BadParameter(f"{said}: {error.strerror}", param_hint="--set") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"neither JSON nor YAML: {error}", param_hint="--set") from None
    if not isinstance(document, dict):
        raise typer.BadParameter('a policy is a JSON object, such as {"policy": "default"}.', param_hint="--set")
    return document
