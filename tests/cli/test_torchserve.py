"""The command `torchserve` without a server: its messages, exit codes, and the app.yaml that it writes."""

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

from serve_app.cli import torchserve
from serve_app.cli.server_process import StartError
from serve_app.cli.torchserve_flags import (
    MissingModelStore,
    TorchServeFlags,
    count_gpus,
    find_config,
    translate,
)
from tests.support.ports import free_port


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working directory with a model store, and a folder for the pid file beside it."""
    for name in [name for name in os.environ if name.startswith("TS_") or name == "LOG_LOCATION"]:
        monkeypatch.delenv(name)
    working_dir, temporary = tmp_path / "here", tmp_path / "tmp"
    (working_dir / "store").mkdir(parents=True)
    temporary.mkdir()
    monkeypatch.setenv("TEMP", str(temporary))
    monkeypatch.chdir(working_dir)
    return working_dir


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Provide a function that runs the command and returns its exit code and standard output."""

    def run(*arguments: str) -> tuple[int, str]:
        code = 0
        try:
            torchserve.main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().out

    return run


class TestMessages:
    @pytest.mark.parametrize("flag", ["-v", "--version"])
    def test_version(self, command, flag: str) -> None:
        code, out = command(flag)
        assert (code, out.split(" (")[0]) == (0, "TorchServe Version is 0.12.0")

    def test_missing_model_store(self, command) -> None:
        assert command("--start") == (1, "Missing mandatory parameter --model-store\n")

    def test_missing_folders_and_files(self, command, folder: Path) -> None:
        assert command("--model-store", "nowhere") == (1, "--model-store directory not found: nowhere\n")
        assert command("--ts-config", "no.properties") == (1, "--ts-config file not found: no.properties\n")
        arguments = "--model-store", "store"
        assert command(*arguments, "--workflow-store", "no") == (
            1,
            "--workflow-store directory not found: no\n",
        )
        assert command(*arguments, "--log-config", "no.xml") == (
            1,
            f"--log-config file not found: {folder / 'no.xml'}\n",
        )
        assert command(*arguments, "--cpp-log-config", "n") == (
            1,
            f"--cpp-log-config file not found: {folder / 'n'}\n",
        )

    def test_start_and_stop_exclude_each_other(self, command) -> None:
        assert command("--start", "--stop")[0] == 2

    def test_nothing_to_stop(self, command) -> None:
        assert command("--stop") == (0, "TorchServe is not currently running.\n")

    @pytest.mark.parametrize("content", ["", "nonsense", "{pid}\n/somewhere/app.yaml\n"])
    def test_orphan_pid_file_is_removed(self, command, tmp_path: Path, content: str) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        pid_file = tmp_path / "tmp" / ".model_server.pid"
        pid_file.write_text(content.format(pid=ended.pid))
        assert command("--stop") == (0, "Removing orphan pid file.\nTorchServe is not currently running.\n")
        assert not pid_file.exists()

    def test_pid_of_another_process_is_not_stopped(self, command, tmp_path: Path) -> None:
        pid_file = tmp_path / "tmp" / ".model_server.pid"
        pid_file.write_text(f"{os.getpid()}\n/somewhere/app.yaml\n")
        assert command("--stop")[1].startswith("Removing orphan pid file.\n")

    def test_running_torchserve_is_found_and_stopped(self, command, tmp_path: Path, folder: Path) -> None:
        """TorchServe's own server is found by its Java class, and can be stopped too."""
        (folder / "key_file.json").write_text("{}")
        sleeper = "import time; time.sleep(60)"
        java_server = subprocess.Popen([sys.executable, "-c", sleeper, "org.pytorch.serve.ModelServer"])
        try:
            (tmp_path / "tmp" / ".model_server.pid").write_text(str(java_server.pid))
            message = "TorchServe is already running, please use torchserve --stop to stop TorchServe.\n"
            assert command("--model-store", "store") == (1, message)
            assert command("--stop") == (0, "TorchServe has stopped.\n")
            assert not psutil.pid_exists(java_server.pid)
        finally:
            java_server.kill()
            java_server.wait()
        assert not (folder / "key_file.json").exists()

    def test_invalid_temp_folder(self, command, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEMP", "/no/such/folder")
        code, out = command("--stop")
        assert (code, out) == (
            1,
            "Invalid temp directory: /no/such/folder, please check TEMP environment variable.\n",
        )

    def test_port_in_use_is_reported_with_its_key(self, command, folder: Path) -> None:
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


class TestFindConfig:
    def test_files_are_searched_in_torchserves_order(self, folder: Path) -> None:
        assert find_config(TorchServeFlags(), {}, folder) is None
        for name in ("config.properties", "a.properties", "b.properties"):
            (folder / name).touch()
        assert find_config(TorchServeFlags(), {}, folder) == folder / "config.properties"
        snapshots = folder / "logs/config"
        snapshots.mkdir(parents=True)
        for age, name in enumerate(("2-shutdown.cfg", "1-startup.cfg", "0-snapshot.cfg")):
            (snapshots / name).touch()
            os.utime(snapshots / name, (1e9 - age, 1e9 - age))
        assert find_config(TorchServeFlags(), {}, folder) == snapshots / "2-shutdown.cfg"
        assert (
            find_config(TorchServeFlags(), {"LOG_LOCATION": "elsewhere"}, folder)
            == folder / "config.properties"
        )
        assert (
            find_config(TorchServeFlags(no_config_snapshots=True), {}, folder) == folder / "config.properties"
        )
        assert find_config(TorchServeFlags(ts_config="a.properties"), {}, folder) == folder / "a.properties"
        variable = {"TS_CONFIG_FILE": "b.properties"}
        assert (
            find_config(TorchServeFlags(ts_config="a.properties"), variable, folder)
            == folder / "b.properties"
        )

    def test_missing_file(self, folder: Path) -> None:
        with pytest.raises(StartError, match=r"^--ts-config file not found: c$"):
            find_config(TorchServeFlags(ts_config="a.properties"), {"TS_CONFIG_FILE": "c"}, folder)


class TestTranslation:
    def args(self, folder: Path, flags: TorchServeFlags, **environment: str) -> dict:
        return translate(flags, environment, folder).document["applications"][0]["args"]

    def test_flags_take_precedence_over_the_file(self, folder: Path) -> None:
        (folder / "config.properties").write_text(
            "model_store=other\nload_models=digits.mar\ndisable_token_authorization=false\nenable_model_api=false\n"
        )
        (folder / "other").mkdir()
        args = self.args(folder, TorchServeFlags())
        assert (args["store"], args["control"]["load_models"]) == ({"model_store": "other"}, "digits.mar")
        assert (args["auth"], args["control"]["enable_model_api"]) == ({"mode": "on"}, False)
        flags = TorchServeFlags(
            model_store="store", models=("a.mar", "n=b.mar"), disable_token_auth=True, enable_model_api=True
        )
        args = self.args(folder, flags)
        assert (args["store"], args["control"]["load_models"]) == ({"model_store": "store"}, "a.mar,n=b.mar")
        assert args["auth"] == {"mode": "off"}
        assert "enable_model_api" not in args["control"]

    def test_environment_takes_precedence_over_flags(self, folder: Path) -> None:
        (folder / "config.properties").write_text("enable_envvars_config=true")
        flags = TorchServeFlags(model_store="store", disable_token_auth=True)
        assert self.args(folder, flags, TS_DISABLE_TOKEN_AUTHORIZATION="false")["auth"] == {"mode": "on"}

    def test_state_dir_is_that_of_torchserves_snapshots(self, folder: Path) -> None:
        args = self.args(folder, TorchServeFlags(model_store="store"))
        assert args["home"] == str(folder)
        assert args["control"]["state_dir"] == str(folder / "logs/config/torchrelay")
        args = self.args(
            folder, TorchServeFlags(model_store="store", no_config_snapshots=True), LOG_LOCATION="/var/log/ts"
        )
        assert args["control"]["state_dir"] == "/var/log/ts/config/torchrelay-ncs"

    def test_model_store_is_required(self, folder: Path) -> None:
        with pytest.raises(MissingModelStore):
            translate(TorchServeFlags(), {}, folder)
        (folder / "model_store").mkdir()  # the default
        translate(TorchServeFlags(model_store="model_store"), {}, folder)

    def test_ignored_options_are_reported(self, folder: Path) -> None:
        (folder / "log4j2.xml").touch()
        (folder / "workflows").mkdir()
        flags = TorchServeFlags(
            model_store="store", workflow_store="workflows", log_config="log4j2.xml", plugins_path="plugins"
        )
        translation = translate(flags, {}, folder)
        assert translation.translated.settings.store.workflow_store == "workflows"
        warnings = "\n".join(translation.warnings)
        for text in ("plugins_path is not served", "--log-config log4j2.xml: "):
            assert text in warnings

    def test_https_is_translated_to_ray_serves_options(self, folder: Path) -> None:
        (folder / "config.properties").write_text(
            "model_store=store\ninference_address=https://0.0.0.0:8443\ncertificate_file=c.pem\nprivate_key_file=/k.pem"
        )
        assert translate(TorchServeFlags(), {}, folder).document["http_options"] == {
            "host": "0.0.0.0",
            "port": 8443,
            "keep_alive_timeout_s": 75,
            "ssl_certfile": str(folder / "c.pem"),
            "ssl_keyfile": "/k.pem",
        }

    def test_invalid_file_is_reported_with_its_line(self, folder: Path) -> None:
        (folder / "config.properties").write_text("model_store=store\njob_queue_size=lots")
        with pytest.raises(StartError, match=r"config\.properties: line 2: job_queue_size: 'lots' must be"):
            translate(TorchServeFlags(), {}, folder)

    def test_hidden_gpus_are_not_counted(self) -> None:
        assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0


def test_document_is_valid_for_ray_serve(folder: Path) -> None:
    server = torchserve.create_server(
        TorchServeFlags(model_store="store", models=("all",), no_config_snapshots=True)
    )
    assert server.config == folder / "logs/config/torchrelay-ncs/app.yaml"
    assert server.settings.model_store == folder / "store"
    assert server.settings.control.load_models == "all"
    assert (
        yaml.safe_load(server.config.read_text())["applications"][0]["import_path"] == "serve_app.main:build"
    )


def test_start_without_snapshots_deletes_the_earlier_state(folder: Path) -> None:
    kept, deleted = (
        folder / "logs/config/torchrelay/registry.db",
        folder / "logs/config/torchrelay-ncs/registry.db",
    )
    for path in (kept, deleted):
        path.parent.mkdir(parents=True)
        path.touch()
    torchserve.create_server(TorchServeFlags(model_store="store", no_config_snapshots=True))
    assert (kept.exists(), deleted.exists()) == (True, False)
    torchserve.create_server(TorchServeFlags(model_store="store"))
    assert kept.exists()
