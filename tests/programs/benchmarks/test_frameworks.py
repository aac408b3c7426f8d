"""The other servers, each started as the benchmark starts it."""

from __future__ import annotations

import subprocess
import sysconfig

import httpx
import pytest

from tests.benchmarks import environments
from tests.benchmarks.environments import PeerFailed, interpreter
from tests.benchmarks.frameworks import FRAMEWORKS
from tests.benchmarks.targets import ask

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_server_answers_both_models_correctly(name, tmp_path):
    framework = FRAMEWORKS[name]
    if name in environments.PACKAGES:
        try:
            interpreter(name)
        except PeerFailed as error:
            pytest.skip(f"needs the packages of {name}: {error}")
    with framework.start(tmp_path) as peer:
        for model in ("echo", "mlp"):
            ask(framework.url(peer, model), framework.models[model])
        wrong = {"content": b"no JSON", "headers": {"content-type": "application/json"}}
        assert httpx.post(framework.url(peer, "mlp"), timeout=30, **wrong).status_code >= 400


def test_pip_s_message_is_reported_where_it_cannot_install(tmp_path, monkeypatch):
    monkeypatch.setitem(environments.PACKAGES, "absent", (("--no-index", "torchrelay-absent==1.0"),))
    with pytest.raises(PeerFailed, match="pip could not install absent"):
        interpreter("absent", tmp_path)


def test_an_environment_has_its_own_packages_before_the_shared_ones(tmp_path, monkeypatch):
    monkeypatch.setitem(environments.PACKAGES, "own", (("pip",),))
    command = [
        str(interpreter("own", tmp_path)),
        "-c",
        "import sys, pip, torch; print(pip.__file__, torch.__file__)",
    ]
    pip, torch = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert pip.startswith(str(tmp_path))
    assert torch.startswith(sysconfig.get_path("purelib"))
