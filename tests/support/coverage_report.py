"""The statements that tests executed, by package: ``python -m tests.support.coverage_report FOLDER``.

The folder has the data files of all processes. The table goes to the terminal and to ``coverage.json`` there.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from coverage import Coverage
from coverage.exceptions import NoDataError
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]


def package_of(file: Path) -> str:
    """Return ``serve_app.dataplane`` for a file at any depth of that package."""
    folders = file.parent.parts[:2]
    return ".".join(folders)


def measure(folder: Path) -> dict[str, tuple[int, int]]:
    """Combine the data files of a folder; return executed and all statements by package."""
    coverage = Coverage(data_file=str(folder / "data"), config_file=str(ROOT / "pyproject.toml"), plugins=[])
    coverage.load()
    try:
        coverage.combine([str(folder)], keep=True)
    except NoDataError:
        coverage.load()  # all files were combined before
    coverage.save()
    packages: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name in ("serve_app", "handlers"):
        for path in sorted((ROOT / name).rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            _, statements, _, missing, _ = coverage.analysis2(str(path))
            executed, total = packages[package_of(path.relative_to(ROOT))]
            counted = (executed + len(statements) - len(missing), total + len(statements))
            packages[package_of(path.relative_to(ROOT))] = counted
    return packages


def main(folder: Path) -> None:
    packages = measure(folder)
    table = Table("package", "statements", "executed", "%")
    packages["total"] = (sum(e for e, _ in packages.values()), sum(t for _, t in packages.values()))
    shares = {}
    for name, (executed, total) in packages.items():
        shares[name] = round(100 * executed / total, 1) if total else 100.0
        table.add_row(name, f"{total:,}", f"{executed:,}", f"{shares[name]:.1f}")
    Console(width=80).print(table)
    (folder / "coverage.json").write_text(json.dumps(shares, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
