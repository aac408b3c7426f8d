"""The management API as a TorchServe client sees it."""

from __future__ import annotations

import json

import pytest

from serve_app.doors.torchserve.management import registered
from serve_app.errors import BadRequest, NotYet, NoWorker, StartFailed, StartOutOfMemory
from serve_app.types import ModelRef, ModelSpec, Progress, Registration, Worker

FULL = b"""[
  {
    "modelName": "noop",
    "modelVersion": "1.11",
    "modelUrl": "noop.mar",
    "runtime": "python",
    "minWorkers": 1,
    "maxWorkers": 1,
    "batchSize": 1,
    "maxBatchDelay": 100,
    "responseTimeout": 120,
    "startupTimeout": 120,
    "maxRetryTimeoutInSec": 300,
    "clientTimeoutInMills": 0,
    "parallelType": "",
    "parallelLevel": 0,
    "deviceType": "gpu",
    "deviceIds": [
      0
    ],
    "continuousBatching": false,
    "useJobTicket": false,
    "useVenv": false,
    "stateful": false,
    "sequenceMaxIdleMSec": 0,
    "sequenceTimeoutMSec": 0,
    "maxNumSequence": 0,
    "maxSequenceJobQueueSize": 0,
    "loadedAtStartup": false,
    "workers": [
      {
        "id": "9000",
        "startTime": "2018-10-02T13:44:53.034Z",
        "status": "READY",
        "memoryUsage": 89247744,
        "pid": 98972,
        "gpu": false,
        "gpuUsage": "N/A"
      }
    ],
    "jobQueueStatus": {
      "remainingCapacity": 100,
      "pendingRequests": 0
    },
    "customizedMetadata": {
      "data1": "1",
      "data2": "2"
    }
  }
]
"""
WORKER = Worker("9000", 98972, 1538487893.034, True, 89247744)
PROGRESS = (202, "Processing worker updates...")
PARTIAL = (206, "Workers scaling in progress...")


def spec(name: str = "noop", version: str = "1.11", **more) -> ModelSpec:
    return ModelSpec(name, version, f"{name}.mar", "sha256", "archive", **more)


def said(answer) -> tuple[int, str]:
    """The status and the sentence; the body is exactly TorchServe's."""
    sentence = json.loads(answer.body)["status"]
    assert answer.body == b'{\n  "status": %s\n}\n' % json.dumps(sentence).encode()
    assert answer["content-type"] == "application/json"
    return answer.status, sentence


def refused(answer) -> tuple[int, str, str]:
    body = json.loads(answer.body)
    assert body["code"] == answer.status
    return answer.status, body["type"], body["message"]


def test_describe_to_the_byte(management) -> None:
    app = management()
    app.shelf.put(spec(min_workers=1, max_workers=1, device_type="gpu", device_ids=(0,)), WORKER)
    app.shelf.said = {"data1": "1", "data2": "2"}
    answer = app("GET", "/models/noop?customized=true")
    assert (answer.status, answer.body) == (200, FULL)
    assert answer["pragma"] == "no-cache"


def test_describe_says_what_the_models_own_file_does(management) -> None:
    app = management()
    told = spec(
        parallel_type="custom",
        parallel_level=2,
        continuous_batching=True,
        use_job_ticket=True,
        use_venv=True,
        sequence_batching=True,
        sequence_max_idle=3,
        sequence_timeout=4,
        max_num_sequence=5,
        max_sequence_job_queue_size=6,
    )
    app.shelf.put(told)
    [model] = json.loads(app("GET", "/models/noop").body)
    assert (model["parallelType"], model["parallelLevel"]) == ("custom", 2)
    flags = ("continuousBatching", "useJobTicket", "useVenv", "stateful")
    assert [model[key] for key in flags] == [True] * 4
    numbers = ("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize")
    assert [model[key] for key in numbers] == [3, 4, 5, 6]


def test_describe_leaves_out_what_is_not_there(management) -> None:
    app = management()
    app.shelf.put(spec())
    [model] = json.loads(app("GET", "/models/noop").body)
    assert not {"deviceIds", "customizedMetadata", "lastError", "engine"} & set(model)
    assert (model["workers"], model["deviceType"], model["jobQueueStatus"]["remainingCapacity"]) == ([], "cpu", 100)


def test_describe_tells_the_last_error_and_what_was_asked_for(management) -> None:
    app = management()
    gpu = Worker("w1", 1, 0.0, False, 5, "0,1")
    app.shelf.put(spec(max_batch_delay=0, num_gpus=1.0), gpu, last_error="Traceback: no module named foo")
    [model] = json.loads(app("GET", "/models/noop/1.11").body)
    assert list(model)[-1] == "lastError"
    assert (model["lastError"], model["maxBatchDelay"]) == ("Traceback: no module named foo", 0)
    assert model["deviceType"] == "gpu"
    assert model["workers"][0] == {
        "id": "w1",
        "startTime": "1970-01-01T00:00:00.000Z",
        "status": "UNLOADING",
        "memoryUsage": 5,
        "pid": 1,
        "gpu": True,
        "gpuUsage": "gpuId::0,1",
    }


def test_describe_all_versions(management) -> None:
    app = management()
    app.shelf.put(spec(version="1.0"))
    app.shelf.put(spec(version="2.0"))
    app.shelf.said = {"asked": "never"}
    found = json.loads(app("GET", "/models/noop/all?customized=true").body)
    assert [model["modelVersion"] for model in found] == ["1.0", "2.0"]
    assert "customizedMetadata" not in found[0]
    assert refused(app("GET", "/models/none/all"))[2] == "Model not found: none"


@pytest.mark.parametrize(("metadata", "shown"), [("text", {}), ([1], {}), ({}, {})])
def test_metadata_is_an_object_or_empty(management, metadata: object, shown: dict) -> None:
    app = management()
    app.shelf.put(spec())
    app.shelf.said = metadata
    assert json.loads(app("GET", "/models/noop/1.11?customized=TRUE").body)[0]["customizedMetadata"] == shown


def test_metadata_needs_a_worker(management) -> None:
    app = management()
    app.shelf.put(spec())
    app.shelf.said = NoWorker("noop", None, "")
    assert refused(app("GET", "/models/noop?customized=true")) == (
        503,
        "ServiceUnavailableException",
        'Model "noop" has no worker to serve describe request. Please use scale workers API to add workers.',
    )


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/models/none", "ModelNotFoundException", "Model not found: none"),
        ("/models/noop/9", "ModelVersionNotFoundException", "Model version: 9 does not exist for model: noop"),
        ("/v1/models/none", "ModelNotFoundException", "Model not found: none"),
        (
            "/ping",
            "ResourceNotFoundException",
            "Requested resource is not found, please refer to API document.",
        ),
    ],
)
def test_nothing_there(management, path: str, kind: str, message: str) -> None:
    app = management()
    app.shelf.put(spec())
    assert refused(app("GET", path)) == (404, kind, message)


def test_list_pages_as_torchserve_does(management) -> None:
    app = management()
    for name in ("c", "a", "b"):
        app.shelf.put(spec(name))
    answer = app("GET", "/models?limit=1")
    assert answer.body == (
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
    answer = management()("POST", "/models?url=m.mar")
    assert said(answer) == (
        200,
        'Model "m" Version: 1.0 registered with 0 initial workers. Use scale workers API to add workers for the model.',
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
    app.shelf.state = state
    assert said(app("POST", f"/models?url=m.mar{query}")) == expected


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
    id="mine",
)


@pytest.mark.parametrize(
    ("query", "body", "content_type"),
    [
        (
            "?url=m.mar&model_name=n&handler=h.py&task=ner&runtime=python3&batch_size=4&max_batch_delay=5&initial_workers=1"
            "&response_timeout=6&startup_timeout=7&synchronous=False&s3_sse_kms=true&registration=mine&unknown=1",
            b"",
            None,
        ),
        (
            "?batch_size=9",
            b'{"url": "m.mar", "model_name": "n", "handler": "h.py", "task": "ner", "runtime": "python3",'
            b'"batch_size": 4,'
            b'"max_batch_delay": "5", "initial_workers": 1.0, "response_timeout": 6, "startup_timeout": 7,'
            b'"synchronous": false, "s3_sse_kms": true, "registration": "mine", "unknown": {}}',
            "application/json; charset=utf-8",
        ),
        (
            "?url=m.mar&handler=h.py",
            b"model_name=n&task=ner&runtime=python3&batch_size=4&max_batch_delay=5&initial_workers=%2B1&response_timeout=6"
            b"&startup_timeout=7&synchronous=false&s3_sse_kms=true&registration=mine",
            "application/x-www-form-urlencoded",
        ),
    ],
    ids=["query", "json", "form"],
)
def test_register_reads_every_parameter(management, query: str, body: bytes, content_type: str | None) -> None:
    app = management()
    headers = {"Content-Type": content_type} if content_type else {}
    assert app("POST", f"/models{query}", body, headers).status == 202
    assert app.shelf.asked == [("register", EVERYTHING)]


@pytest.mark.parametrize("value", ["dd", "", "1_0", " 1", "1.5", "99999999999999999999", "2147483648", "١"])
def test_a_number_that_is_none_says_nothing(management, value: str) -> None:
    app = management()
    assert app("POST", f"/models?url=m.mar&batch_size={value}").status == 200
    assert app.shelf.asked == [("register", Registration("m.mar"))]


def test_a_null_in_json_says_nothing(management) -> None:
    app = management()
    body = b'{"url": "m.mar", "batch_size": null, "handler": null, "synchronous": null}'
    assert app("POST", "/models", body, {"Content-Type": "application/json"}).status == 200
    assert app.shelf.asked == [("register", Registration("m.mar"))]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"url": ', "The body is not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"url": "m.mar", "batch_size": "dd"}', 'batch_size must be an integer, and is "dd"'),
        (b'{"url": "m.mar", "batch_size": 1.5}', "batch_size must be an integer, and is 1.5"),
        (b'{"url": "m.mar", "batch_size": true}', "batch_size must be an integer, and is true"),
        (b'{"url": ["m.mar"]}', 'url must be text, and is ["m.mar"]'),
    ],
)
def test_json_that_cannot_be_read(management, body: bytes, says: str) -> None:
    answer = management()("POST", "/models", body, {"Content-Type": "application/json"})
    status, kind, message = refused(answer)
    assert (status, kind) == (400, "JsonSyntaxException")
    assert says in message


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", (400, "BadRequestException", "Parameter url is required.")),
        ("?url=", (404, "ModelNotFoundException", "empty url")),
        (
            "?url=noop-1.11.mar",
            (409, "ConflictStatusException", "Model version 1.11 is already registered for model noop"),
        ),
    ],
)
def test_registrations_that_are_refused(management, query: str, expected: tuple[int, str, str]) -> None:
    app = management()
    app.shelf.put(spec())
    assert refused(app("POST", f"/models{query}")) == expected


@pytest.mark.parametrize(("error", "status"), [(StartFailed, 500), (StartOutOfMemory, 507)])
def test_a_registration_whose_workers_fail_tells_why(management, error: type, status: int) -> None:
    app = management()
    app.shelf.fails = error("m", "1.0", "Traceback: no module named foo")
    answer = app("POST", "/models?url=m.mar&initial_workers=1")
    assert json.loads(answer.body) == {
        "code": status,
        "type": "InternalServerException",
        "message": "Failed to start workers for model m version: 1.0",
        "detail": "Traceback: no module named foo",
    }


def test_a_change_that_is_not_everywhere_yet_says_so(management) -> None:
    app = management()
    app.shelf.fails = NotYet("Stored; one gateway has not heard of it yet.")
    answer = app("POST", "/models?url=m.mar&initial_workers=1")
    assert said(answer) == (202, "Stored; one gateway has not heard of it yet.")
    assert answer["x-torchrelay-reason"] == "in_progress"


def test_the_model_api_can_be_off(management) -> None:
    app = management(enable_model_api=False)
    app.shelf.put(spec())
    not_allowed = (405, "MethodNotAllowedException", "Requested method is not allowed, please refer to API document.")
    assert refused(app("POST", "/models?url=m.mar")) == not_allowed
    assert refused(app("DELETE", "/models/noop")) == not_allowed
    assert app("GET", "/models/noop").status == 200
    assert app("PUT", "/models/noop").status == 202


@pytest.mark.parametrize(
    ("path", "asked", "state", "expected"),
    [
        ("/models/noop", ("noop", None, 1, 1, False), "done", PROGRESS),
        ("/models/noop?min_worker=3", ("noop", None, 3, 3, False), "done", PROGRESS),
        (
            "/models/noop?min_worker=2&max_worker=4&synchronous=true&number_gpu=1&timeout=9",
            ("noop", None, 2, 4, True),
            "done",
            (200, "Workers scaled to 2 for model: noop"),
        ),
        (
            "/models/noop/1.11?min_worker=2&synchronous=TRUE",
            ("noop", "1.11", 2, 2, True),
            "done",
            (200, "Workers scaled to 2 for model: noop, version: 1.11"),
        ),
        (
            "/models/noop?model_version=1.11&min_worker=0&synchronous=true",
            ("noop", "1.11", 0, 0, True),
            "done",
            (200, "Workers scaled to 0 for model: noop, version: 1.11"),
        ),
        ("/models/noop?synchronous=true", ("noop", None, 1, 1, True), "partial", PARTIAL),
        ("/models/noop?min_worker=x&max_worker=y", ("noop", None, 1, 1, False), "done", PROGRESS),
    ],
)
def test_scale(management, path: str, asked: tuple, state: str, expected: tuple[int, str]) -> None:
    app = management()
    app.shelf.put(spec())
    app.shelf.state = state
    assert said(app("PUT", path)) == expected
    assert app.shelf.asked == [("scale", *asked)]


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"min_worker=2&max_worker=3&synchronous=true&model_version=1.11", "application/x-www-form-urlencoded"),
        (
            b'{"min_worker": 2, "max_worker": "3", "synchronous": true, "model_version": "1.11", "timeout": -1}',
            "application/json",
        ),
    ],
    ids=["form", "json"],
)
def test_scale_reads_its_body(management, body: bytes, content_type: str) -> None:
    app = management()
    app.shelf.put(spec())
    answer = app("PUT", "/models/noop?min_worker=9", body, {"Content-Type": content_type})
    assert said(answer) == (200, "Workers scaled to 2 for model: noop, version: 1.11")
    assert app.shelf.asked == [("scale", "noop", "1.11", 2, 3, True)]


def test_a_scale_whose_body_cannot_be_read(management) -> None:
    app = management()
    app.shelf.put(spec())
    answer = app("PUT", "/models/noop", b'{"min_worker": "many"}', {"Content-Type": "application/json"})
    assert refused(answer) == (400, "JsonSyntaxException", 'min_worker must be an integer, and is "many".')
    assert app.shelf.asked == []


def test_scales_that_are_refused(management) -> None:
    app = management()
    app.shelf.put(spec())
    assert refused(app("PUT", "/models/noop?min_worker=2&max_worker=1")) == (
        400,
        "BadRequestException",
        "max_worker cannot be less than min_worker.",
    )
    assert refused(app("PUT", "/models/noop?min_worker=-1"))[:2] == (400, "BadRequestException")
    assert refused(app("PUT", "/models/none"))[2] == "Model not found: none"
    assert refused(app("PUT", "/models/noop/9"))[2] == "Model version: 9 does not exist for model: noop"


@pytest.mark.parametrize(("path", "shown"), [("/models/noop", "null"), ("/models/noop/1.11", "1.11")])
def test_a_failed_scale_names_the_version_only_where_the_caller_did(management, path: str, shown: str) -> None:
    app = management()
    app.shelf.put(spec())
    app.shelf.fails = StartFailed("noop", "1.11", "Traceback")
    answer = app("PUT", f"{path}?synchronous=true")
    assert refused(answer)[2] == f"Failed to start workers for model noop version: {shown}"
    assert json.loads(answer.body)["detail"] == "Traceback"


def test_set_default(management) -> None:
    app = management()
    app.shelf.put(spec(version="1.0"))
    app.shelf.put(spec(version="2.0"))
    assert said(app("PUT", "/models/noop/2.0/set-default/")) == (
        200,
        'Default version successfully updated for model "noop" to "2.0"',
    )
    assert app.shelf.defaults["noop"] == "2.0"
    assert refused(app("PUT", "/models/noop/9/set-default")) == (
        404,
        "ModelVersionNotFoundException",
        "Model version 9 does not exist for model noop",
    )
    assert refused(app("PUT", "/models/none/1/set-default"))[2] == "Model not found: none"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_only_put_sets_a_default(management, method: str) -> None:
    app = management()
    app.shelf.put(spec(version="1.0"))
    app.shelf.put(spec(version="2.0"))
    assert app(method, "/models/noop/2.0/set-default").status == 405
    assert set(app.shelf.specs["noop"]) == {"1.0", "2.0"}


def test_unregister(management) -> None:
    app = management()
    app.shelf.put(spec(version="1.0"))
    app.shelf.put(spec(version="2.0"))
    assert refused(app("DELETE", "/models/noop/1.0")) == (
        403,
        "InvalidModelVersionException",
        "Cannot remove default version for model noop",
    )
    assert said(app("DELETE", "/models/noop/2.0")) == (200, 'Model "noop" unregistered')
    assert said(app("DELETE", "/models/noop?synchronous=true&timeout=1")) == (200, 'Model "noop" unregistered')
    assert refused(app("DELETE", "/models/noop"))[2] == "Model not found: noop"


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/models"), ("DELETE", "/models"), ("POST", "/models/noop"), ("POST", "/v1/models/noop"), ("GET", "/")],
)
def test_methods_that_are_not_allowed(management, method: str, path: str) -> None:
    assert management()(method, path).status == 405


@pytest.mark.parametrize("path", ["/x/m/1.0/set-default", "/models/m/1.0/other", "/models/m/1/2/3", "/v1/models"])
def test_routes_that_are_not_there(management, path: str) -> None:
    assert management()("PUT", path).status == 404


@pytest.mark.parametrize(("workers", "ready"), [((WORKER,), True), ((), False)])
def test_kserve_readiness(management, workers: tuple, ready: bool) -> None:
    app = management()
    app.shelf.put(spec(), *workers)
    body = b'{\n  "name": "noop",\n  "ready": %s\n}\n' % json.dumps(ready).encode()
    assert app("GET", "/v1/models/noop").body == body


def test_an_error_of_the_keepers_passes_through(management) -> None:
    app = management()
    app.shelf.fails = BadRequest("Invalid RuntimeType value: perl")
    assert refused(app("POST", "/models?url=m.mar&initial_workers=1")) == (
        400,
        "BadRequestException",
        "Invalid RuntimeType value: perl",
    )


def test_the_ref_of_a_progress_is_what_is_said(management) -> None:
    app = management()
    assert said(app("POST", "/models?url=m-3.5.mar&initial_workers=1"))[1] == (
        'Model "m" Version: 3.5 registered with 1 initial workers'
    )
    assert app.shelf.specs["m"]["3.5"].ref == ModelRef("m", "3.5")


def test_two_numbers_of_workers_are_told_how_to_follow_the_load(management) -> None:
    app = management()
    app.shelf.put(spec(min_workers=1, max_workers=1))
    app.shelf.between = (1, 4)
    more = "upscale_delay_s=0.5&autoscaling_policy=latency&target_p95_ms=80&unknown=1"
    begun = "autoscaling holds between 1 and 4 workers from now on"
    answer = app("PUT", f"/models/noop?min_worker=1&max_worker=4&synchronous=true&{more}")
    assert said(answer) == (200, f"Workers scaled to 1 for model: noop; {begun}")
    asked = {"upscale_delay_s": "0.5", "policy": "latency", "target_p95_ms": "80"}
    assert app.shelf.asked.pop() == ("scale", "noop", None, 1, 4, True, asked)
    body = b'{"min_worker": 1, "max_worker": 4, "target_ongoing_requests": 2.5}'
    answer = app("PUT", "/models/noop/1.11", body, {"Content-Type": "application/json"})
    assert said(answer) == (202, f"Processing worker updates...; {begun}")
    assert app.shelf.asked.pop() == ("scale", "noop", "1.11", 1, 4, False, {"target_ongoing_requests": "2.5"})
    # Without a word on how many: as many as before.
    answer = app("PUT", "/models/noop?downscale_delay_s=9&synchronous=true")
    assert said(answer) == (200, f"Workers scaled to 1 for model: noop; {begun}")
    assert app.shelf.asked.pop() == ("scale", "noop", None, None, None, True, {"downscale_delay_s": "9"})


def test_a_number_of_workers_says_what_it_ends(management) -> None:
    app = management()
    app.shelf.put(spec(min_workers=1, max_workers=4))
    app.shelf.was_between = (1, 4)
    sentence = "Workers scaled to 2 for model: noop; autoscaling between 1 and 4 workers is off from now on"
    assert said(app("PUT", "/models/noop?min_worker=2&synchronous=true")) == (200, sentence)


def test_a_registration_ends_with_what_else_there_is() -> None:
    done = Progress(ModelRef("m", "1.0"), 1, "done", (1, 4), advice="It can more")
    begun = "autoscaling holds between 1 and 4 workers from now on"
    assert registered(done) == (200, f'Model "m" Version: 1.0 registered with 1 initial workers; {begun}. It can more')
    under_way = Progress(ModelRef("m", "1.0"), 0, "processing", advice="It can more")
    assert registered(under_way) == (202, "Processing worker updates. It can more")


def test_the_task_of_a_folder_is_described(management) -> None:
    app = management()
    app.shelf.put(spec(config={"task": "text-generation"}))
    assert json.loads(app("GET", "/models/noop").body)[0]["task"] == "text-generation"


def test_autoscaling_is_shown_where_it_holds(management) -> None:
    app = management()
    app.shelf.put(spec(min_workers=0, max_workers=4, batch_size=8), phase="idle")
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
    app.shelf.put(spec(version="2.0", min_workers=4, max_workers=4))
    assert "autoscaling" not in json.loads(app("GET", "/models/noop/2.0").body)[0]
