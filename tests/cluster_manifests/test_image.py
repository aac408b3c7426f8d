"""The image: what it copies is there, and its entrypoint does what it says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import lock
from serve_app import torchserve_config
from serve_app.cli import platforms
from serve_app.cli.server_process import read_env
from tests.support.container_images import read_stages, read_target

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


def test_what_the_wheel_has_is_copied_before_it_is_built() -> None:
    tomllib = pytest.importorskip("tomllib")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {
        source for word, rest in read_target("server") if word == "COPY" for source in shlex.split(rest)[:-1]
    }
    for source in (*wheel["packages"], *wheel["force-include"]):
        assert {source, *map(str, Path(source).parents)} & copied, source


@TARGETS
def test_it_runs_as_a_user_of_its_own(target: str) -> None:
    assert find(target, "USER") == ["1000:1000"]
    assert read_target(target)[-1] == ("USER", "1000:1000")


@TARGETS
def test_it_runs_the_container_s_application(target: str) -> None:
    (command,) = find(target, "CMD")
    config = "/opt/torchrelay/configs/container.yaml"
    assert json.loads(command) == ["torchrelay", "start", "--foreground", config]
    assert (ROOT / "configs/container.yaml").is_file()
    assert os.access(ENTRYPOINT, os.X_OK)


def test_the_server_s_files_are_readable_for_its_user() -> None:
    """COPY keeps the rights of a checkout that was made with umask 077."""
    assert read_stages()["server"][-1][1].endswith("&& chmod -R a+rX /server")


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


@pytest.fixture
def torchserve(tmp_path: Path) -> Callable[..., list[str]]:
    """Return ``call(*arguments)``: the image's arguments, as the command torchserve receives them.

    The first of the returned words is TEMP.
    """
    command = tmp_path / "bin/torchserve"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nprintf "%s\\n" "${TEMP-}" "$@"\n')
    command.chmod(0o755)
    (tmp_path / "serve.env").write_text("")
    folders = {name: tmp_path / name for name in ("MODEL_SERVER_HOME", "TORCHRELAY_HOME")}
    for folder in folders.values():
        folder.mkdir()

    def call(*arguments: str, **env: str) -> list[str]:
        variables = {name: str(folder) for name, folder in folders.items()}
        path = f"{command.parent}:{os.environ['PATH']}"
        done = run(tmp_path / "serve.env", *arguments, PATH=path, **variables, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return call


def test_torchserve_stays_in_the_foreground(torchserve: Callable[..., list[str]]) -> None:
    """KServe's runtime says `torchserve --start`, which goes to the background by itself."""
    given = torchserve("torchserve", "--start", "--model-store=m")[1:]
    assert given == ["--start", "--model-store=m", "--foreground"]


def test_arguments_are_evaluated_as_by_the_image_of_torchserve(torchserve: Callable[..., list[str]]) -> None:
    words = "torchserve", "--start", "--model-store", '"$MODEL_BASE_PATH/store"', "--models", "$NAME.mar"
    given = torchserve(*words, MODEL_BASE_PATH="/a b", NAME="m")[1:]
    assert given == ["--start", "--model-store", "/a b/store", "--models", "m.mar", "--foreground"]
    given = torchserve("true && torchserve --start; echo never")[1:]
    assert given == ["--start", "--foreground"]
    assert torchserve("echo", "$NAME", "&&", "echo", "then", NAME="m") == ["m", "then"]


def test_serve_starts_the_model_of_the_platform(torchserve: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "MODEL_SERVER_HOME/tmp").mkdir()
    temporary, *given = torchserve("serve")
    assert given == ["--start", "--container", "--foreground"]
    assert temporary == str(tmp_path / "MODEL_SERVER_HOME/tmp")
    assert torchserve("serve", TEMP="/own")[0] == "/own"


@pytest.mark.parametrize("variable", platforms.SERVED_BY_DEFAULT)
def test_the_images_own_command_is_serve_on_a_platform(
    torchserve: Callable[..., list[str]], tmp_path: Path, variable: str
) -> None:
    """Vertex AI starts containers without an argument."""
    (tmp_path / "bin/torchrelay").write_text('#!/bin/sh\necho torchrelay "$@"\n')
    (tmp_path / "bin/torchrelay").chmod(0o755)
    (command,) = find("cpu", "CMD")
    words = json.loads(command)
    assert torchserve(*words)[0] == " ".join(words)
    assert torchserve(*words, **{variable: "8080"})[1:] == ["--start", "--container", "--foreground"]
    own = "torchrelay start --foreground /my.yaml"
    assert torchserve(*own.split(), **{variable: "8080"})[0] == own


@pytest.mark.parametrize("words", [("-c", "echo $$; exit 7"), ("-ec", "echo $$; exit 7"), ("script",)])
def test_the_entrypoint_becomes_the_command(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Signals must reach the server, not a shell in front of it."""
    file = tmp_path / "serve.env"
    file.write_text("A=1\n")
    (tmp_path / "script").write_text("echo $$; exit 7")
    with subprocess.Popen(
        [ENTRYPOINT, "sh", *words],
        env={"PATH": os.environ["PATH"], "TORCHRELAY_ENV": str(file)},
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        out, _ = process.communicate(timeout=300)
        assert int(out) == process.pid
        assert process.returncode == 7


@TARGETS
def test_it_can_be_used_on_sagemaker(target: str) -> None:
    """SageMaker starts `docker run IMAGE serve` as root, and does not support tini as the entry point."""
    stage = f"sagemaker-{target}"
    assert read_target(target)[:-1] == read_target(stage)
    assert find(stage, "USER") == []
    assert find(stage, "ENTRYPOINT") == ['["/opt/torchrelay/entrypoint.sh"]']
    (labels,) = find(stage, "LABEL")
    prefix = "com.amazonaws.sagemaker.capabilities."
    capabilities = {"accept-bind-to-port", "multi-models", "bidirectional-streaming"}
    assert set(labels.split()) == {f"{prefix}{capability}=true" for capability in capabilities}


@TARGETS
def test_dockerfiles_for_the_image_of_torchserve_find_what_they_expect(target: str) -> None:
    assert find(target, "WORKDIR")[-1] == "/home/model-server"
    (ports,) = find(target, "EXPOSE")
    assert {"8080", "8081", "8082", "7070", "7071"} < set(ports.split())
    (step,) = [step for step in find(target, "RUN") if "useradd" in step]
    for word in ("model-server", "/home/model-server/model-store", "/usr/local/bin/dockerd-entrypoint.sh"):
        assert word in step.split()
    assert "cluster/config.properties /home/model-server/config.properties" in find(target, "COPY")
    config = torchserve_config.read((CLUSTER / "config.properties").read_text())
    assert (config.inference.host, config.inference.port, config.warnings) == ("0.0.0.0", 8080, ())
    settings = config.settings
    assert settings.store.model_store == "/home/model-server/model-store"
    management, grpc = settings.management, settings.grpc
    assert (management.host, management.port) == (management.metrics_host, 8081) == ("0.0.0.0", 8081)
    assert (management.metrics_port, grpc.host, grpc.management_host) == (8082, "0.0.0.0", "0.0.0.0")
