"""Checks of the pages against the code: links, files, settings, commands, sizes and example configuration."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_command

from serve_app import __version__
from serve_app.cli.app import app
from serve_app.domain.model import ModelSpec
from serve_app.domain.pool import PoolSettings
from serve_app.model_store.archive import ModelConfig
from serve_app.settings import Settings

pytestmark = pytest.mark.integration


ROOT = Path(__file__).parent.parent
FOLDERS = ("serve_app", "handlers", "configs", "cluster", "examples", "tests", "docs")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(rf"(?<![\w/.$-])((?:{'|'.join(FOLDERS)}|\.ci)/[\w./-]*[\w/]|[A-Z]{{4,}}\.md)(?![\w/*{{<])")


def prose(text: str) -> str:
    return _FENCE.sub("", text)


def fences(text: str, *languages: str) -> Iterator[str]:
    return (body for language, body in _FENCE.findall(text) if language in languages)


def anchors(page: Path) -> set[str]:
    """Return the fragments of a page's headings, as code hosts create them."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the command lines of a page: of its bash fences, and those after a `$` of its console fences."""
    for body in fences(text, "bash", "sh"):
        for line in body.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)
    for body in fences(text, "console"):
        for line in body.splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


@PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page}: {target}"
        if fragment:
            assert fragment in anchors(there), f"{page}: {target}"


@PAGE
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in _FILE.findall(page.read_text()):
        assert any((folder / name).exists() for folder in (ROOT, page.parent, ROOT / "serve_app")), (
            f"{page}: {name}"
        )


@PAGE
def test_command_lines_parse(page: Path) -> None:
    text = page.read_text()
    for body in fences(text, "bash", "sh"):
        done = subprocess.run(
            ["bash", "-n"], input=body, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{page}:\n{body}\n{done.stderr}"
    for line in commands(text):
        for word in line:
            if re.match("@[^-]", word):  # curl's file of a body; @- is the standard input
                assert (ROOT / word[1:]).is_file(), f"{page}: {word}"


@PAGE
def test_examples_of_data_parse(page: Path) -> None:
    text = page.read_text()
    for body in fences(text, "json"):
        decoder, rest = json.JSONDecoder(), body.strip()
        while rest:  # one answer after the other
            _, end = decoder.raw_decode(rest)
            rest = rest[end:].strip()
    for body in fences(text, "yaml"):
        assert yaml.safe_load(body)


COMMANDS: Any = get_command(app)


@PAGE
def test_commands_of_ours_are_there(page: Path) -> None:
    text = page.read_text()
    spoken = [
        shlex.split(words) for words in re.findall(r"`(?:\.venv/bin/)?(torchrelay [^`…]*)`", prose(text))
    ]
    typed = [line for line in commands(text) if line and line[0].rpartition("/")[2] == "torchrelay"]
    for line in [*spoken, *typed]:
        here = COMMANDS
        for word in line[1:]:
            if not hasattr(here, "commands") or word.startswith("-"):
                break
            if here.commands.get(word) is None:
                assert re.fullmatch(r"[a-z]+(\|[a-z]+)*", word) and set(word.split("|")) <= set(
                    here.commands
                ), line
                break
            here = here.commands[word]
        words = itertools.takewhile(lambda word: word not in ("|", "&&", ";"), line)
        named = {word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)}
        known = {name for param in here.params for name in (*param.opts, *param.secondary_opts)}
        assert named <= known | {"--help"}, f"{page}: {line}"


def test_every_option_has_a_help_text() -> None:
    def options(command: Any) -> Iterator[Any]:
        yield from (param for param in command.params if param.param_type_name == "option")
        for inner in getattr(command, "commands", {}).values():
            yield from options(inner)

    assert [option.opts for option in options(COMMANDS) if not option.hidden and not option.help] == []


@PAGE
def test_make_targets_are_there(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = page.read_text()
    spoken = re.findall(r"`make ([a-z-]+)", prose(text)) + re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
    for target in spoken:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"


GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_is_short_and_in_the_index(page: Path) -> None:
    assert len(page.read_text().split()) <= 800
    assert f"(guides/{page.name})" in (ROOT / "docs/README.md").read_text()
    assert f"docs/guides/{page.name}" in (ROOT / "docs/mkdocs.yml").read_text()


def test_the_pages_are_short() -> None:
    logs = {
        ROOT / name for name in ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "tests/torchserve_cases/README.md")
    }
    pages = [page for page in PAGES if page not in logs]
    assert sum(len(page.read_text().split()) for page in pages) <= 32_500
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_every_example_is_in_the_index() -> None:
    index = (ROOT / "examples/README.md").read_text()
    folders = [path.parent.name for path in (ROOT / "examples").glob("*/README.md")]
    assert [name for name in folders if f"({name}/README.md)" not in index] == []


def test_the_extras_install_what_examples_import() -> None:
    """Examples run without the packages for development."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pending, installed = [Requirement("torchrelay[server,onnx,examples]")], set()
    while pending:
        required = pending.pop()
        if required.name == project["name"]:
            texts = [t for extra in required.extras for t in project["optional-dependencies"][extra]]
            pending += map(Requirement, [*project["dependencies"], *texts])
        elif (name := canonicalize_name(required.name)) not in installed:
            installed.add(name)
            pending += [
                r
                for r in map(Requirement, requires(name) or ())
                if not r.marker or r.marker.evaluate({"extra": ""})
            ]
    missing, distributions = {}, packages_distributions()
    ours = {path.stem for path in (ROOT / "examples").rglob("*.py")} | {"torchrelay", "handlers", "serve_app"}
    ours |= {"helper", "kserve"}  # is written into an archive; is used where it is installed
    for path in (ROOT / "examples").rglob("*.py"):
        if "from_torchserve" in path.parts:  # runs TorchServe as well, by programs of tests/
            continue
        for module in imported_modules(path) - ours:
            names = {canonicalize_name(name) for name in distributions.get(module, ())}
            if module not in sys.stdlib_module_names and not names & installed:
                missing[module] = path
    assert missing == {}


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
    return {module.partition(".")[0] for module in modules}


def test_every_setting_is_documented_with_its_default() -> None:
    path = ROOT / "configs/settings.yaml"
    documented = yaml.safe_load(path.read_text())
    assert documented.pop("pools") == {"shared": json.loads(json.dumps(dataclasses.asdict(PoolSettings())))}
    defaults = json.loads(json.dumps(dataclasses.asdict(Settings())))
    assert defaults.pop("pools") == {}
    assert documented == defaults
    lines = path.read_text().splitlines()
    undocumented = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r" *\w+:", line) and not before.strip().startswith("#") and line != "  shared:"
    ]
    assert undocumented == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs/models").glob("*.yaml")), ids=lambda path: path.name)
def test_model_configs_hold_nothing_wrong(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ModelConfig.parse(path.read_text(), path.name)
    assert caplog.messages == []
    known = {
        field.metadata.get("key", field.name) for field in dataclasses.fields(ModelConfig) if field.metadata
    }
    assert set(config.raw) <= known
    # What is commented out would be right as well.
    uncommented = re.sub(rf"^# (?=(?:{'|'.join(known)}): )", "", path.read_text(), flags=re.MULTILINE)
    ModelConfig.parse(uncommented, path.name)
    assert caplog.messages == []


def test_the_model_config_reference_is_whole_and_says_the_defaults() -> None:
    path = ROOT / "configs/models/model-config.yaml"
    config = ModelConfig.parse(path.read_text())
    keys = set(re.findall(r"^(?:# )?(\w+): ", path.read_text(), re.MULTILINE))
    assert keys == {f.metadata.get("key", f.name) for f in dataclasses.fields(ModelConfig) if f.metadata}
    defaults = {field.name: field.default for field in dataclasses.fields(ModelSpec)}
    runtime = Settings().runtime
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        if value is None or field.name not in defaults:
            continue
        assert value == defaults[field.name], field.name
        if hasattr(runtime, field.name):
            assert value == getattr(runtime, field.name), field.name


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_issue_forms_have_labelled_fields(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["id"] and field["attributes"]["label"] for field in fields)


def test_the_changelog_knows_this_version() -> None:
    versions = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__
