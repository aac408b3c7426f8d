"""The management API as a TorchServe client sees it."""

from __future__ import annotations

import json

import pytest

from serve_app.domain.model import ModelRef, Registration, ScalingProgress
from serve_app.errors import BadRequest, InProgress, StartFailed, StartOutOfMemory
from serve_app.protocols.torchserve.descriptions import describe_registration
from tests.support.torchserve_management import (
    PARTIAL,
    PROGRESS,
    WORKER,
    make_spec,
    parse_error,
    parse_status,
)


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/models/none", "ModelNotFoundException", "Model not found: none"),
        (
            "/models/noop/9",
            "ModelVersionNotFoundException",
            "Model version: 9 does not exist for model: noop",
        ),
        ("/v1/models/none", "ModelNotFoundException", "Model not found: none"),
        (
            "/ping",
            "ResourceNotFoundException",
            "Requested resource is not found, please refer to API document.",
        ),
    ],
)
def test_unknown_models_are_not_found(management, path: str, kind: str, message: str) -> None:
    app = management()
    app.control_api.put(make_spec())
    assert parse_error(app("GET", path)) == (404, kind, message)


def test_list_pages_as_torchserve_does(management) -> None:
    app = management()
    for name in ("c", "a", "b"):
        app.control_api.put(make_spec(name))
    response = app("GET", "/models?limit=1")
    assert response.body == (
        b'{\n  "nextPageToken": "1",\n  "models": [\n    {\n      "modelName": "a",\n'
        b'      "modelUrl": "a.mar"\n    }\n  ]\n}\n'
    )
    for query, token, names in [
        ("", None, "abc"),
        ("?limit=2&next_page_token=1", "3", "bc"),  # a page that ends where the list does still has a token
        ("?limit=3&next_page_token=1", None, "bc"),
        ("?limit=0", "0", ""),
        ("?limit=-5&next_page_token=-3", None, "abc"),
        ("?limit=101", None, "abc"),
        ("?limit=dd&next_page_token=x", None, "abc"),
        ("?next_page_token=50", None, ""),
        ("?limit=1&limit=2", "1", "a"),
    ]:
        page = json.loads(app("GET", f"/models{query}").body)
        assert page.get("nextPageToken") == token, query
        assert "".join(model["modelName"] for model in page["models"]) == names, query


def test_an_empty_list(management) -> None:
    assert management()("GET", "/models").body == b'{\n  "models": []\n}\n'


def test_register_without_workers(management) -> None:
    response = management()("POST", "/models?url=m.mar")
    assert parse_status(response) == (
        200,
        'Model "m" Version: 1.0 registered with 0 initial workers. Use scale workers API to add workers for the model.',  # noqa: E501
    )


@pytest.mark.parametrize(
    ("query", "state", "expected"),
    [
        ("&initial_workers=2", "done", (200, 'Model "m" Version: 1.0 registered with 2 initial workers')),
        ("&initial_workers=2&synchronous=false", "done", PROGRESS),
        ("&initial_workers=2", "partial", PARTIAL),
    ],
)
def test_register_with_workers(management, query: str, state: str, expected: tuple[int, str]) -> None:
    app = management()
    app.control_api.state = state
    assert parse_status(app("POST", f"/models?url=m.mar{query}")) == expected


EVERYTHING = Registration(
    "m.mar",
    model_name="n",
    handler="h.py",
    task="ner",
    runtime="python3",
    batch_size=4,
    max_batch_delay=5,
    initial_workers=1,
    response_timeout=6,
    startup_timeout=7,
    wait=False,
    s3_sse_kms=True,
    sha256="ab",
    trusted=True,
    id="mine",
)


@pytest.mark.parametrize(
    ("query", "body", "content_type"),
    [
        (
            "?url=m.mar&model_name=n&handler=h.py&task=ner&runtime=python3&batch_size=4&max_batch_delay=5&initial_workers=1"
            "&response_timeout=6&startup_timeout=7&synchronous=False&s3_sse_kms=true&registration=mine"
            "&sha256=ab&trusted=true&unknown=1",
            b"",
            None,
        ),
        (
            "?batch_size=9",
            b'{"url": "m.mar", "model_name": "n", "handler": "h.py", "task": "ner", "runtime": "python3",'
            b'"batch_size": 4,'
            b'"max_batch_delay": "5", "initial_workers": 1.0, "response_timeout": 6, "startup_timeout": 7,'
            b'"synchronous": false, "s3_sse_kms": true, "sha256": "ab", "trusted": true,'
            b'"registration": "mine", "unknown": {}}',
            "application/json; charset=utf-8",
        ),
        (
            "?url=m.mar&handler=h.py",
            b"model_name=n&task=ner&runtime=python3&batch_size=4&max_batch_delay=5&initial_workers=%2B1&response_timeout=6"
            b"&startup_timeout=7&synchronous=false&s3_sse_kms=true&registration=mine&sha256=ab&trusted=true",
            "application/x-www-form-urlencoded",
        ),
    ],
    ids=["query", "json", "form"],
)
def test_register_reads_every_parameter(
    management, query: str, body: bytes, content_type: str | None
) -> None:
    app = management()
    headers = {"Content-Type": content_type} if content_type else {}
    assert app("POST", f"/models{query}", body, headers).status == 202
    assert app.control_api.operations == [("register", EVERYTHING)]


@pytest.mark.parametrize("value", ["dd", "", "1_0", " 1", "1.5", "١"])
def test_invalid_number_is_ignored(management, value: str) -> None:
    app = management()
    assert app("POST", f"/models?url=m.mar&batch_size={value}").status == 200
    assert app.control_api.operations == [("register", Registration("m.mar"))]


@pytest.mark.parametrize("value", ["2147483648", "9" * 5000])
def test_a_number_beyond_its_limit_is_refused(management, value: str) -> None:
    app = management()
    response = app("POST", f"/models?url=m.mar&batch_size={value}")
    assert response.status == 400 and app.control_api.operations == []
    assert "at most 10000 is allowed" in json.loads(response.body)["message"]


def test_json_null_is_ignored(management) -> None:
    app = management()
    body = b'{"url": "m.mar", "batch_size": null, "handler": null, "synchronous": null}'
    assert app("POST", "/models", body, {"Content-Type": "application/json"}).status == 200
    assert app.control_api.operations == [("register", Registration("m.mar"))]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"url": ', "The body is not JSON"),
        (b"{", "The body is not JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"url": "m.mar", "batch_size": "dd"}', 'batch_size must be an integer, and is "dd"'),
        (b'{"url": "m.mar", "batch_size": 1.5}', "batch_size must be an integer, and is 1.5"),
        (b'{"url": "m.mar", "batch_size": true}', "batch_size must be an integer, and is true"),
        (b'{"url": ["m.mar"]}', 'url must be text, and is ["m.mar"]'),
    ],
)
def test_malformed_json_is_refused(management, body: bytes, says: str) -> None:
    response = management()("POST", "/models", body, {"Content-Type": "application/json"})
    status, kind, message = parse_error(response)
    assert (status, kind) == (400, "JsonSyntaxException")
    assert says in message


@pytest.mark.parametrize(("error", "status"), [(StartFailed, 500), (StartOutOfMemory, 507)])
def test_failed_registration_has_the_reason(management, error: type, status: int) -> None:
    app = management()
    app.control_api.error = error("m", "1.0", "Traceback: no module named foo")
    response = app("POST", "/models?url=m.mar&initial_workers=1")
    assert json.loads(response.body) == {
        "code": status,
        "type": "InternalServerException",
        "message": "Failed to start workers for model m version: 1.0",
        "detail": "Traceback: no module named foo",
    }


def test_pending_change_is_reported(management) -> None:
    app = management()
    app.control_api.error = InProgress("Stored; one gateway has not heard of it yet.")
    response = app("POST", "/models?url=m.mar&initial_workers=1")
    assert parse_status(response) == (202, "Stored; one gateway has not heard of it yet.")
    assert response["x-torchrelay-reason"] == "in_progress"


def test_the_model_api_can_be_off(management) -> None:
    app = management(enable_model_api=False)
    app.control_api.put(make_spec())
    not_allowed = (
        405,
        "MethodNotAllowedException",
        "Requested method is not allowed, please refer to API document.",
    )
    assert parse_error(app("POST", "/models?url=m.mar")) == not_allowed
    assert parse_error(app("DELETE", "/models/noop")) == not_allowed
    assert app("GET", "/models/noop").status == 200
    assert app("PUT", "/models/noop").status == 202


def test_set_default(management) -> None:
    app = management()
    app.control_api.put(make_spec(version="1.0"))
    app.control_api.put(make_spec(version="2.0"))
    assert parse_status(app("PUT", "/models/noop/2.0/set-default/")) == (
        200,
        'Default version successfully updated for model "noop" to "2.0"',
    )
    assert app.control_api.defaults["noop"] == "2.0"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_only_put_sets_a_default(management, method: str) -> None:
    app = management()
    app.control_api.put(make_spec(version="1.0"))
    app.control_api.put(make_spec(version="2.0"))
    assert app(method, "/models/noop/2.0/set-default").status == 405
    assert set(app.control_api.specs["noop"]) == {"1.0", "2.0"}


def test_unregister(management) -> None:
    app = management()
    app.control_api.put(make_spec(version="1.0"))
    app.control_api.put(make_spec(version="2.0"))
    assert parse_status(app("DELETE", "/models/noop/2.0")) == (200, 'Model "noop" unregistered')
    assert parse_status(app("DELETE", "/models/noop?synchronous=true&timeout=1")) == (
        200,
        'Model "noop" unregistered',
    )
    assert parse_error(app("DELETE", "/models/noop"))[2] == "Model not found: noop"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/models"),
        ("DELETE", "/models"),
        ("POST", "/models/noop"),
        ("POST", "/v1/models/noop"),
        ("HEAD", "/models"),
        ("POST", "/models/noop/events"),
        ("OPTIONS", "/workflows"),
        ("GET", "/"),
    ],
)
def test_methods_that_are_not_allowed(management, method: str, path: str) -> None:
    assert management()(method, path).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/x/m/1.0/set-default",
        "/models/m/1.0/other",
        "/models/m/1/2/3",
        "/models//1.0",
        "/models/m/traffic\n",
        "/models/m/rollout/other",
        "/v1/models",
        "/workflows/w/1.0/other",
    ],
)
def test_unknown_routes_are_refused(management, path: str) -> None:
    assert management()("PUT", path).status == 404


@pytest.mark.parametrize(("workers", "ready"), [((WORKER,), True), ((), False)])
def test_kserve_readiness(management, workers: tuple, ready: bool) -> None:
    app = management()
    app.control_api.put(make_spec(), *workers)
    body = b'{\n  "name": "noop",\n  "ready": %s\n}\n' % json.dumps(ready).encode()
    assert app("GET", "/v1/models/noop").body == body


def test_control_api_error_is_returned(management) -> None:
    app = management()
    app.control_api.error = BadRequest("Invalid RuntimeType value: perl")
    assert parse_error(app("POST", "/models?url=m.mar&initial_workers=1")) == (
        400,
        "BadRequestException",
        "Invalid RuntimeType value: perl",
    )


def test_registration_names_the_ref_of_the_progress(management) -> None:
    app = management()
    assert parse_status(app("POST", "/models?url=m-3.5.mar&initial_workers=1"))[1] == (
        'Model "m" Version: 3.5 registered with 1 initial workers'
    )
    assert app.control_api.specs["m"]["3.5"].ref == ModelRef("m", "3.5")


def test_a_registration_ends_with_what_else_there_is() -> None:
    done = ScalingProgress(ModelRef("m", "1.0"), 1, "done", (1, 4), advice="It can more")
    begun = "autoscaling holds between 1 and 4 workers from now on"
    assert describe_registration(done) == (
        200,
        f'Model "m" Version: 1.0 registered with 1 initial workers; {begun}. It can more',
    )
    under_way = ScalingProgress(ModelRef("m", "1.0"), 0, "processing", advice="It can more")
    assert describe_registration(under_way) == (202, "Processing worker updates. It can more")


def test_the_task_of_a_folder_is_described(management) -> None:
    app = management()
    app.control_api.put(make_spec(config={"task": "text-generation"}))
    assert json.loads(app("GET", "/models/noop").body)[0]["task"] == "text-generation"


def test_autoscaling_is_shown_where_it_holds(management) -> None:
    app = management()
    app.control_api.put(make_spec(min_workers=0, max_workers=4, batch_size=8), phase="idle")
    [shown] = json.loads(app("GET", "/models/noop").body)
    assert (shown["minWorkers"], shown["maxWorkers"], shown["workers"]) == (0, 4, [])
    assert shown["autoscaling"] == {
        "policy": "requests",
        "target_ongoing_requests": 16.0,
        "upscale_delay_s": 3.0,
        "downscale_delay_s": 60.0,
        "downscale_to_zero_delay_s": 300.0,
        "look_back_period_s": 10.0,
    }
    assert json.loads(app("GET", "/v1/models/noop").body) == {"name": "noop", "ready": True}
    app.control_api.put(make_spec(version="2.0", min_workers=4, max_workers=4))
    assert "autoscaling" not in json.loads(app("GET", "/models/noop/2.0").body)[0]
