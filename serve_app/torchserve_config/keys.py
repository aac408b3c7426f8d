"""Every key of TorchServe's config.properties, and what becomes of it here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from serve_app.domain.validation import did_you_mean

Fate = Literal["setting", "unneeded", "unserved"]

GPU_SHARE = 0.1  # of a GPU for each replica: TorchServe lets any number of workers share one

# The kinds of values: each a function from its text, which raises ValueError with what it must be.


def whole(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < low:
            raise ValueError(f"a whole number from {low}")
        return int(text)

    return read


def _number(text: str) -> float:
    if not re.fullmatch(r"\+?(\d+\.?\d*|\.\d+)", text) or float(text) <= 0:
        raise ValueError("a number above 0")
    return float(text)


def _port(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 0 < int(text) < 65536:
        raise ValueError("a port from 1 to 65535")
    return int(text)


_LONGEST = 2**31  # milliseconds: TorchServe's own default is the largest number that it knows


def _seconds(text: str) -> float:
    """Milliseconds as seconds; as many as nobody waits for are without end."""
    milliseconds = whole(1)(text)
    return milliseconds / 1000 if milliseconds < _LONGEST else 0.0


def flag(text: str) -> bool:
    return text.lower() == "true"  # like TorchServe: whatever else it says is false


def denied(text: str) -> bool:
    return not flag(text)


def _text(text: str) -> str:
    return text


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in words:
            near = did_you_mean(text, list(words))
            raise ValueError(f"one of {', '.join(words)}" + (f"; did you mean {near}?" if near else ""))
        return text.lower()

    return read


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"a regular expression ({error})") from None
    return text


def _patterns(text: str) -> list[str]:
    return [part for word in text.split(",") if (part := _pattern(word.strip()))]


def load_models(text: str) -> str:
    models = [part for word in text.split(",") if (part := word.strip())]
    return "all" if [model.lower() for model in models] == ["all"] else ",".join(models) or "none"


def tokens(text: str) -> str:
    return "off" if flag(text) else "on"


# The keys


@dataclass(frozen=True)
class ConfigKey:
    """One key of TorchServe's: its default there, and what becomes of it here."""

    name: str
    default: str = ""  # as a file would say it; empty: none
    becomes: str = ""  # a setting, or why there is none
    fate: Fate = "setting"
    read: Callable[[str], Any] | None = None  # None: it is looked at together with others
    remark: str = ""
    variable: str | None = None  # that overrides it; None: TS_ and its name; empty: none can

    @property
    def override(self) -> str:
        return f"TS_{self.name.upper()}" if self.variable is None else self.variable


def _unneeded(name: str, default: str, why: str, **more: Any) -> ConfigKey:
    return ConfigKey(name, default, why, "unneeded", **more)


def _unserved(name: str, default: str, why: str, **more: Any) -> ConfigKey:
    return ConfigKey(name, default, why, "unserved", **more)


_PORT = "Ray hands out the ports between its processes"
_LOOPS = "every process has one event loop; `inference.gateways` adds gateways"

KEYS = (
    # Addresses
    ConfigKey(
        "inference_address", "http://127.0.0.1:8080", "`http_options.host` and `.port` of the app.yaml"
    ),
    ConfigKey("management_address", "http://127.0.0.1:8081", "`management.host` and `management.port`"),
    ConfigKey(
        "metrics_address", "http://127.0.0.1:8082", "`management.metrics_host` and `management.metrics_port`"
    ),
    ConfigKey(
        "certificate_file",
        "",
        "`http_options.ssl_certfile`, `management.certificate_file`",
        remark="with `private_key_file`, for every https address; TorchServe creates one if there is none",
    ),
    ConfigKey("private_key_file", "", "`http_options.ssl_keyfile`, `management.private_key_file`"),
    ConfigKey(
        "keystore",
        "",
        "a pair of PEM files serves instead; the message says how openssl makes it",
        "unserved",
        remark="refused where an address is https and there is no pair",
    ),
    _unserved("keystore_pass", "changeit", "see `keystore`"),
    _unserved("keystore_type", "PKCS12", "see `keystore`"),
    ConfigKey("grpc_inference_address", "127.0.0.1", "`grpc.host`", read=_text),
    ConfigKey("grpc_management_address", "127.0.0.1", "`grpc.management_host`", read=_text),
    ConfigKey("grpc_inference_port", "7070", "`grpc.port`", read=_port),
    ConfigKey("grpc_management_port", "7071", "`grpc.management_port`", read=_port),
    ConfigKey("grpc_inference_max_connection_age_ms", "", "`grpc.max_connection_age`", read=_seconds),
    ConfigKey(
        "grpc_management_max_connection_age_ms", "", "`grpc.management_max_connection_age`", read=_seconds
    ),
    ConfigKey(
        "grpc_inference_max_connection_age_grace_ms", "", "`grpc.max_connection_age_grace`", read=_seconds
    ),
    ConfigKey(
        "grpc_management_max_connection_age_grace_ms",
        "",
        "`grpc.management_max_connection_age_grace`",
        read=_seconds,
    ),
    ConfigKey(
        "enable_grpc_ssl",
        "false",
        "`grpc.certificate_file` and `.private_key_file`",
        remark="true: `certificate_file` and `private_key_file` are these, too",
    ),
    _unneeded(
        "ts_open_inference_protocol",
        "",
        "the protocol is always served",
        variable="TS_OPEN_INFERENCE_PROTOCOL",
    ),
    # Models
    ConfigKey("model_store", "", "`store.model_store`", read=_text),
    ConfigKey(
        "load_models",
        "",
        "`control.load_models`",
        remark="nothing, where nothing is set",
    ),
    ConfigKey(
        "models", "", "`control.models`", variable="", remark="minWorkers and its like, in our spelling"
    ),
    ConfigKey("model_snapshot", "", "`control.models` and `control.load_models`", variable=""),
    ConfigKey("default_service_handler", "", "`store.default_service_handler`", read=_text),
    ConfigKey(
        "service_envelope",
        "",
        "`runtime.service_envelope`",
        read=_one_of("body", "json", "kserve", "kservev2"),
    ),
    ConfigKey("install_py_dep_per_model", "false", "`runtime.install_py_dep_per_model`", read=flag),
    ConfigKey(
        "allowed_urls",
        r"file://.*|http(s)?://.*",
        "`store.allowed_urls`",
        read=_patterns,
        remark="ours, where nothing is set",
    ),
    _unneeded(
        "use_env_allowed_urls",
        "false",
        "read with the environment: `TS_ALLOWED_URLS` counts only when it is true",
    ),
    ConfigKey(
        "workflow_store",
        "",
        "`store.workflow_store`",
        read=_text,
        remark="model_store, where nothing is set",
    ),
    # What a model gets
    ConfigKey(
        "default_workers_per_model",
        "0",
        "`runtime.default_workers_per_model`",
        read=whole(0),
        remark="0 at start-up is one replica, where TorchServe starts one for each GPU or CPU",
    ),
    ConfigKey("default_response_timeout", "120", "`runtime.default_response_timeout`", read=whole(1)),
    ConfigKey("default_startup_timeout", "120", "`runtime.default_startup_timeout`", read=whole(1)),
    _unneeded(
        "unregister_model_timeout",
        "120",
        "a removed version answers what it has begun and is gone",
        read=whole(0),
    ),
    ConfigKey(
        "job_queue_size",
        "100",
        "`runtime.job_queue_size`",
        read=whole(1),
        remark="in each replica, not in all together",
    ),
    ConfigKey("decode_input_request", "true", "`runtime.decode_input_request`", read=flag),
    ConfigKey("limit_max_image_pixels", "true", "`runtime.limit_max_image_pixels`", read=flag),
    ConfigKey("blacklist_env_vars", "", "`runtime.blacklist_env_vars`", read=_pattern),
    ConfigKey(
        "number_of_gpu",
        "",
        "`runtime.num_gpus`",
        remark=f"0: none; otherwise each replica claims {GPU_SHARE} of a GPU where the machine has one, "
        "unless its model-config.yaml says another `num_gpus`",
    ),
    # Requests
    ConfigKey("max_request_size", "6553500", "`inference.max_request_size`", read=whole(1)),
    ConfigKey("max_response_size", "6553500", "`runtime.max_response_size`", read=whole(1)),
    ConfigKey("cors_allowed_origin", "", "`inference.cors_allowed_origin`", read=_text),
    ConfigKey("cors_allowed_methods", "", "`inference.cors_allowed_methods`", read=_text),
    ConfigKey("cors_allowed_headers", "", "`inference.cors_allowed_headers`", read=_text),
    ConfigKey(
        "ts_header_key_sequence_id",
        "ts_request_sequence_id",
        "`runtime.header_key_sequence_id`",
        read=_text,
        variable="TS_HEADER_KEY_SEQUENCE_ID",
    ),
    ConfigKey(
        "ts_header_key_sequence_start",
        "ts_request_sequence_start",
        "`runtime.header_key_sequence_start`",
        read=_text,
        variable="TS_HEADER_KEY_SEQUENCE_START",
    ),
    ConfigKey(
        "ts_header_key_sequence_end",
        "ts_request_sequence_end",
        "`runtime.header_key_sequence_end`",
        read=_text,
        variable="TS_HEADER_KEY_SEQUENCE_END",
    ),
    # Who may do what
    ConfigKey(
        "disable_token_authorization",
        "false",
        "`auth.mode`",
        read=tokens,
        remark="false is `on`, true is `off`",
    ),
    ConfigKey(
        "token_expiration_min",
        "60",
        "`auth.token_expiration`",
        read=_number,
        variable="TS_TOKEN_EXPIRATION_TIME_MIN",
    ),
    ConfigKey("enable_model_api", "false", "`control.enable_model_api`", read=flag),
    # Metrics and logs
    ConfigKey("metrics_mode", "log", "`telemetry.metrics_mode`", read=_one_of("log", "prometheus", "legacy")),
    ConfigKey("metrics_config", "", "`telemetry.metrics_config`", read=_text),
    ConfigKey("model_metrics_auto_detect", "false", "`telemetry.model_metrics_auto_detect`", read=flag),
    ConfigKey(
        "disable_system_metrics",
        "false",
        "`telemetry.system_metrics`",
        read=denied,
        remark="the other way round",
    ),
    ConfigKey("enable_metrics_api", "true", "`management.enable_metrics_api`", read=flag),
    ConfigKey("metric_time_interval", "60", "`telemetry.system_metrics_period`", read=_number, variable=""),
    _unserved("system_metrics_cmd", "", "the server measures the machine itself", variable=""),
    _unneeded("async_logging", "false", "no log holds up a request"),
    # What the Java server needed
    _unneeded("number_of_netty_threads", "0", _LOOPS, read=whole(0)),
    _unneeded("netty_client_threads", "0", _LOOPS, read=whole(0)),
    _unneeded("prefer_direct_buffer", "false", "there is no Java heap"),
    _unneeded("use_native_io", "true", "there is no Java network layer", variable=""),
    _unneeded("io_ratio", "50", "there is no Java network layer", variable=""),
    _unneeded("vmargs", "", "there is no Java", variable=""),
    _unserved("plugins_path", "", "plug-ins are Java archives; ask for the route that you miss", variable=""),
    _unneeded("model_server_home", "", "the package knows where it is", variable=""),
    _unneeded("python", "", "replicas run on the Python of the command", variable=""),
    _unneeded("version", "", "snapshots write it", variable=""),
    _unneeded("tsConfigFile", "", "snapshots write it", variable=""),
    _unneeded("snapshot_store", "FS", "every change is stored in the registry, `control.database_url`"),
    _unneeded("initial_worker_port", "9000", _PORT, read=whole(1)),
    _unneeded("initial_distribution_port", "29500", _PORT, read=whole(1)),
    _unneeded("NUM_WORKERS", "", "a plug-in of TorchServe's reads it", variable=""),
    _unneeded(
        "enable_envvars_config",
        "false",
        "read with the environment: `TS_…` variables count only when it is true",
        variable="",
    ),
    _unserved(
        "debug", "false", "a switch for those who work on TorchServe; `telemetry.log_level: DEBUG` says more"
    ),
    _unserved("cpp_log_config", "", "there is no C++ backend"),
    _unserved("ipex_enable", "false", "PyTorch's own oneDNN kernels run"),
    _unserved("ipex_gpu_enable", "false", "PyTorch's own kernels run"),
    ConfigKey("cpu_launcher_enable", "false", "`runtime.pin`", read=flag),
    _unserved(
        "cpu_launcher_args", "", "`runtime.pin` finds the cores itself; `threads` of a model says how many"
    ),
)
BY_NAME = {key.name: key for key in KEYS}

# What TorchServe does and has no key for.
MANNERS = {"inference.late_response": "drop"}


def reference() -> str:
    """``KEYS`` as the rows of a table, for configs/README.md."""
    words = {"setting": "", "unneeded": "not needed: ", "unserved": "not served: "}
    rows = ["| key | here | TorchServe's default | |", "|---|---|---|---|"]
    for key in KEYS:
        default = key.default.replace("|", "\\|")
        here = f"setting {key.becomes}" if key.fate == "setting" else words[key.fate] + key.becomes
        rows.append(f"| `{key.name}` | {here} | {default} | {key.remark} |")
    return "\n".join(rows)
