"""Each way to ask wrongly that needs no cluster: status, type and message are TorchServe's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app import errors
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.domain.access import AccessTable
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.settings import ModelStoreSettings, Settings
from tests.support.archives import ECHO, make_archive

NO_WORKER = (
    " has no worker to serve inference request. Please use scale workers API to add workers. "
    "If this is a sequence inference, please check if it is closed, or expired; or exceeds maxSequenceJobQueueSize"  # noqa: E501
)
NOT_ALLOWED = "Requested method is not allowed, please refer to API document."
NO_ROUTE = "Requested resource is not found, please refer to API document."
NO_KEY = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
NO_TOKEN = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"
JSON = {"Content-Type": "application/json"}


def refused(answer: Any) -> tuple[int, str, str]:
    """Return status, type and message of an error, which has its status and a reason in it."""
    result = json.loads(answer.body)
    assert result["code"] == answer.status
    assert answer["content-type"] == "application/json"
    assert answer["x-torchrelay-reason"]
    return answer.status, result["type"], result["message"]


# On the inference port


@pytest.mark.parametrize(
    ("method", "path", "status", "type_", "message"),
    [
        ("POST", "/invocations", 400, "BadRequestException", "Parameter model_name is required."),
        ("POST", "/predictions/none", 404, "ModelNotFoundException", "Model not found: none"),
        (
            "POST",
            "/predictions/m/9",
            404,
            "ModelVersionNotFoundException",
            "Model version: 9 does not exist for model: m",
        ),
        ("GET", "/nothing", 404, "ResourceNotFoundException", NO_ROUTE),
        ("PUT", "/", 405, "MethodNotAllowedException", NOT_ALLOWED),
    ],
)
def test_invalid_request_is_refused(
    inference, method: str, path: str, status: int, type_: str, message: str
) -> None:
    assert refused(inference()(method, path, b"x")) == (status, type_, message)


@pytest.mark.parametrize("path", ["/predictions/m", "/invocations?model_name=m"])
def test_the_fields_of_a_form_are_limited_by_a_setting(inference, path: str) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = inference(max_form_fields=3)("POST", path, b"a&a&a&a", form)
    message = "The form has more than 3 fields (inference.max_form_fields)."
    assert refused(answer) == (400, "BadRequestException", message)


@pytest.mark.parametrize(
    ("error", "status", "type_", "message"),
    [
        (errors.NoReplica("m", None, "why"), 503, "ServiceUnavailableException", f'Model "m"{NO_WORKER}'),
        (errors.HandlerFailed("why"), 503, "InternalServerException", "Prediction failed"),
        (errors.HandlerRejected("my words", 599), 599, "InternalServerException", "my words"),
        (errors.HandlerRejected("too large", 413), 507, "InternalServerException", "too large"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_failed_request_is_reported(
    inference, error: Exception, status: int, type_: str, message: str
) -> None:
    async def fail(call: InferenceRequest) -> InferenceResponse:
        raise error

    answer = inference(fail)("POST", "/predictions/m", b"x")
    assert refused(answer) == (status, type_, message)
    assert b"why" not in answer.body, "what an operator reads is not for callers"


def test_body_over_the_limit_has_an_empty_response(inference, management) -> None:
    for app, path in (
        (inference(max_request_size=3), "/predictions/m"),
        (management(max_request_size=3), "/models"),
    ):
        answer = app("POST", path, b"four")
        assert (answer.status, answer.body, answer["content-type"]) == (413, b"", None)


# On the management port


@pytest.mark.parametrize(
    ("method", "path", "status", "type_", "message"),
    [
        ("POST", "/models", 400, "BadRequestException", "Parameter url is required."),
        (
            "PUT",
            "/models/m?min_worker=2&max_worker=1",
            400,
            "BadRequestException",
            "max_worker cannot be less than min_worker.",
        ),
        (
            "PUT",
            "/models/m?min_worker=-1",
            400,
            "BadRequestException",
            "min_worker and max_worker cannot be negative.",
        ),
        (
            "DELETE",
            "/models/m/1.0",
            403,
            "InvalidModelVersionException",
            "Cannot remove default version for model m",
        ),
        (
            "DELETE",
            "/models/m",
            403,
            "InvalidModelVersionException",
            "Cannot remove default version for model m",
        ),
        ("POST", "/models?url=", 404, "ModelNotFoundException", "empty url"),
        ("GET", "/models/none", 404, "ModelNotFoundException", "Model not found: none"),
        ("PUT", "/models/none/1.0/set-default", 404, "ModelNotFoundException", "Model not found: none"),
        (
            "GET",
            "/models/m/9",
            404,
            "ModelVersionNotFoundException",
            "Model version: 9 does not exist for model: m",
        ),
        (
            "DELETE",
            "/models/m/all",
            404,
            "ModelVersionNotFoundException",
            "Model version: all does not exist for model: m",
        ),
        (
            "PUT",
            "/models/m/9/set-default",
            404,
            "ModelVersionNotFoundException",
            "Model version 9 does not exist for model m",
        ),
        ("GET", "/predictions/m", 404, "ResourceNotFoundException", NO_ROUTE),
        ("PATCH", "/models/m", 405, "MethodNotAllowedException", NOT_ALLOWED),
        (
            "POST",
            "/models?url=m-2.0.mar",
            409,
            "ConflictStatusException",
            "Model version 2.0 is already registered for model m",
        ),
    ],
)
def test_invalid_change_is_refused(
    management, method: str, path: str, status: int, type_: str, message: str
) -> None:
    app = management()
    app.control_api.put(ModelSpec("m", "1.0", "m-1.0.mar", "sha256", "archive"))
    app.control_api.put(ModelSpec("m", "2.0", "m-2.0.mar", "sha256", "archive"))
    assert refused(app(method, path)) == (status, type_, message)
    assert sorted(app.control_api.specs["m"]) == ["1.0", "2.0"]


@pytest.mark.parametrize(
    ("path", "message"), [("/models", NO_KEY), ("/models/m", NO_KEY), ("/token?type=inference", NO_TOKEN)]
)
def test_without_a_key(management, path: str, message: str) -> None:
    app = management(access=AccessTable({}))
    assert refused(app("GET", path)) == (400, "InvalidKeyException", message)
    assert refused(app("GET", path, b"", {"Authorization": "Bearer x"})) == (
        400,
        "InvalidKeyException",
        message,
    )


@pytest.mark.parametrize("model", ["/models/m", "/models/m/1.0"])
def test_failed_worker_start_is_reported(management, model: str) -> None:
    app = management()
    app.control_api.put(ModelSpec("m", "1.0", "m-1.0.mar", "sha256", "archive"))
    named = "1.0" if model.endswith("1.0") else "null"
    for error, status in ((errors.StartFailed, 500), (errors.StartOutOfMemory, 507)):
        app.control_api.error = error("m", "1.0", "Traceback")
        answer = app("PUT", f"{model}?synchronous=true")
        result = f"Failed to start workers for model m version: {named}"
        assert refused(answer) == (status, "InternalServerException", result)


# Archives, which really are fetched and looked at


@pytest.fixture
def register(management, tmp_path: Path) -> Callable[..., Any]:
    """Register an archive of the store that is in ``tmp_path``."""
    store = ModelStoreSettings(model_store="store", allowed_urls=("file://.*", "http://127.*"))
    settings = Settings(home=str(tmp_path), store=store)
    settings.model_store.mkdir()
    make_archive(settings.model_store, "m", ECHO)
    (settings.model_store / "text.mar").write_text("no archive")
    whole = (settings.model_store / "m-1.0.mar").read_bytes()
    (settings.model_store / "half.mar").write_bytes(whole[: len(whole) // 2])
    for name, config in (("key", {"batchsize": 8}), ("value", {"batcher": "none"})):
        make_archive(settings.model_store, name, ECHO, config={"torchrelay": config})
    app = management()
    app.control_api.ingestor = ArchiveIngestor(settings)

    def post(**parameters: str) -> Any:
        return app("POST", "/models", json.dumps(parameters).encode(), JSON)

    return post


NOWHERE = "http://127.0.0.1:1/m.mar"  # a port that nobody listens on


@pytest.mark.parametrize(
    ("parameters", "status", "type_", "message"),
    [
        (
            {"url": "m-1.0.mar", "runtime": "perl"},
            400,
            "BadRequestException",
            "Invalid RuntimeType value: perl",
        ),
        (
            {"url": "m-1.0.mar", "runtime": "PYTHON"},
            400,
            "BadRequestException",
            "Invalid RuntimeType value: PYTHON",
        ),
        ({"url": NOWHERE}, 400, "DownloadArchiveException", f"Failed to download archive from: {NOWHERE}"),
        ({"url": "none.mar"}, 404, "ModelNotFoundException", "Model not found at: none.mar"),
        ({"url": "../m.mar"}, 404, "ModelNotFoundException", "Relative path is not allowed in url: ../m.mar"),
        (
            {"url": "http://127.0.0.1/../m.mar"},
            404,
            "ModelNotFoundException",
            "Relative path is not allowed in url: http://127.0.0.1/../m.mar",
        ),
        (
            {"url": "http://example.com/m.mar"},
            404,
            "ModelNotFoundException",
            "Given URL http://example.com/m.mar does not match any allowed URL(s)",
        ),
    ],
)
def test_unavailable_archive_is_refused(
    register, parameters: dict[str, str], status: int, type_: str, message: str
) -> None:
    assert refused(register(**parameters)) == (status, type_, message)


@pytest.mark.parametrize(
    ("url", "type_", "words"),
    [
        ("text.mar", "InvalidModelException", "is neither a zip (.mar) nor a .tar.gz, or is empty; make one"),
        ("half.mar", "InvalidModelException", "is damaged (File is not a zip file); rebuild it with"),
        ("key-1.0.mar", "BadRequestException", "unknown key 'batchsize'; did you mean 'batchSize'?"),
        ("value-1.0.mar", "BadRequestException", "batcher: 'none' must be"),
    ],
)
def test_invalid_archive_is_refused(register, url: str, type_: str, words: str) -> None:
    status, named, message = refused(register(url=url))
    assert (status, named) == (400, type_)
    assert message.startswith(url) and words in message


NESTED = b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}"


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v1/chat/completions", "/v1/embeddings"])
def test_the_nesting_of_json_is_limited_on_the_inference_port(inference, path: str) -> None:
    answer = inference()("POST", path, NESTED, JSON)
    assert answer.status == 400 and b"depth limit exceeded" in answer.body


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/models"), ("PUT", "/models/m/traffic"), ("POST", "/workflows")]
)
def test_the_nesting_of_json_is_limited_on_the_management_port(management, method: str, path: str) -> None:
    answer = management()(method, path, NESTED, JSON)
    assert answer.status == 400 and b"depth limit exceeded" in answer.body
