from __future__ import annotations

import pickle

import pytest

from handlers.context import SERVER_VERSION, Context
from handlers.errors import PredictionException


@pytest.fixture
def context() -> Context:
    context = Context("digits", "/models/digits", {"model": {}}, batch_size=4)
    context.begin(
        ["a", "b"],
        [
            {"X-User": "ann", "explain": "True", "ts_request_sequence_id": "s1"},
            {"x-user": "bob", "X-User": "BOB"},
        ],
        [{"data": {"content-type": "image/png"}, "X-User": {"content-type": "text/plain"}}, {}],
    )
    return context


def test_system_properties_have_the_arguments() -> None:
    context = Context("digits", "/models/digits", None, 8, 1, "9.9", False, None, {"handler": {"n": 1}})
    assert context.system_properties == {
        "model_dir": "/models/digits",
        "gpu_id": 1,
        "batch_size": 8,
        "server_name": "MMS",
        "server_version": "9.9",
        "limit_max_image_pixels": False,
    }
    assert context.model_name == "digits" and context.manifest is None
    assert context.model_yaml_config == {"handler": {"n": 1}}


def test_defaults() -> None:
    context = Context("digits", "/models/digits", {})
    properties = context.system_properties
    assert properties["gpu_id"] is None and properties["batch_size"] == 1
    assert properties["limit_max_image_pixels"] is True and properties["server_version"] == SERVER_VERSION
    assert context.model_yaml_config == {}
    assert context.request_ids is None and context.request_processor is None
    assert context.metrics is None and context.stopping_criteria is None and context.cl_socket is None
    assert context.get_request_id() is None


def test_request_ids_are_found_by_row(context: Context) -> None:
    assert context.request_ids == {0: "a", 1: "b"}
    assert context.get_request_id() == "a"
    assert context.get_request_id(1) == "b"
    assert context.get_request_id(2) is None


def test_the_exact_spelling_of_a_header_takes_precedence(context: Context) -> None:
    assert context.get_request_header(1, "X-User") == "BOB"
    assert context.get_request_header(1, "x-user") == "bob"
    assert context.get_request_header(0, "x-USER") == "ann"
    assert context.get_request_header(0, "unknown") is None


def test_all_headers_are_found_in_any_case_and_include_the_inputs(context: Context) -> None:
    headers = context.get_all_request_header(0)
    assert headers["data"] == {"content-type": "image/png"}
    assert headers["X-User"] == "ann", "a request header takes precedence over an input of the same name"
    assert headers["x-user"] == headers.get("X-USER") == "ann" and "x-User" in headers
    assert "x-other" not in headers and headers.get("x-other") is None and headers.get("x-other", 1) == 1
    with pytest.raises(KeyError):
        headers["x-other"]
    assert sorted(headers, key=str.lower).count("X-User") == 1
    headers["x-USER"] = "bob"
    assert dict(headers)["X-User"] == headers.pop("x-user") == "bob" and "X-User" not in headers
    assert context.get_request_header(0, "data") == {"content-type": "image/png"}
    del headers["DATA"]
    assert "data" not in headers


def test_sequence_headers_are_configurable(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert context.get_sequence_id(0) == "s1"
    assert context.get_sequence_id(1) is None
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_ID", "my-id")
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_START", "my-start")
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_END", "my-end")
    renamed = Context("digits", "/models/digits", {})
    keys = renamed.header_key_sequence_id, renamed.header_key_sequence_start, renamed.header_key_sequence_end
    assert keys == ("my-id", "my-start", "my-end")


def test_response_content_type_is_found_in_any_case(context: Context) -> None:
    assert context.get_response_content_type(0) is None
    context.set_response_content_type(0, "image/png")
    assert context.get_response_content_type(0) == "image/png"
    assert context.get_response_content_type(1) is None
    context.set_response_header(1, "Content-Type", "text/csv")
    assert context.get_response_content_type(1) == "text/csv"


def test_response_headers_are_kept_by_row(context: Context) -> None:
    context.set_response_header(1, "X-Took", "3")
    assert context.get_response_headers(0) == {}
    assert context.get_response_headers(1) == {"X-Took": "3"}


def test_response_status_is_kept_by_row(context: Context) -> None:
    assert context.get_response_status(0) == (200, "")
    context.set_response_status(599, "So be it", 1)
    assert context.get_response_status(0) == (200, "")
    assert context.get_response_status(1) == (599, "So be it")
    context.set_all_response_status(202, "Later")
    assert context.get_response_status(0) == context.get_response_status(1) == (202, "Later")
    context.set_response_status(code=404)
    assert context.get_response_status(0) == (404, "")


def test_a_row_has_a_context_of_its_own(context: Context) -> None:
    emitted: list[tuple[int, str]] = []
    headers = [{"x-user": "ann"}, {"x-user": "bob"}]
    context.begin(["a", "b"], headers, [{}, {"data": {"content-type": "b/b"}}], lambda *e: emitted.append(e))
    row = context.row(1)
    assert (row.get_request_id(0), row.get_request_header(0, "X-User")) == ("b", "bob")
    assert row.get_request_header(0, "data") == {"content-type": "b/b"}
    assert row.request_processor is not None and len(row.request_processor) == 1
    row.set_response_status(422, "no", 0)
    row.set_response_header(0, "x-a", "1")
    row.emit(0, "chunk")
    assert [context.get_response_status(index) for index in (0, 1)] == [(200, ""), (422, "no")]
    assert context.get_response_headers(1) == {"x-a": "1"} and emitted == [(1, "chunk")]


def test_begin_clears_the_previous_batch(context: Context) -> None:
    context.set_response_status(500, "No", 0)
    context.set_response_header(0, "X-Took", "3")
    context.stopping_criteria = [print]
    context.cache = {"a": 1}
    context.begin(["c"], [{}], [{}])
    assert context.request_ids == {0: "c"}
    assert context.get_response_status(0) == (200, "") and context.get_response_headers(0) == {}
    assert context.get_request_header(0, "explain") is None
    assert context.stopping_criteria is None
    assert context.cache == {"a": 1}, "the author's own attributes are kept"


def test_requests_are_unavailable_before_the_first_batch() -> None:
    context = Context("digits", "/models/digits", {})
    context.set_response_status(500, "No")
    context.set_all_response_status(500, "No")
    with pytest.raises(RuntimeError, match="no requests yet"):
        context.get_request_header(0, "explain")
    with pytest.raises(RuntimeError, match="no batch is open"):
        context.emit(0, "a")


def test_the_request_processor_has_torchserves_methods(context: Context) -> None:
    row = context.request_processor[0]
    row.report_status(418, "Teapot")
    row.add_response_property("X-A", "1")
    assert (row.get_response_status_code(), row.get_response_status_phrase()) == (418, "Teapot")
    assert row.get_response_headers() == {"X-A": "1"} and row.get_response_header("X-A") == "1"
    assert row.get_request_property("explain") == "True" == row.get_request_properties()["explain"]


def test_prediction_exceptions_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(PredictionException("No such user", 404)))
    assert (error.message, error.error_code, str(error)) == ("No such user", 404, "No such user : 404")
    assert PredictionException("Oh").error_code == 500


def test_a_batch_is_cancelled_when_all_its_rows_are(context: Context) -> None:
    assert not context.cancelled and not context.row(0).cancelled
    left = {1}
    context.begin(["a", "b"], [{}] * 2, [{}] * 2, None, left.__contains__)
    assert [context.cancelled, context.row(0).cancelled, context.row(1).cancelled] == [False, False, True]
    assert context.select([1, 1]).cancelled
    left.add(0)
    assert context.cancelled
    context.begin(["a"], [{}], [{}])
    assert not context.cancelled
