"""config.properties: Java's syntax, and what becomes of TorchServe's keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import ConfigurationError
from serve_app.settings import Settings, load
from serve_app.torchserve_config import ListenAddress, decode, parse, read

pytestmark = pytest.mark.integration


ROOT = Path(__file__).parents[2]


def values(text: str) -> dict[str, str]:
    return {key: entry.value for key, entry in parse(text).items()}


class TestSyntax:
    """What java.util.Properties makes of each text was seen on Java 17."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("a=1\nb:2\nc 3\nd\t4\ne", {"a": "1", "b": "2", "c": "3", "d": "4", "e": ""}),
            ("  a =  1 \r\n\tb\t: 2\r c  =3", {"a": "1 ", "b": "2", "c": "3"}),
            ("a==1\nb=:2\nc = = 3", {"a": "=1", "b": ":2", "c": "= 3"}),
            ("# no\n! no\n  # no\na=# yes\nb=1 ! yes", {"a": "# yes", "b": "1 ! yes"}),
            ("# not continued \\\na=1", {"a": "1"}),
            ("a=1,\\\n    2,\\\n\t3\nb=4", {"a": "1,2,3", "b": "4"}),
            ("a=1\\\n# of the value\nb=2", {"a": "1# of the value", "b": "2"}),
            ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
            ("a=1\\\\\\\nb=2", {"a": "1\\b=2"}),
            ("a=1\\", {"a": "1"}),
            ("a=1\\\n\nb=2", {"a": "1", "b": "2"}),
            (r"a\ b\:c\=d=1", {"a b:c=d": "1"}),
            (r"a=C:\\models\tn\q", {"a": "C:\\models\tnq"}),
            (r"\u0061=\u00e9\u00E9", {"a": "éé"}),
            (r"a=\ud83d\ude00", {"a": "😀"}),
            ("a=1\na=2", {"a": "2"}),
            ("", {}),
            ("\n \n\t\n", {}),
        ],
    )
    def test_as_java(self, text: str, expected: dict[str, str]) -> None:
        assert values(text) == expected

    @pytest.mark.parametrize("word", [r"\u", r"\u12", r"\u12g4"])
    def test_an_escape_that_is_none(self, word: str) -> None:
        with pytest.raises(ConfigurationError, match=r"^c: line 2: .* requires four hexadecimal digits$"):
            parse(f"a=1\nb={word}", "c")

    def test_a_value_knows_its_line(self) -> None:
        assert {k: e.place for k, e in parse("# x\na=1\\\n 2\n\nb=3").items()} == {
            "a": "line 2",
            "b": "line 5",
        }

    @given(st.dictionaries(st.text(min_size=1), st.text(), max_size=4))
    def test_what_is_escaped_comes_back(self, result: dict[str, str]) -> None:
        def escaped(text: str) -> str:
            units = text.encode("utf-16-be", "surrogatepass")
            return "".join(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2))

        assert values("\n".join(f"{escaped(k)}={escaped(v)}" for k, v in result.items())) == result

    @given(st.text())
    def test_any_text_is_read_or_refused(self, text: str) -> None:
        try:
            parse(text)
        except ConfigurationError as error:
            assert "line " in str(error)

    def test_bytes(self) -> None:
        assert decode("a=é".encode()) == "a=é"
        assert decode("\ufeffa=é".encode()) == "a=é"
        assert decode("a=é".encode("latin-1")) == "a=é"


class TestVariables:
    def test_take_their_place(self) -> None:
        read_ = read(
            "job_queue_size=$$N$$0\nmodel_store=/$$A$$/$$B$$", environment={"N": "5", "A": "x", "B": "y"}
        )
        assert read_.settings.runtime.job_queue_size == 50
        assert read_.settings.store.model_store == "/x/y"

    def test_one_that_is_missing(self) -> None:
        with pytest.raises(ConfigurationError) as refused:
            read("a=1\nmodel_store=$$STORE$$", "my.properties")
        assert (
            str(refused.value)
            == "my.properties: line 2: model_store: the environment has no variable STORE; "
            "set STORE, or write the value itself"
        )


class TestWhoWins:
    TEXT = "job_queue_size=1\nenable_model_api=false\n"
    ENVIRONMENT = {
        "TS_JOB_QUEUE_SIZE": "3",
        "TS_TOKEN_EXPIRATION_TIME_MIN": "2.5",
        "TS_HEADER_KEY_SEQUENCE_ID": "seq",
    }

    def test_the_command_over_the_file(self) -> None:
        settings = read(self.TEXT, command={"job_queue_size": ("2", "--x")}).settings
        assert settings.runtime.job_queue_size == 2

    def test_the_environment_over_both_where_the_file_allows_it(self) -> None:
        text = self.TEXT + "enable_envvars_config=TRUE"
        reading = read(text, environment=self.ENVIRONMENT, command={"job_queue_size": ("2", "--x")})
        assert reading.settings.runtime.job_queue_size == 3
        assert reading.settings.auth.token_expiration == 2.5
        assert reading.settings.runtime.header_key_sequence_id == "seq"
        assert reading.warnings == ()

    def test_an_unused_environment_is_named(self) -> None:
        reading = read(self.TEXT, environment=self.ENVIRONMENT)
        assert reading.settings.runtime.job_queue_size == 1
        [warning] = reading.warnings
        assert "TS_JOB_QUEUE_SIZE (wants enable_envvars_config=true)" in warning

    def test_allowed_urls_need_a_word_of_their_own(self) -> None:
        environment = {"TS_ALLOWED_URLS": "https://there/.*,file:///here/.*"}
        text = "enable_envvars_config=true\n"
        reading = read(text, environment=environment)
        assert "TS_ALLOWED_URLS (wants use_env_allowed_urls=true)" in reading.warnings[0]
        assert "store" not in reading.args
        reading = read(text + "use_env_allowed_urls=true", environment=environment)
        assert reading.settings.store.allowed_urls == ("https://there/.*", "file:///here/.*")

    @pytest.mark.parametrize("name", ["VMARGS", "MODELS", "MODEL_SNAPSHOT", "METRIC_TIME_INTERVAL"])
    def test_some_keys_the_environment_cannot_say(self, name: str) -> None:
        reading = read("enable_envvars_config=true", environment={f"TS_{name}": "nonsense"})
        assert reading.args == read("").args
        assert reading.warnings == ()

    def test_a_wrong_value_is_refused_with_its_place(self) -> None:
        with pytest.raises(
            ConfigurationError, match="the variable TS_JOB_QUEUE_SIZE: job_queue_size: 'x' must be"
        ):
            read("enable_envvars_config=true", environment={"TS_JOB_QUEUE_SIZE": "x"})
        with pytest.raises(ConfigurationError, match="--models: "):
            read("", command={"model_snapshot": ("{", "--models")})


class TestKeys:
    def test_an_empty_file_is_torchserves_defaults(self) -> None:
        reading = read("")
        settings = reading.settings
        assert reading.inference == ListenAddress("127.0.0.1", 8080)
        assert (settings.auth.mode, settings.control.enable_model_api) == ("on", False)
        assert (settings.control.load_models, settings.telemetry.metrics_mode) == ("none", "log")
        assert settings.inference.late_response == "drop"
        assert settings.runtime.max_response_size == settings.inference.max_request_size == 6553500
        assert Settings().inference.max_request_size == 64 << 20
        assert reading.notes == reading.warnings == ()

    @pytest.mark.parametrize(
        ("line", "path", "expected"),
        [
            ("model_store=/m", "store.model_store", "/m"),
            ("load_models=ALL", "control.load_models", "all"),
            ("load_models= a.mar , n=b.mar ,", "control.load_models", "a.mar,n=b.mar"),
            ("default_service_handler=h.py:go", "store.default_service_handler", "h.py:go"),
            ("service_envelope=KServe", "runtime.service_envelope", "kserve"),
            ("install_py_dep_per_model=true", "runtime.install_py_dep_per_model", True),
            ("allowed_urls=https://a/.*,s3://b/.*", "store.allowed_urls", ("https://a/.*", "s3://b/.*")),
            ("default_workers_per_model=4", "runtime.default_workers_per_model", 4),
            ("default_response_timeout=7", "runtime.default_response_timeout", 7),
            ("default_startup_timeout=8", "runtime.default_startup_timeout", 8),
            ("job_queue_size=1000", "runtime.job_queue_size", 1000),
            ("decode_input_request=false", "runtime.decode_input_request", False),
            ("limit_max_image_pixels=false", "runtime.limit_max_image_pixels", False),
            ("cpu_launcher_enable=true", "runtime.pin", True),
            ("blacklist_env_vars=AWS_.*", "runtime.blacklist_env_vars", "AWS_.*"),
            ("max_request_size=1", "inference.max_request_size", 1),
            ("max_response_size=2", "runtime.max_response_size", 2),
            ("cors_allowed_origin=https://a", "inference.cors_allowed_origin", "https://a"),
            ("cors_allowed_methods=GET, POST", "inference.cors_allowed_methods", "GET, POST"),
            ("cors_allowed_headers=X-A", "inference.cors_allowed_headers", "X-A"),
            ("ts_header_key_sequence_id=i", "runtime.header_key_sequence_id", "i"),
            ("ts_header_key_sequence_start=s", "runtime.header_key_sequence_start", "s"),
            ("ts_header_key_sequence_end=e", "runtime.header_key_sequence_end", "e"),
            ("disable_token_authorization=true", "auth.mode", "off"),
            ("token_expiration_min=0.25", "auth.token_expiration", 0.25),
            ("enable_model_api=true", "control.enable_model_api", True),
            ("metrics_mode=Prometheus", "telemetry.metrics_mode", "prometheus"),
            ("metrics_config=/m.yaml", "telemetry.metrics_config", "/m.yaml"),
            ("model_metrics_auto_detect=true", "telemetry.model_metrics_auto_detect", True),
            ("disable_system_metrics=true", "telemetry.system_metrics", False),
            ("enable_metrics_api=false", "management.enable_metrics_api", False),
            ("metric_time_interval=5", "telemetry.system_metrics_period", 5.0),
        ],
    )
    def test_that_are_settings(self, line: str, path: str, expected: object) -> None:
        settings: object = read(line).settings
        for part in path.split("."):
            settings = getattr(settings, part)
        assert settings == expected

    @pytest.mark.parametrize(
        "line",
        [
            "job_queue_size=many",
            "job_queue_size=0",
            "max_request_size=-1",
            "default_response_timeout=1.5",
            "token_expiration_min=soon",
            "number_of_gpu=two",
            "grpc_inference_port=seven",
            "number_of_netty_threads=all",
            "metrics_mode=promteheus",
            "service_envelope=soap",
            "blacklist_env_vars=*",
            "allowed_urls=file://.*,(",
        ],
    )
    def test_of_the_wrong_kind_are_refused(self, line: str) -> None:
        key = line.partition("=")[0]
        with pytest.raises(ConfigurationError, match=f"^c: line 2: {key}: .* must be "):
            read("\n" + line, "c")

    def test_a_near_miss_of_a_word_is_named(self) -> None:
        with pytest.raises(ConfigurationError, match="did you mean prometheus"):
            read("metrics_mode=promteheus")

    def test_values_other_than_true_are_false_and_reported(self) -> None:
        reading = read("enable_model_api=yes")
        assert reading.settings.control.enable_model_api is False
        [note] = reading.notes
        assert "'yes' counts as false" in note.remark

    @pytest.mark.parametrize(
        ("line", "gpus", "expected"),
        [
            ("", 0, 0.0),
            ("", 2, 0.1),
            ("number_of_gpu=0", 2, 0.0),
            ("number_of_gpu=1", 2, 0.1),
            ("number_of_gpu=1", 0, 0),
        ],
    )
    def test_gpus(self, line: str, gpus: int, expected: float) -> None:
        assert read(line, gpus=gpus).settings.runtime.num_gpus == expected

    def test_unknown_ones_are_in_one_warning_with_the_nearest_that_is_known(self) -> None:
        reading = read("job_queue_sice=1\nfoo=2", "c")
        assert reading.warnings == (
            (
                "c: unknown keys, which do nothing: job_queue_sice (line 1; did you mean job_queue_size?),"
                " foo (line 2)"
            ),
        )

    def test_unsupported_keys_are_reported_and_unneeded_ones_are_not(self) -> None:
        reading = read(
            "ipex_enable=true\nnumber_of_netty_threads=32\ncpu_launcher_args=--x\nvmargs=-Xmx4g", "c"
        )
        assert reading.warnings == (
            "c: line 1: ipex_enable is not served: PyTorch's own oneDNN kernels run",
            (
                "c: line 3: cpu_launcher_args is not served: "
                "`runtime.pin` finds the cores itself; `threads` of a model sets their number"
            ),
        )
        fates = {note.key: note.fate for note in reading.notes}
        assert fates == {
            "ipex_enable": "unserved",
            "number_of_netty_threads": "unneeded",
            "cpu_launcher_args": "unserved",
            "vmargs": "unneeded",
        }

    def test_args_are_what_an_app_yaml_may_hold(self) -> None:
        reading = read((ROOT / "tests/data/config.properties").read_text())
        again = load(yaml.safe_load(yaml.safe_dump(reading.args)))
        assert again == reading.settings
        assert reading.warnings == ()


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "expected"),
        [
            ("http://0.0.0.0:8085", ListenAddress("0.0.0.0", 8085)),
            ("HTTP://localhost", ListenAddress("localhost", 80)),
            ("http://127.0.0.1:8080/", ListenAddress("127.0.0.1", 8080)),
            ("http://[::1]:8080", ListenAddress("::1", 8080)),
        ],
    )
    def test_of_the_inference_port(self, address: str, expected: ListenAddress) -> None:
        assert read(f"inference_address={address}").inference == expected

    def test_without_a_port(self) -> None:
        pair = "certificate_file=c.pem\nprivate_key_file=k.pem\n"
        text = "inference_address={0}://a\nmanagement_address={0}://a\nmetrics_address={0}://a"
        plain = read(text.format("http"))
        m = plain.settings.management
        assert (plain.inference.port, m.port, m.metrics_port) == (80, 8081, 8082)
        secure = read(pair + text.format("https"))
        m = secure.settings.management
        assert (secure.inference.port, m.port, m.metrics_port) == (443, 8444, 8445)
        assert (m.certificate_file, m.private_key_file) == ("c.pem", "k.pem")
        assert (secure.certificate_file, secure.private_key_file) == ("c.pem", "k.pem")

    def test_of_grpc(self) -> None:
        g = read("").settings.grpc
        assert (g.host, g.port, g.management_host, g.management_port) == (
            "127.0.0.1",
            7070,
            "127.0.0.1",
            7071,
        )
        text = "grpc_inference_address=0.0.0.0\ngrpc_inference_port=9070\ngrpc_management_port=9071\n"
        text += "grpc_inference_max_connection_age_ms=1500\n"
        text += "grpc_management_max_connection_age_ms=9223372036854775807\n"
        g = read(text + "grpc_inference_max_connection_age_grace_ms=20").settings.grpc
        assert (g.host, g.port, g.management_host, g.management_port) == ("0.0.0.0", 9070, "127.0.0.1", 9071)
        assert (g.max_connection_age, g.max_connection_age_grace, g.management_max_connection_age) == (
            1.5,
            0.02,
            0.0,
        )
        assert g.certificate_file == ""

    def test_grpc_uses_tls_when_configured(self) -> None:
        text = "certificate_file=c.pem\nprivate_key_file=k.pem\n"
        assert read(text).settings.grpc.certificate_file == ""
        reading = read(text + "enable_grpc_ssl=true")
        g = reading.settings.grpc
        assert (g.certificate_file, g.private_key_file) == ("c.pem", "k.pem")
        assert not any("no address is https" in note.remark for note in reading.notes)

    def test_that_coincide_share_a_port(self) -> None:
        one = "http://0.0.0.0:8085"
        s = read(f"inference_address={one}\nmanagement_address={one}\nmetrics_address={one}").settings
        assert (s.inference.serve_management, s.inference.serve_metrics) == (True, True)
        assert (s.management.port, s.management.metrics_port) == (0, 0)
        s = read(f"management_address={one}\nmetrics_address={one}").settings
        assert (s.inference.serve_management, s.inference.serve_metrics, s.management.serve_metrics) == (
            False,
            False,
            True,
        )
        assert (s.management.host, s.management.port, s.management.metrics_port) == ("0.0.0.0", 8085, 0)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("inference_address=unix:/tmp/a.sock", ["inference_address", "Unix socket", "http://127.0.0.1"]),
            ("metrics_address=ftp://a", ["metrics_address", "is not an address"]),
            ("metrics_address=http://a:99999", ["metrics_address", "99999", "65535"]),
            ("grpc_inference_port=99999", ["grpc_inference_port", "99999", "65535"]),
            ("enable_grpc_ssl=true", ["enable_grpc_ssl", "certificate_file", "openssl req"]),
            ("enable_grpc_ssl=true\nkeystore=k.p12", ["keystore", "openssl pkcs12"]),
            ("inference_address=8080", ["inference_address", "http://127.0.0.1:8080"]),
            (
                "inference_address=http://0.0.0.0:8081",
                ["management_address", "inference_address", "http://127.0.0.1:8081", "another port"],
            ),
            (
                "inference_address=https://a:1\nmetrics_address=http://a:1\ncertificate_file=c\nprivate_key_file=k",
                ["metrics_address", "inference_address"],
            ),
            (
                "inference_address=https://a:1",
                ["inference_address", "certificate_file", "private_key_file", "openssl req"],
            ),
            ("certificate_file=c.pem", ["certificate_file", "private_key_file"]),
            ("private_key_file=k.pem", ["private_key_file", "certificate_file"]),
            (
                "inference_address=https://a:1\nkeystore=/k.p12",
                ["keystore", "openssl pkcs12 -in /k.p12", "certificate_file"],
            ),
            (
                "management_address=https://a:1\ncertificate_file=c\nprivate_key_file=k",
                ["metrics_address", "management_address", "both"],
            ),
        ],
    )
    def test_that_cannot_be(self, text: str, words: list[str]) -> None:
        with pytest.raises(ConfigurationError) as refused:
            read(text, "c")
        assert str(refused.value).startswith(("c: line ", "c: default: "))
        assert [word for word in words if word not in str(refused.value)] == []

    def test_an_unused_certificate(self) -> None:
        reading = read("certificate_file=c\nprivate_key_file=k")
        assert (reading.certificate_file, reading.settings.management.certificate_file) == ("", "")
        assert {note.remark for note in reading.notes} == {"no address is https, so it is not read"}
