"""Changes of the number of workers over TorchServe's REST management API."""

from __future__ import annotations

import json

import pytest

from serve_app.errors import StartFailed
from tests.support.torchserve_management import PARTIAL, PROGRESS, make_spec, parse_error, parse_status


@pytest.mark.parametrize(
    ("path", "requested", "state", "expected"),
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
        (f"/models/noop?min_worker={'0' * 5000}7", ("noop", None, 7, 7, False), "done", PROGRESS),
        (f"/models/noop?min_worker=%2B{'0' * 200}2", ("noop", None, 2, 2, False), "done", PROGRESS),
        ("/models/noop?min_worker=x&max_worker=y", ("noop", None, 1, 1, False), "done", PROGRESS),
    ],
)
def test_scale(management, path: str, requested: tuple, state: str, expected: tuple[int, str]) -> None:
    app = management()
    app.control_api.put(make_spec())
    app.control_api.state = state
    assert parse_status(app("PUT", path)) == expected
    assert app.control_api.operations == [("scale", *requested)]


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (
            b"min_worker=2&max_worker=3&synchronous=true&model_version=1.11",
            "application/x-www-form-urlencoded",
        ),
        (
            b'{"min_worker": 2, "max_worker": "3", "synchronous": true, "model_version": "1.11", "timeout": -1}',  # noqa: E501
            "application/json",
        ),
    ],
    ids=["form", "json"],
)
def test_scale_reads_its_body(management, body: bytes, content_type: str) -> None:
    app = management()
    app.control_api.put(make_spec())
    response = app("PUT", "/models/noop?min_worker=9", body, {"Content-Type": content_type})
    assert parse_status(response) == (200, "Workers scaled to 2 for model: noop, version: 1.11")
    assert app.control_api.operations == [("scale", "noop", "1.11", 2, 3, True)]


def test_a_scale_whose_body_cannot_be_read(management) -> None:
    app = management()
    app.control_api.put(make_spec())
    response = app("PUT", "/models/noop", b'{"min_worker": "many"}', {"Content-Type": "application/json"})
    assert parse_error(response) == (
        400,
        "JsonSyntaxException",
        'min_worker must be an integer, and is "many".',
    )
    assert app.control_api.operations == []


def test_scales_that_are_refused(management) -> None:
    app = management()
    app.control_api.put(make_spec())
    assert parse_error(app("PUT", "/models/noop?min_worker=2&max_worker=1")) == (
        400,
        "BadRequestException",
        "max_worker cannot be less than min_worker.",
    )
    assert parse_error(app("PUT", "/models/noop?min_worker=-1"))[:2] == (400, "BadRequestException")
    assert parse_error(app("PUT", "/models/none"))[2] == "Model not found: none"
    assert parse_error(app("PUT", "/models/noop/9"))[2] == "Model version: 9 does not exist for model: noop"


@pytest.mark.parametrize(("path", "shown"), [("/models/noop", "null"), ("/models/noop/1.11", "1.11")])
def test_a_failed_scale_names_the_version_only_where_the_caller_did(
    management, path: str, shown: str
) -> None:
    app = management()
    app.control_api.put(make_spec())
    app.control_api.error = StartFailed("noop", "1.11", "Traceback")
    response = app("PUT", f"{path}?synchronous=true")
    assert parse_error(response)[2] == f"Failed to start workers for model noop version: {shown}"
    assert json.loads(response.body)["detail"] == "Traceback"


def test_two_worker_counts_configure_autoscaling(management) -> None:
    app = management()
    app.control_api.put(make_spec(min_workers=1, max_workers=1))
    app.control_api.bounds = (1, 4)
    more = "upscale_delay_s=0.5&autoscaling_policy=latency&target_p95_ms=80&unknown=1"
    begun = "autoscaling holds between 1 and 4 workers from now on"
    response = app("PUT", f"/models/noop?min_worker=1&max_worker=4&synchronous=true&{more}")
    assert parse_status(response) == (200, f"Workers scaled to 1 for model: noop; {begun}")
    requested = {"upscale_delay_s": "0.5", "policy": "latency", "target_p95_ms": "80"}
    assert app.control_api.operations.pop() == ("scale", "noop", None, 1, 4, True, requested)
    body = b'{"min_worker": 1, "max_worker": 4, "target_ongoing_requests": 2.5}'
    response = app("PUT", "/models/noop/1.11", body, {"Content-Type": "application/json"})
    assert parse_status(response) == (202, f"Processing worker updates...; {begun}")
    assert app.control_api.operations.pop() == (
        "scale",
        "noop",
        "1.11",
        1,
        4,
        False,
        {"target_ongoing_requests": "2.5"},
    )
    # Without a word on how many: as many as before.
    response = app("PUT", "/models/noop?downscale_delay_s=9&synchronous=true")
    assert parse_status(response) == (200, f"Workers scaled to 1 for model: noop; {begun}")
    assert app.control_api.operations.pop() == (
        "scale",
        "noop",
        None,
        None,
        None,
        True,
        {"downscale_delay_s": "9"},
    )


def test_a_query_is_a_parameter_of_autoscaling(management) -> None:
    app = management()
    app.control_api.put(make_spec(min_workers=1, max_workers=4))
    more = "autoscaling_policy=prometheus&autoscaling_query=sum(jobs)&target_value=10"
    assert app("PUT", f"/models/noop?{more}").status == 202
    requested = {"policy": "prometheus", "query": "sum(jobs)", "target_value": "10"}
    assert app.control_api.operations.pop()[-1] == requested


def test_a_program_sets_the_number_of_workers(management) -> None:
    app = management()
    app.control_api.put(make_spec())
    requests = []

    async def set_replicas(*request):
        requests.append(request)
        return {"replicas": 3, "running": 1, "min": 1, "max": 4}

    app.control_api.set_replicas = set_replicas
    for path, version in (("/models/noop/replicas", None), ("/models/noop/1.11/replicas", "1.11")):
        response = app("PUT", path, b'{"replicas": 3}')
        assert (response.status, json.loads(response.body)["running"]) == (200, 1)
        assert requests.pop() == ("noop", version, 3)
    for body in (b"", b"{", b"[]", b'{"replicas": -1}', b'{"replicas": "x"}', b'{"workers": 1}'):
        assert app("PUT", "/models/noop/replicas", body).status == 400, body
    assert requests == []


def test_one_worker_count_reports_the_end_of_autoscaling(management) -> None:
    app = management()
    app.control_api.put(make_spec(min_workers=1, max_workers=4))
    app.control_api.previous_bounds = (1, 4)
    sentence = "Workers scaled to 2 for model: noop; autoscaling between 1 and 4 workers is off from now on"
    assert parse_status(app("PUT", "/models/noop?min_worker=2&synchronous=true")) == (200, sentence)
