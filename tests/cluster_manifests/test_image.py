"""The image: what it copies is there, and its entrypoint does what it says."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from cluster import lock
from serve_app.cli.server_process import read_env
from tests.support.image_root import read_stages, read_target

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
ENTRYPOINT = CLUSTER / "entrypoint.sh"


def run(env_file: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "TORCHRELAY_ENV": str(env_file), **env}
    return subprocess.run(
        [ENTRYPOINT, *command], env=env, capture_output=True, text=True, timeout=300, check=False
    )


def environment(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


TARGETS = pytest.mark.parametrize("target", lock.IMAGES)


def find(target: str, word: str) -> list[str]:
    return [rest for found, rest in read_target(target) if found == word]


def test_what_the_image_copies_is_there() -> None:
    copies = [shlex.split(rest) for stage in read_stages().values() for word, rest in stage if word == "COPY"]
    copied = [source for words in copies if not words[0].startswith("--from=") for source in words[:-1]]
    sent = {
        line[1:]
        for line in (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert {source, *map(str, Path(source).parents)} & sent, f"{source} is not sent to the builder"


@TARGETS
def test_it_runs_as_a_user_of_its_own(target: str) -> None:
    assert find(target, "USER") == ["1000:1000"]
    assert read_target(target)[-1] == ("USER", "1000:1000")


@TARGETS
def test_it_runs_the_container_s_application(target: str) -> None:
    (command,) = find(target, "CMD")
    assert '"/opt/torchrelay/configs/container.yaml"' in command
    assert (ROOT / "configs/container.yaml").is_file()
    assert os.access(ENTRYPOINT, os.X_OK)


@TARGETS
def test_it_has_a_compiler_for_compiled_models(target: str) -> None:
    (packages,) = [step for step in find(target, "RUN") if "apt-get install" in step]
    assert "g++" in packages.split()


def test_the_last_target_is_the_smallest() -> None:
    """`docker build` without --target takes the last."""
    assert next(reversed(read_stages())) == "cpu"


def test_the_entrypoint_reads_serve_env_as_the_command_line_does() -> None:
    file = ROOT / "configs/serve.env"
    found = environment(run(file, "env"))
    wanted = read_env(file)
    assert wanted and wanted.items() <= found.items()


def test_what_is_set_already_stays(tmp_path: Path) -> None:
    file = tmp_path / "serve.env"
    quoted = """a 'b' "c" $HOME `d` \\e"""
    file.write_text(f"RAY_AUTH_MODE=disabled\nEMPTY=1\nQUOTED={quoted}\n\n# OTHER=1\n  SPACED=1  \nLAST=1")
    found = environment(run(file, "env", RAY_AUTH_MODE="token", EMPTY=""))
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["EMPTY"] == ""
    assert found["QUOTED"] == read_env(file)["QUOTED"] == quoted
    assert found["SPACED"] == found["LAST"] == "1"
    assert "OTHER" not in found


@pytest.mark.parametrize("line", ["RAY_AUTH_MODE", "=1", "1A=2", "A-B=1", "export A=1"])
def test_a_line_that_is_no_setting_stops_the_start(tmp_path: Path, line: str) -> None:
    file = tmp_path / "serve.env"
    file.write_text(f"# one\n{line}\n")
    done = run(file, "env")
    assert done.returncode == 1
    assert f"line 2: '{line}' is not KEY=VALUE" in done.stderr


def test_torchserve_stays_in_the_foreground(tmp_path: Path) -> None:
    """KServe's runtime says `torchserve --start`, which goes to the background by itself."""
    command = tmp_path / "torchserve"
    command.write_text('#!/bin/sh\nprintf "%s\n" "$@"\n')
    command.chmod(0o755)
    file = tmp_path / "serve.env"
    file.write_text("")
    done = run(file, "torchserve", "--start", "--ts-config=a b", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout.splitlines() == ["--start", "--ts-config=a b", "--foreground"]


def test_the_entrypoint_becomes_the_command(tmp_path: Path) -> None:
    """Signals must reach the server, not a shell in front of it."""
    file = tmp_path / "serve.env"
    file.write_text("A=1\n")
    with subprocess.Popen(
        [ENTRYPOINT, "sh", "-c", "echo $$; exit 7"],
        env={"PATH": os.environ["PATH"], "TORCHRELAY_ENV": str(file)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        out, _ = process.communicate(timeout=300)
        assert int(out) == process.pid
        assert process.returncode == 7
