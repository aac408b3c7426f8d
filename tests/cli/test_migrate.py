"""`torchrelay migrate`, `torchrelay archive`, and TorchServe's flags of `torchrelay start`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from serve_app import torchserve_config
from serve_app.cli.app import _server, app
from serve_app.cli.server_process import ServerProcess, StartError
from serve_app.cli.torchserve_flags import TorchServeFlags, default_config
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests/data/config.properties"


def run(*arguments: str, columns: int = 200):
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": str(columns)})


class TestMigrate:
    def test_app_yaml_has_the_same_settings(self, tmp_path: Path) -> None:
        result = run("migrate", str(EXAMPLE), "-o", str(tmp_path / "app.yaml"))
        assert result.exit_code == 0, result.output
        server = ServerProcess(tmp_path / "app.yaml", default_config("serve.env"))
        translated = torchserve_config.read(EXAMPLE.read_text())
        assert server.settings == translated.settings
        assert server.inference == "http://127.0.0.1:8080"
        document = yaml.safe_load((tmp_path / "app.yaml").read_text())
        default = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
        assert document["http_options"]["host"] == "0.0.0.0"
        for key in ("proxy_location", "logging_config"):
            assert document[key] == default[key]
        assert {**document["applications"][0], "args": None} == {**default["applications"][0], "args": None}

    def test_values_have_comments_and_defaults_are_left_out(self, tmp_path: Path) -> None:
        lines = run("migrate", str(EXAMPLE)).stdout.splitlines()
        assert "        job_queue_size: 1000   # job_queue_size" in lines
        assert '        late_response: "drop"' in lines
        assert "        max_response_size: 6553500   # max_response_size, TorchServe's default" in lines
        assert not any("enable_model_api" in line for line in lines)  # true, the default

    def test_every_key_is_reported(self, tmp_path: Path) -> None:
        file = tmp_path / "c.properties"
        file.write_text("number_of_netty_threads=4\nipex_enable=true\njob_queue_sice=3\n")
        output = run("migrate", str(file), "-o", str(tmp_path / "app.yaml")).stderr
        assert "not needed: every process has one event loop" in output
        assert "not served: PyTorch's own oneDNN kernels run" in output
        assert "did you mean job_queue_size?" in output

    def test_existing_file_is_not_overwritten(self, tmp_path: Path) -> None:
        target = tmp_path / "app.yaml"
        target.write_text("mine")
        result = run("migrate", str(EXAMPLE), "-o", str(target))
        assert (result.exit_code, target.read_text()) == (1, "mine")
        assert "--force" in result.stderr
        assert run("migrate", str(EXAMPLE), "-o", str(target), "--force").exit_code == 0

    def test_unreadable_files_are_reported(self, tmp_path: Path) -> None:
        file = tmp_path / "c.properties"
        result = run("migrate", str(file))
        assert result.exit_code == 1
        assert "No such file or directory" in result.stderr
        file.write_text("job_queue_size=lots")
        result = run("migrate", str(file))
        assert result.exit_code == 1
        assert "line 1: job_queue_size: 'lots' must be a whole number from 1" in result.stderr

    def test_certificates_are_relative_to_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "c.properties"
        file.write_text("inference_address=https://a:1\ncertificate_file=c.pem\nprivate_key_file=k.pem\n")
        http = yaml.safe_load(run("migrate", str(file)).stdout)["http_options"]
        assert (http["ssl_certfile"], http["ssl_keyfile"]) == (
            str(tmp_path / "c.pem"),
            str(tmp_path / "k.pem"),
        )


class TestStart:
    def test_app_yaml_and_flags_cannot_be_combined(self, tmp_path: Path) -> None:
        with pytest.raises(StartError, match=r"^my.yaml and TorchServe's flags cannot be combined"):
            _server(Path("my.yaml"), None, TorchServeFlags(model_store="store"))

    def test_models_takes_all_following_arguments(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "store").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as taken:  # so that the start fails
            port = taken.getsockname()[1]
            (tmp_path / "c").write_text(f"inference_address=http://127.0.0.1:{port}")
            arguments = (
                "--model-store",
                "store",
                "--models",
                "a.mar",
                "n=b.mar",
                "--ncs",
                "--dt",
                "--ts-config",
                "c",
            )
            result = run("start", *arguments, columns=1000)
        assert result.exit_code == 1
        assert f"change inference_address in {tmp_path / 'c'}" in result.stderr
        document = yaml.safe_load((tmp_path / "logs/config/torchrelay-ncs/app.yaml").read_text())
        args = document["applications"][0]["args"]
        assert (args["control"]["load_models"], args["auth"]) == ("a.mar,n=b.mar", {"mode": "off"})

    def test_config_properties_in_the_folder_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("TS_CONFIG_FILE", raising=False)
        (tmp_path / "store").mkdir()
        (tmp_path / "config.properties").write_text(
            "model_store=store\nmanagement_address=http://127.0.0.1:9081"
        )
        server = _server(None, None, TorchServeFlags())
        assert server.config == tmp_path / "logs/config/torchrelay/app.yaml"
        assert server.management == "http://127.0.0.1:9081"

    def test_app_yaml_takes_precedence_over_config_properties(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("TS_CONFIG_FILE", str(EXAMPLE))
        assert _server(None, None, TorchServeFlags()).config == Path("configs/app.yaml")

    def test_certificate_without_key_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "1000")
        document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
        document["http_options"] |= {"port": 1, "ssl_certfile": str(EXAMPLE)}
        config = tmp_path / "app.yaml"
        config.write_text(yaml.safe_dump(document))
        with pytest.raises(StartError, match="ssl_certfile and ssl_keyfile go together; give both"):
            ServerProcess(config, default_config("serve.env"))


class TestAddresses:
    def server(self, tmp_path: Path, http: dict, env: Path | None = None, **args: object) -> ServerProcess:
        document = yaml.safe_load((ROOT / "configs/app.yaml").read_text())
        document["http_options"] |= http
        document["applications"][0]["args"] = args
        config = tmp_path / "app.yaml"
        config.write_text(yaml.safe_dump(document))
        return ServerProcess(config, env or default_config("serve.env"))

    def test_apis_on_one_port(self, tmp_path: Path) -> None:
        server = self.server(
            tmp_path,
            {"host": "0.0.0.0", "port": 8085},
            inference={"serve_management": True, "serve_metrics": True},
            management={"port": 0, "metrics_port": 0},
        )
        assert server.inference == server.management == "http://127.0.0.1:8085"
        assert server.metrics == "http://127.0.0.1:8085/metrics"

    def test_with_tls(self, tmp_path: Path) -> None:
        server = self.server(
            tmp_path,
            {"host": "::", "port": 8443, "ssl_certfile": "c", "ssl_keyfile": "k"},
            management={"certificate_file": "c", "private_key_file": "k"},
        )
        assert server.inference == server.local == "https://127.0.0.1:8443"
        assert (server.management, server.metrics) == (
            "https://127.0.0.1:8081",
            "https://127.0.0.1:8082/metrics",
        )

    def test_invalid_certificate_is_refused(self, tmp_path: Path) -> None:
        env = tmp_path / "serve.env"
        env.touch()
        server = self.server(
            tmp_path,
            {"port": free_port(), "ssl_certfile": str(EXAMPLE), "ssl_keyfile": str(EXAMPLE)},
            env,
            home=str(tmp_path),
            management={"port": free_port(), "metrics_port": free_port()},
            grpc={"port": free_port(), "management_port": free_port()},
        )
        with pytest.raises(StartError, match=r"http_options\.ssl_certfile: .* holds no certificate in PEM"):
            server.start()
        assert server.pid is None


def test_archive_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.py").write_text("def handle(data, context): ...\n")
    arguments = "archive", "--model-name", "m", "-v", "1.0", "--handler", "h.py"
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (0, "m.mar: m 1.0, with h.py\n")
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"ERROR - {tmp_path / 'm.mar'} already exists.\n")
    assert run(*arguments, "-f").stderr == f"WARNING - Overwriting {tmp_path / 'm.mar'} ...\n"
    assert run("archive", "--model-name", "m").exit_code == 2
