"""The command `torchserve` in Amazon SageMaker's containers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.server_process import StartError
from serve_app.cli.torchserve_flags import TorchServeFlags, translate
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.domain.model import Registration
from serve_app.errors import ArchiveNotFound
from serve_app.settings import Settings, load

Start = Callable[..., tuple[tuple[str, int], Settings]]


@pytest.fixture
def settings_of(tmp_path: Path) -> Start:
    def start(text: str = "", **environment: str) -> tuple[tuple[str, int], Settings]:
        (tmp_path / "store").mkdir(exist_ok=True)
        (tmp_path / "config.properties").write_text(text)
        flags = TorchServeFlags(model_store=None if "SAGEMAKER_BASE_DIR" in environment else "store")
        document: Any = translate(flags, environment, tmp_path).document
        http = document["http_options"]
        return (http["host"], http["port"]), load(document["applications"][0]["args"])

    return start


def test_multi_model_mode_serves_all_apis_on_one_port(settings_of: Start) -> None:
    address, settings = settings_of(SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_BIND_TO_PORT="9001")
    assert address == ("0.0.0.0", 9001)
    assert settings.inference.serve_management and settings.control.enable_model_api
    assert settings.runtime.default_workers_per_model == 1
    assert settings.auth.mode == "off"
    assert settings_of(SAGEMAKER_MULTI_MODEL="true")[0] == ("0.0.0.0", 8080)


def test_file_takes_precedence_for_optional_settings(settings_of: Start) -> None:
    text = "default_workers_per_model=3\ndisable_token_authorization=false\ninference_address=http://127.0.0.1:7000\n"
    address, settings = settings_of(text, SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_BIND_TO_PORT="9001")
    assert address == ("0.0.0.0", 9001)
    assert (settings.runtime.default_workers_per_model, settings.auth.mode) == (3, "on")


def test_single_model_mode_has_no_management_on_its_port(settings_of: Start) -> None:
    address, settings = settings_of(SAGEMAKER_BIND_TO_PORT="9001", SAGEMAKER_SAFE_PORT_RANGE="21000-21003")
    assert address == ("0.0.0.0", 9001)
    assert not settings.inference.serve_management and not settings.control.enable_model_api
    management, grpc = settings.management, settings.grpc
    assert (management.metrics_port, grpc.port, grpc.management_port, management.port) == (
        21000,
        21001,
        21002,
        21003,
    )
    assert management.host == management.metrics_host == "127.0.0.1"


@pytest.mark.parametrize("value", ["21000", "21000-21002", "0-9", "65530-65600", "b-a"])
def test_invalid_port_ranges_are_refused(settings_of: Start, value: str) -> None:
    with pytest.raises(StartError, match=f"SAGEMAKER_SAFE_PORT_RANGE={value}"):
        settings_of(SAGEMAKER_SAFE_PORT_RANGE=value)


@pytest.mark.parametrize("value", ["http", "0", "70000"])
def test_invalid_ports_are_refused(settings_of: Start, value: str) -> None:
    with pytest.raises(StartError, match=f"SAGEMAKER_BIND_TO_PORT={value}"):
        settings_of(SAGEMAKER_BIND_TO_PORT=value)


def test_outside_sagemaker_nothing_changes(settings_of: Start) -> None:
    assert settings_of(SAGEMAKER_MULTI_MODEL="false") == settings_of()


# Models


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder in place of /opt/ml, whose model has a script."""
    folder = tmp_path / "opt/ml"
    (folder / "model/code").mkdir(parents=True)
    (folder / "model/code/inference.py").write_text("def model_fn(model_dir): return model_dir")
    return folder


def test_no_key_is_required(settings_of: Start) -> None:
    assert settings_of(SAGEMAKER_BIND_TO_PORT="9001")[1].auth.mode == "off"
    assert settings_of()[1].auth.mode == "on"


def test_the_only_model_is_loaded_in_script_mode(settings_of: Start, base: Path) -> None:
    address, settings = settings_of(SAGEMAKER_BASE_DIR=str(base))
    assert address == ("0.0.0.0", 8080)
    assert settings.control.load_models == f"model={base}/model"
    assert settings.store.default_service_handler == "sagemaker" and settings.store.trusted == ("*",)
    runtime = settings.runtime
    assert not runtime.decode_input_request and runtime.install_py_dep_per_model
    assert runtime.pip_allow_options and runtime.pip_allow_source_builds
    assert runtime.handler_env_vars == ("*",)
    assert (runtime.default_response_timeout, runtime.default_workers_per_model) == (60, 0)
    assert settings.inference.ping == "ready" and settings.auth.mode == "off"
    assert not settings.inference.serve_management and settings.management.host == "127.0.0.1"
    assert not settings.control.models and not settings.control.external_eviction


def test_variables_of_the_toolkits(settings_of: Start, base: Path) -> None:
    _, settings = settings_of(
        SAGEMAKER_BASE_DIR=str(base),
        SAGEMAKER_TS_BATCH_SIZE="8",
        SAGEMAKER_TS_MAX_WORKERS="3",
        SAGEMAKER_MODEL_SERVER_WORKERS="2",
        SAGEMAKER_MODEL_SERVER_TIMEOUT="90",
        SAGEMAKER_CONTAINER_LOG_LEVEL="10",
        SAGEMAKER_HANDLER="package.module:handle",
    )
    model = settings.control.models["model"]["1.0"]
    assert (model.batch_size, model.max_batch_delay, model.response_timeout) == (8, 100, 60)
    assert (model.min_workers, model.max_workers, model.default_version) == (2, 3, True)
    assert settings.runtime.default_response_timeout == 90
    assert settings.telemetry.log_level == "DEBUG"
    assert settings.store.default_service_handler == "package.module:handle"


def test_requirements_come_from_the_index_that_pip_s_variables_name(settings_of: Start, base: Path) -> None:
    variables = {"PIP_INDEX_URL": "https://a", "PIP_EXTRA_INDEX_URL": "https://b https://c"}
    runtime = settings_of(SAGEMAKER_BASE_DIR=str(base), PIP_FIND_LINKS="/w", **variables)[1].runtime
    assert (runtime.pip_index_url, runtime.pip_extra_index_urls) == ("https://a", ("https://b", "https://c"))
    assert runtime.pip_find_links == ("/w",)
    assert settings_of(**variables)[1].runtime.pip_index_url == ""


def test_requests_are_as_large_as_the_platform_sends_them(settings_of: Start, base: Path) -> None:
    variables = {"SAGEMAKER_BASE_DIR": str(base)}
    settings = settings_of(**variables)[1]
    assert settings.inference.max_request_size == settings.runtime.max_response_size == 64 << 20
    assert settings_of("max_request_size=9\n", **variables)[1].inference.max_request_size == 9
    settings = settings_of(**variables, TS_MAX_REQUEST_SIZE="1000000000")[1]
    assert (settings.inference.max_request_size, settings.runtime.max_response_size) == (10**9, 64 << 20)


def test_a_load_may_take_as_long_as_the_platform_waits(settings_of: Start, base: Path) -> None:
    variables = {"SAGEMAKER_BASE_DIR": str(base)}
    assert settings_of(**variables)[1].runtime.default_startup_timeout == 3600
    assert settings_of(**variables, TS_DEFAULT_STARTUP_TIMEOUT="9")[1].runtime.default_startup_timeout == 9


def test_variables_of_hugging_faces_containers(settings_of: Start, base: Path) -> None:
    variables = {"SAGEMAKER_BASE_DIR": str(base), "HF_MODEL_ID": "a/b", "HF_TASK": "fill-mask"}
    store = settings_of(**variables)[1].store
    assert (store.default_task, store.trusted) == ("fill-mask", ("*",)), "the model is the platform's"
    (base / "model/code/inference.py").unlink()
    (base / "model/code").rmdir()
    settings = settings_of(**variables)[1]
    assert (settings.control.load_models, settings.store.trusted) == ("model=hf://a/b", ())
    assert settings_of(**variables, HF_TRUST_REMOTE_CODE="1")[1].store.trusted == ("*",)
    settings = settings_of(**variables, SAGEMAKER_MULTI_MODEL="true")[1]
    assert settings.control.load_models != "model=hf://a/b"


def test_variables_of_mlflows_image(settings_of: Start, base: Path) -> None:
    variables = {
        "SAGEMAKER_BASE_DIR": str(base),
        "MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT": "90",
        "MLSERVER_INFER_WORKERS": "3",
    }
    settings = settings_of(**variables)[1]
    assert settings.runtime.default_response_timeout == 60, "it is no directory of MLflow"
    (base / "model/MLmodel").write_text("flavors: {}")
    settings = settings_of(**variables)[1]
    assert settings.runtime.default_response_timeout == 90
    assert settings.runtime.default_workers_per_model == 3


def test_an_application_of_ray_serve_is_refused_with_what_to_do(settings_of: Start, base: Path) -> None:
    (base / "model/config.yaml").write_text("http_options: {}\napplications:\n- name: a\n")
    assert settings_of(SAGEMAKER_BASE_DIR=str(base))[1].control.load_models, "its script is served"
    (base / "model/code/inference.py").unlink()
    with pytest.raises(StartError, match="is an application of AWS's Ray Serve container"):
        settings_of(SAGEMAKER_BASE_DIR=str(base))
    (base / "model/config.yaml").unlink()
    with pytest.raises(StartError, match="SM_RAYSERVE_APP"):
        settings_of(SAGEMAKER_BASE_DIR=str(base), SM_RAYSERVE_APP="app:app")


def test_a_handler_outside_of_the_model_is_a_file(settings_of: Start, base: Path, tmp_path: Path) -> None:
    handler = f"{tmp_path}/handler.py:handle"
    variables = {"SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_HANDLER": handler}
    with pytest.raises(
        StartError, match=f"SAGEMAKER_HANDLER={handler}: there is no file {tmp_path}/handler.py"
    ):
        settings_of(**variables)
    (tmp_path / "handler.py").write_text("def handle(data, context): return data")
    assert settings_of(**variables)[1].store.default_service_handler == handler


def test_requirements_come_from_the_private_repository_of_the_toolkits(
    settings_of: Start, base: Path
) -> None:
    arn = "arn:aws:codeartifact:eu-west-1:123456789012:repository/team/pypi"
    for variables in ({"SAGEMAKER_BASE_DIR": str(base)}, {"SAGEMAKER_MULTI_MODEL": "true"}):
        settings = settings_of(**variables, CA_REPOSITORY_ARN=arn, PIP_INDEX_URL="https://a")[1]
        assert settings.runtime.pip_index_url == arn
    with pytest.raises(
        StartError, match="CA_REPOSITORY_ARN: arn:aws:s3:::a is no repository of CodeArtifact"
    ):
        settings_of(SAGEMAKER_BASE_DIR=str(base), CA_REPOSITORY_ARN="arn:aws:s3:::a")


def test_the_toolkits_own_handler_is_replaced(settings_of: Start, base: Path) -> None:
    handler = "sagemaker_pytorch_serving_container.handler_service"
    _, settings = settings_of(SAGEMAKER_BASE_DIR=str(base), SAGEMAKER_HANDLER=handler)
    assert settings.store.default_service_handler == "sagemaker"


def test_more_minimum_workers_raise_the_maximum(settings_of: Start, base: Path) -> None:
    _, settings = settings_of(SAGEMAKER_BASE_DIR=str(base), SAGEMAKER_TS_MIN_WORKERS="4")
    model = settings.control.models["model"]["1.0"]
    assert (model.min_workers, model.max_workers, model.batch_size) == (4, 4, 1)


@pytest.mark.parametrize("level", ["20", "25", "30", "55", "0"])
def test_log_levels_are_python_s(settings_of: Start, base: Path, level: str) -> None:
    _, settings = settings_of(SAGEMAKER_BASE_DIR=str(base), SAGEMAKER_CONTAINER_LOG_LEVEL=level)
    expected = {"20": "INFO", "25": "INFO", "30": "WARNING", "55": "CRITICAL", "0": "DEBUG"}
    assert settings.telemetry.log_level == expected[level]


@pytest.mark.parametrize("variable", ["TS_BATCH_SIZE", "MODEL_SERVER_TIMEOUT", "MODEL_SERVER_WORKERS"])
@pytest.mark.parametrize("value", ["many", "0", "-1"])
def test_variables_that_are_no_numbers_are_refused(
    settings_of: Start, base: Path, variable: str, value: str
) -> None:
    with pytest.raises(StartError, match=f"SAGEMAKER_{variable}={value}: it is a whole number from 1"):
        settings_of(**{"SAGEMAKER_BASE_DIR": str(base), f"SAGEMAKER_{variable}": value})


def test_archives_in_the_model_folder_are_torchserve_s(settings_of: Start, base: Path) -> None:
    (base / "model/net.mar").write_bytes(b"")
    _, settings = settings_of(SAGEMAKER_BASE_DIR=str(base))
    assert (settings.store.model_store, settings.control.load_models) == (str(base / "model"), "all")
    assert settings.runtime.decode_input_request


def test_models_of_a_multi_model_endpoint(settings_of: Start, base: Path) -> None:
    _, settings = settings_of(
        SAGEMAKER_BASE_DIR=str(base), SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_TS_BATCH_SIZE="8"
    )
    assert settings.control.load_models == "none" and not settings.control.models
    assert settings.control.external_eviction and settings.control.enable_model_api
    assert settings.store.default_service_handler == "sagemaker" and settings.store.trusted == ("*",)
    assert settings.inference.ping == "ready" and settings.inference.serve_management
    ingestor = ArchiveIngestor(settings)
    with pytest.raises(ArchiveNotFound, match="does not match any allowed URL"):
        ingestor.ingest(Registration(str(base.parent), model_name="m"))
    (base / "models/hash").mkdir(parents=True)
    (base / "model").rename(base / "models/hash/model")
    spec = ingestor.ingest(Registration(f"{base}/models/hash/model", model_name="m"))
    assert (spec.name, spec.handler, spec.min_workers) == ("m", "sagemaker", 1)


def test_the_only_model_answers_by_its_script(settings_of: Start, base: Path) -> None:
    """From the variables to a response: the start-up's registration, its spec, and a batch of its runner."""
    (base / "model/code/requirements.txt").write_text("# none\n")
    (base / "model/code/inference.py").write_text(
        "def model_fn(model_dir): return 'model'\n"
        "def input_fn(data, content_type): return data\n"
        "def predict_fn(data, model): return f'{model}: {data}'\n"
        "def output_fn(prediction, accept): return prediction\n"
    )
    _, settings = settings_of(SAGEMAKER_BASE_DIR=str(base), SAGEMAKER_TS_BATCH_SIZE="4")
    ingestor = ArchiveIngestor(settings)
    (registration,) = ingestor.startup_registrations()
    spec = ingestor.ingest(registration, at_startup=True)
    assert (spec.name, spec.version, spec.handler) == ("model", "1.0", "sagemaker")
    assert (spec.batch_size, spec.max_batch_delay, spec.requirements) == (4, 100, "code/requirements.txt")
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from serve_app.domain.model import ModelSpec\n"
        "from serve_app.domain.request import InferenceRequest, InputPart\n"
        "from serve_app.runtime.runner import Runner\n"
        "from serve_app.settings import RuntimeSettings\n"
        "spec = ModelSpec('model', '1.0', '', '', '', handler='sagemaker', config={'trusted': True})\n"
        "runner = Runner(spec, Path(sys.argv[1]), {}, RuntimeSettings(decode_input_request=False))\n"
        "runner.load()\n"
        "headers = {'content-type': 'application/json'}\n"
        "parts = [(InputPart('body', body, 'application/json'),) for body in (b'{ }', b'[1]')]\n"
        "rows = [InferenceRequest('model', None, part, headers) for part in parts]\n"
        "print(json.dumps([row.body.decode() for row in runner.run(rows, lambda index, chunk: None)]))\n"
    )
    # In a process of its own, which belongs to the model.
    command = [sys.executable, "-c", program, str(ingestor.directory(spec))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["model: { }", "model: [1]"]


def test_a_model_directory_of_mlflow_has_the_paths_of_its_scoring_server(
    settings_of: Start, base: Path
) -> None:
    assert not settings_of(SAGEMAKER_BASE_DIR=str(base))[1].inference.aliases
    (base / "model/MLmodel").write_text("flavors: {}")
    _, settings = settings_of(SAGEMAKER_BASE_DIR=str(base))
    assert settings.inference.aliases == {"/health": "/ping"}
    assert settings.control.load_models == f"model={base}/model"
    assert not settings.runtime.decode_input_request
