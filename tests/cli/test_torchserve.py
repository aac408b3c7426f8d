"""The command `torchserve` where it starts nothing: its messages, its exit codes, and the app.yaml that it makes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from parts import free_port

from serve_app.cli import torchserve
from serve_app.cli.process import StartError
from serve_app.cli.translation import Flags, MissingModelStore, find, gpus, translate


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model store, and a folder for the pid file beside it."""
    for name in [name for name in os.environ if name.startswith("TS_") or name == "LOG_LOCATION"]:
        monkeypatch.delenv(name)
    here, temporary = tmp_path / "here", tmp_path / "tmp"
    (here / "store").mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv("TEMP", str(temporary))
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command; gives its exit code and its standard output."""

    def run(*words: str) -> tuple[int, str]:
        code = 0
        try:
            torchserve.main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().out

    return run


class TestMessages:
    @pytest.mark.parametrize("flag", ["-v", "--version"])
    def test_the_version(self, command, flag: str) -> None:
        code, out = command(flag)
        assert (code, out.split(" (")[0]) == (0, "TorchServe Version is 0.12.0")

    def test_no_model_store(self, command) -> None:
        assert command("--start") == (1, "Missing mandatory parameter --model-store\n")

    def test_folders_and_files_that_are_not_there(self, command, folder: Path) -> None:
        assert command("--model-store", "nowhere") == (1, "--model-store directory not found: nowhere\n")
        assert command("--ts-config", "no.properties") == (1, "--ts-config file not found: no.properties\n")
        words = "--model-store", "store"
        assert command(*words, "--workflow-store", "no") == (1, "--workflow-store directory not found: no\n")
        assert command(*words, "--log-config", "no.xml") == (1, f"--log-config file not found: {folder / 'no.xml'}\n")
        assert command(*words, "--cpp-log-config", "n") == (1, f"--cpp-log-config file not found: {folder / 'n'}\n")

    def test_start_and_stop_exclude_each_other(self, command) -> None:
        assert command("--start", "--stop")[0] == 2

    def test_nothing_to_stop(self, command) -> None:
        assert command("--stop") == (0, "TorchServe is not currently running.\n")

    @pytest.mark.parametrize("content", ["", "nonsense", "{pid}\n/somewhere/app.yaml\n"])
    def test_a_pid_file_that_nobody_stands_behind(self, command, tmp_path: Path, content: str) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        pid_file = tmp_path / "tmp" / ".model_server.pid"
        pid_file.write_text(content.format(pid=ended.pid))
        assert command("--stop") == (0, "Removing orphan pid file.\nTorchServe is not currently running.\n")
        assert not pid_file.exists()

    def test_a_pid_that_is_somebody_elses_now(self, command, tmp_path: Path) -> None:
        pid_file = tmp_path / "tmp" / ".model_server.pid"
        pid_file.write_text(f"{os.getpid()}\n/somewhere/app.yaml\n")
        assert command("--stop")[1].startswith("Removing orphan pid file.\n")

    def test_a_torchserve_that_runs(self, command, tmp_path: Path, folder: Path) -> None:
        """Its own server is known by the class that its Java runs, and ended like ours."""
        (folder / "key_file.json").write_text("{}")
        sleeper = "import time; time.sleep(60)"
        theirs = subprocess.Popen([sys.executable, "-c", sleeper, "org.pytorch.serve.ModelServer"])
        try:
            (tmp_path / "tmp" / ".model_server.pid").write_text(str(theirs.pid))
            said = "TorchServe is already running, please use torchserve --stop to stop TorchServe.\n"
            assert command("--model-store", "store") == (1, said)
            assert command("--stop") == (0, "TorchServe has stopped.\n")
            assert not psutil.pid_exists(theirs.pid)
        finally:
            theirs.kill()
            theirs.wait()
        assert not (folder / "key_file.json").exists()

    def test_a_folder_for_the_pid_file_that_is_none(self, command, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEMP", "/no/such/folder")
        code, out = command("--stop")
        assert (code, out) == (
            1,
            "Invalid temp directory: /no/such/folder, please check TEMP environment variable.\n",
        )

    def test_a_port_in_use_is_named_as_the_key_that_changes_it(self, command, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            (folder / "config.properties").write_text(
                f"model_store=store\ninference_address=http://127.0.0.1:{port}\n"
                f"management_address=http://127.0.0.1:{free_port()}\nmetrics_address=http://127.0.0.1:{free_port()}\n"
                f"grpc_inference_port={free_port()}\ngrpc_management_port={free_port()}"
            )
            code, out = command("--start")
        assert code == 1
        assert f"Port {port}: Address already in use by pid {os.getpid()} (" in out
        assert f"or change inference_address in {folder / 'config.properties'}." in out


class TestWhichFile:
    def test_in_torchserves_order(self, folder: Path) -> None:
        assert find(Flags(), {}, folder) is None
        for name in ("config.properties", "a.properties", "b.properties"):
            (folder / name).touch()
        assert find(Flags(), {}, folder) == folder / "config.properties"
        snapshots = folder / "logs/config"
        snapshots.mkdir(parents=True)
        for age, name in enumerate(("2-shutdown.cfg", "1-startup.cfg", "0-snapshot.cfg")):
            (snapshots / name).touch()
            os.utime(snapshots / name, (1e9 - age, 1e9 - age))
        assert find(Flags(), {}, folder) == snapshots / "2-shutdown.cfg"
        assert find(Flags(), {"LOG_LOCATION": "elsewhere"}, folder) == folder / "config.properties"
        assert find(Flags(no_config_snapshots=True), {}, folder) == folder / "config.properties"
        assert find(Flags(ts_config="a.properties"), {}, folder) == folder / "a.properties"
        variable = {"TS_CONFIG_FILE": "b.properties"}
        assert find(Flags(ts_config="a.properties"), variable, folder) == folder / "b.properties"

    def test_one_that_is_not_there(self, folder: Path) -> None:
        with pytest.raises(StartError, match=r"^--ts-config file not found: c$"):
            find(Flags(ts_config="a.properties"), {"TS_CONFIG_FILE": "c"}, folder)


class TestTranslation:
    def args(self, folder: Path, flags: Flags, **environment: str) -> dict:
        return translate(flags, environment, folder).document["applications"][0]["args"]

    def test_flags_over_the_file(self, folder: Path) -> None:
        (folder / "config.properties").write_text(
            "model_store=other\nload_models=digits.mar\ndisable_token_authorization=false\nenable_model_api=false\n"
        )
        (folder / "other").mkdir()
        args = self.args(folder, Flags())
        assert (args["store"], args["control"]["load_models"]) == ({"model_store": "other"}, "digits.mar")
        assert (args["auth"], args["control"]["enable_model_api"]) == ({"mode": "on"}, False)
        flags = Flags(model_store="store", models=("a.mar", "n=b.mar"), disable_token_auth=True, enable_model_api=True)
        args = self.args(folder, flags)
        assert (args["store"], args["control"]["load_models"]) == ({"model_store": "store"}, "a.mar,n=b.mar")
        assert args["auth"] == {"mode": "off"}
        assert "enable_model_api" not in args["control"]

    def test_the_environment_over_the_flags(self, folder: Path) -> None:
        (folder / "config.properties").write_text("enable_envvars_config=true")
        flags = Flags(model_store="store", disable_token_auth=True)
        assert self.args(folder, flags, TS_DISABLE_TOKEN_AUTHORIZATION="false")["auth"] == {"mode": "on"}

    def test_the_state_lies_where_torchserves_snapshots_are(self, folder: Path) -> None:
        args = self.args(folder, Flags(model_store="store"))
        assert args["home"] == str(folder)
        assert args["control"]["state_dir"] == str(folder / "logs/config/torchrelay")
        args = self.args(folder, Flags(model_store="store", no_config_snapshots=True), LOG_LOCATION="/var/log/ts")
        assert args["control"]["state_dir"] == "/var/log/ts/config/torchrelay-ncs"

    def test_the_model_store_must_be_named(self, folder: Path) -> None:
        with pytest.raises(MissingModelStore):
            translate(Flags(), {}, folder)
        (folder / "model_store").mkdir()  # which is ours without a word
        translate(Flags(model_store="model_store"), {}, folder)

    def test_what_does_nothing_is_said(self, folder: Path) -> None:
        (folder / "log4j2.xml").touch()
        (folder / "workflows").mkdir()
        flags = Flags(model_store="store", workflow_store="workflows", log_config="log4j2.xml", plugins_path="plugins")
        translation = translate(flags, {}, folder)
        assert translation.reading.settings.store.workflow_store == "workflows"
        warnings = "\n".join(translation.warnings)
        for words in ("plugins_path is not served", "--log-config log4j2.xml: "):
            assert words in warnings

    def test_https_becomes_ray_serves_options(self, folder: Path) -> None:
        (folder / "config.properties").write_text(
            "model_store=store\ninference_address=https://0.0.0.0:8443\ncertificate_file=c.pem\nprivate_key_file=/k.pem"
        )
        assert translate(Flags(), {}, folder).document["http_options"] == {
            "host": "0.0.0.0",
            "port": 8443,
            "keep_alive_timeout_s": 75,
            "ssl_certfile": str(folder / "c.pem"),
            "ssl_keyfile": "/k.pem",
        }

    def test_a_broken_file_is_refused_with_its_line(self, folder: Path) -> None:
        (folder / "config.properties").write_text("model_store=store\njob_queue_size=lots")
        with pytest.raises(StartError, match=r"config\.properties: line 2: job_queue_size: 'lots' must be"):
            translate(Flags(), {}, folder)

    def test_gpus_that_are_hidden_do_not_count(self) -> None:
        assert gpus({"CUDA_VISIBLE_DEVICES": ""}) == gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_the_document_is_one_that_ray_serve_takes(folder: Path) -> None:
    server = torchserve.prepared(Flags(model_store="store", models=("all",), no_config_snapshots=True))
    assert server.config == folder / "logs/config/torchrelay-ncs/app.yaml"
    assert server.settings.model_store == folder / "store"
    assert server.settings.control.load_models == "all"
    assert yaml.safe_load(server.config.read_text())["applications"][0]["import_path"] == "serve_app.main:build"


def test_without_snapshots_a_start_forgets_the_last_one(folder: Path) -> None:
    kept, lost = folder / "logs/config/torchrelay/registry.db", folder / "logs/config/torchrelay-ncs/registry.db"
    for path in (kept, lost):
        path.parent.mkdir(parents=True)
        path.touch()
    torchserve.prepared(Flags(model_store="store", no_config_snapshots=True))
    assert (kept.exists(), lost.exists()) == (True, False)
    torchserve.prepared(Flags(model_store="store"))
    assert kept.exists()
