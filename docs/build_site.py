"""Build the site of the documentation into build/site: ``python docs/build_site.py [--serve]``.

The pages keep their places of the repository, so that a link works on the site as it does on a code host.
A broken link or anchor fails the build. The site loads nothing from other hosts.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import reference

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "build" / "site-source"
CONFIGURATION = Path(__file__).parent / "mkdocs.yml"

_LINK = re.compile(r"(?:\]\(|src=\"|srcset=\")([^)\s\"#]+)")


def tracked_pages() -> list[Path]:
    """Return the Markdown files of the repository, relative to its root, without those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    left_out = (".github/", "serve_app/cli/project_template/")
    return [Path(name) for name in names if not name.startswith(left_out) and (ROOT / name).exists()]


def stage(into: Path) -> None:
    """Copy the pages and the files that they link to, and write the generated reference."""
    shutil.rmtree(into, ignore_errors=True)
    for page in tracked_pages():
        _copy(ROOT / page, into)
        for target in _LINK.findall((ROOT / page).read_text()):
            linked = (ROOT / page.parent / target).resolve()
            if linked.is_file() and linked.is_relative_to(ROOT) and linked.suffix != ".md":
                _copy(linked, into)
    reference.write(into / "docs" / "reference")


def _copy(file: Path, into: Path) -> None:
    target = into / file.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve the site at http://127.0.0.1:8000")
    options = parser.parse_args()
    stage(SOURCE)
    command = ["serve"] if options.serve else ["build", "--strict"]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command, "-f", str(CONFIGURATION)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # an advertisement of another tool
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    print(f"The site is in {ROOT / 'build' / 'site'}: run with --serve to read and search it.")


if __name__ == "__main__":
    main()
