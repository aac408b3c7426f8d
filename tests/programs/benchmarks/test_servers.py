"""Starting and ending real processes to compare with."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from serve_app.settings import load
from tests.benchmarks import servers
from tests.benchmarks.archives import MODELS
from tests.benchmarks.targets import ask

pytestmark = pytest.mark.nightly


_SERVER = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
_NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def files(tmp_path):
    """Create the file ``ping``, by which the standard library's file server is healthy."""
    (tmp_path / "ping").write_text("{}")
    return tmp_path


def test_a_peer_is_ready_inside_the_block_and_gone_after_it(files):
    (port,) = servers.free_ports(1)
    with servers.started("It", [*_SERVER, str(port)], f"http://127.0.0.1:{port}/", folder=files) as peer:
        (process,) = peer.processes()
        assert process.pid == peer.pid
        assert 0 < peer.ready_seconds < 30
        size, counted = peer.memory()
        assert 1 << 20 < size < 1 << 30
        assert counted in ("PSS", "RSS")
        assert 0 <= peer.idle_cpu(0.05) < 2
        assert peer.url("m") == f"http://127.0.0.1:{port}/predictions/m"
    assert not psutil.pid_exists(peer.pid)
    assert peer.processes() == []


def test_what_a_peer_left_in_a_session_of_its_own_ends_with_it(files):
    (port,) = servers.free_ports(1)
    # The shell that started it is gone, so no line of parents leads to it.
    script = f"(setsid sleep 600 &) ; exec {' '.join(_SERVER)} {port}"
    with servers.started("It", ["sh", "-c", script], f"http://127.0.0.1:{port}", folder=files) as peer:
        found = {p.name(): p for p in peer.processes()}
        assert "sleep" in found
    assert not found["sleep"].is_running()


def test_a_peer_that_ends_at_once_is_reported_with_its_last_output(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    says = "It ended with 1 before it was ready:\nno such thing"
    with (
        pytest.raises(servers.PeerFailed, match=says),
        servers.started("It", command, _NOBODY, folder=tmp_path),
    ):
        pytest.fail("it is not ready")


def test_a_peer_that_never_answers_is_ended(tmp_path):
    command = ["sh", "-c", "echo $$; exec sleep 600"]
    late = servers.started("It", command, _NOBODY, folder=tmp_path, timeout=2.0)
    with pytest.raises(servers.PeerFailed, match="not ready after 2 s"), late:
        pytest.fail("it is not ready")
    assert not psutil.pid_exists(int((tmp_path / "it.log").read_text()))


def test_who_is_terminated_ends_what_it_started(tmp_path):
    own = """
import sys
from pathlib import Path
from tests.benchmarks import servers
from tests.benchmarks.targets import ask
with servers.started("It", ["sh", "-c", "echo $$; exec sleep 600"], sys.argv[1], folder=Path(sys.argv[2])):
    pass
"""
    with subprocess.Popen([sys.executable, "-c", own, _NOBODY, str(tmp_path)], cwd=servers.ROOT) as process:
        log, deadline = tmp_path / "it.log", time.monotonic() + 60
        while not (log.exists() and log.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int(log.read_text()))


def test_a_refused_registration_is_reported_in_the_response(files):
    (port,) = servers.free_ports(1)
    base = f"http://127.0.0.1:{port}"
    with servers.started("It", [*_SERVER, str(port)], base, base, folder=files) as peer:
        archive = files / "m.mar"
        with pytest.raises(servers.PeerFailed, match="It: unregistering m gave 501"):
            peer.register(archive, "m")
    with pytest.raises(servers.PeerFailed, match="It: scaling m to 2 failed"):
        peer.scale("m", 2)


def test_torchrelay_gets_the_projects_configuration_with_a_place_of_its_own(tmp_path):
    configs = Path(__file__).parents[3] / "configs"
    changed = {"telemetry": {"access_log": ""}, "control": {"reconcile_period": 1.0}}
    ports = servers._configure(tmp_path / "run", configs, ["RAY_SERVE_ENABLE_HA_PROXY"], changed)
    document = yaml.safe_load((tmp_path / "run" / "app.yaml").read_text())
    settings = load(document["applications"][0]["args"], "app.yaml")
    assert ports == (document["http_options"]["port"], settings.management.port, settings.grpc.port)
    assert len({*ports, settings.management.metrics_port, settings.grpc.management_port}) == 5
    assert settings.state_dir == tmp_path / "run" / "state"
    assert settings.model_store == tmp_path / "run" / "model_store"
    assert settings.control.load_models == "none"
    assert settings.telemetry.access_log == "" and settings.control.reconcile_period == 1.0
    ours, theirs = ((folder / "serve.env").read_text().splitlines() for folder in (tmp_path / "run", configs))
    assert set(theirs) - set(ours) == {"RAY_SERVE_ENABLE_HA_PROXY=1"}


def test_without_java_there_is_no_torchserve_and_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(servers.PeerFailed, match="needs Java 17"), servers.torchserve(tmp_path, tmp_path):
        pytest.fail("it runs without Java")


def test_an_old_java_is_reported_with_its_version(tmp_path, monkeypatch):
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(servers.PeerFailed, match=r"needs Java 17; .*11\.0\.2"):
        servers.java_version()


def test_the_bare_server_answers_as_the_archives_do(tmp_path):
    with servers.bare(tmp_path) as peer:
        for model in ("echo", "mlp"):
            assert MODELS[model].check(ask(peer.url(model), model))
        with pytest.raises(servers.PeerFailed, match="wrong answer of mlp: 404"):
            ask(peer.url("nothing"), "mlp")
