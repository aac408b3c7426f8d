"""Replay the attacks against a real server, and print for each its effect before and after the limits.

``python -m tests.security.replay`` runs all; ``--area grpc`` runs those of one module in ``attacks``, and
``--name refused`` those with this word in their name. The exit code is 1 where an attack was not resisted.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.security import attacks
from tests.security.attack import ATTACKS, KEYS, Attack, Outcome, Target
from tests.support.archives import ECHO, make_archive
from tests.support.server import Server

SLOW = """
import time
def handle(data, context):
    if data is None:
        return None
    time.sleep(0.1)
    return ["slow"] * len(data)
"""
WIDE = """
def handle(data, context):
    return None if data is None else ["x" * (1 << 20)] * len(data)
"""
MODELS = {"echo": ECHO, "slow": SLOW, "wide": WIDE}


@contextmanager
def start_target(home: Path, *, keys: bool) -> Iterator[Target]:
    """Start a server with the models of ``Target``, with or without keys."""
    entries = [
        {"name": name, "key": f"sha256:{sha256(name.encode()).hexdigest()}", "role": role}
        for name, role in KEYS.items()
    ]
    jwt = {"issuer": "https://issuer.example", "audience": "torchrelay", "jwks_file": "jwks.json"}
    auth = {"mode": "on", "keys": entries, "jwt": jwt} if keys else {"mode": "off"}
    server = Server(home, auth=auth, store={})  # the defaults of model URLs
    for name, handler in MODELS.items():
        make_archive(server.store, name, handler)
    try:
        server.start()
        g = server.process.settings.grpc
        yield Target(
            inference=server.process.inference,
            management=server.process.management,
            grpc=f"{g.host}:{g.port}",
            management_grpc=f"{g.management_host}:{g.management_port}",
            home=home,
            processes=server.process.processes,
            log=server.log,
            keys={name: name for name in KEYS} if keys else {},
        )
    finally:
        server.close()


def load_attacks() -> None:
    """Import every module of ``attacks``, which registers its attacks."""
    for module in pkgutil.iter_modules(attacks.__path__):
        importlib.import_module(f"{attacks.__name__}.{module.name}")


def replay(selected: Sequence[Attack], console: Console) -> list[tuple[Attack, Outcome]]:
    """Run the attacks, those of a server with keys first; an attack that fails counts as not resisted."""
    outcomes: list[tuple[Attack, Outcome]] = []
    for keys in (True, False):
        group = [attack for attack in selected if attack.keys is keys]
        if not group:
            continue
        try:
            with tempfile.TemporaryDirectory() as folder, start_target(Path(folder), keys=keys) as target:
                for attack in group:
                    outcomes.append((attack, _run(attack, target)))
                    console.print(f"{attack.area}: {attack.name}: {outcomes[-1][1].after}")
        except Exception as error:  # a server that does not start must not discard the other outcomes
            traceback.print_exc()
            failed = Outcome(f"{type(error).__name__}: {error}", resisted=False)
            outcomes += [(attack, failed) for attack in group if attack not in [one for one, _ in outcomes]]
    return outcomes


def _run(attack: Attack, target: Target) -> Outcome:
    try:
        return attack.run(target)
    except Exception as error:  # a broken server must not end the other attacks
        traceback.print_exc()
        return Outcome(f"{type(error).__name__}: {error}", resisted=False)


def render(outcomes: Sequence[tuple[Attack, Outcome]]) -> Table:
    """Return the outcomes as a table."""
    table = Table("area", "attack", "before", "after", "resisted", title="Replayed attacks")
    for attack, outcome in outcomes:
        mark = "yes" if outcome.resisted else "[red]NO"
        table.add_row(attack.area, attack.name, attack.before, outcome.after, mark)
    return table


def markdown(outcomes: Sequence[tuple[Attack, Outcome]]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = ["| area | attack | before | after | resisted |", "|---|---|---|---|---|"]
    for attack, outcome in outcomes:
        mark = "yes" if outcome.resisted else "**no**"
        lines.append(f"| {attack.area} | {attack.name} | {attack.before} | {outcome.after} | {mark} |")
    return "\n".join([*lines, ""])


def main() -> int:
    """Run the selected attacks and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.replay", description=__doc__)
    parser.add_argument("--area", action="append", help="only the attacks of this module (repeatable)")
    parser.add_argument("--name", default="", help="only the attacks with this text in their name")
    parser.add_argument("--output", type=Path, help="the file of the table in Markdown")
    options = parser.parse_args()
    load_attacks()
    known = {attack.area for attack in ATTACKS}
    if unknown := set(options.area or ()) - known:
        parser.error(f"no such area: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    console = Console()
    selected = [a for a in ATTACKS if (not options.area or a.area in options.area) and options.name in a.name]
    if not selected:
        parser.error(f"no attack has {options.name!r} in its name")
    outcomes = replay(selected, console)
    console.print(render(outcomes))
    if options.output is not None:
        options.output.write_text(markdown(outcomes))
    return 0 if all(outcome.resisted for _, outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
