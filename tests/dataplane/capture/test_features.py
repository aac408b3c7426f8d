"""Features of JSON, tensors, images and text, and of the responses of classifiers."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from serve_app.dataplane.capture.features import find_features
from serve_app.domain import tensors
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart


def features(
    value: Any, output: Any = b"", redact: tuple[str, ...] = (), name: str = "body", kind: str | None = None
) -> dict[str, Any]:
    """Return the features by name; those with several values as lists."""
    body, answer = (v if isinstance(v, bytes) else json.dumps(v).encode() for v in (value, output))
    request = InferenceRequest("m", inputs=(InputPart(name, body, kind),))
    found: dict[str, Any] = {}
    for feature, number in find_features(request, InferenceResponse(answer), redact):
        found[feature] = [*found[feature], number] if feature in found else [number]
    return {feature: values[0] if len(values) == 1 else values for feature, values in found.items()}


def test_numbers_strings_and_booleans_of_a_document() -> None:
    document = {"age": 41, "pet": "cat", "user": {"vip": True}, "empty": None, "big": 10**400}
    assert features(document) == {
        "input.age": 41.0,
        "input.pet": "cat",
        "input.user.vip": "true",
    }


def test_vectors_have_a_feature_for_each_place_up_to_a_bound() -> None:
    assert features([1, 2.5]) == {"input[0]": 1.0, "input[1]": 2.5}
    assert features(list(range(17))) == {
        "input.mean": 8.0,
        "input.std": pytest.approx(np.arange(17).std()),
        "input.length": 17.0,
    }


def test_rows_share_their_names() -> None:
    assert features({"instances": [{"x": 1}, {"x": 2}]}) == {"input.instances[].x": [1.0, 2.0]}
    assert features({"instances": [[1, 2], [3, 4]]}) == {
        "input.instances[][0]": [1.0, 3.0],
        "input.instances[][1]": [2.0, 4.0],
    }
    assert len(features([{"x": i} for i in range(1000)])["input[].x"]) == 64


def test_inputs_have_their_names_and_text_is_text() -> None:
    assert features(7, name="count") == {"input.count": 7.0}
    assert features("héllo wörld".encode(), kind="text/plain") == {"input": "héllo wörld"}
    assert features(b"\x00\xff\xfe") == {"input.bytes": 3.0}
    assert features(b"[" + b"1," * 200_000 + b"1]") == {"input.bytes": 400_003.0}, "too long to be parsed"


def test_an_image_has_brightness_contrast_and_size() -> None:
    gray = np.zeros((40, 80), np.uint8)
    gray[:, 40:] = 200
    for form, mode in (("PNG", "L"), ("JPEG", "RGB")):
        file = io.BytesIO()
        Image.fromarray(gray).convert(mode).save(file, form)
        found = features(file.getvalue())
        assert found["input.brightness"] == pytest.approx(100, abs=2)
        assert found["input.contrast"] == pytest.approx(100, abs=2)
        assert (found["input.width"], found["input.height"]) == (80.0, 40.0)
    assert features(b"\xff\xd8\xff broken") == {"input.bytes": 10.0}


@pytest.mark.parametrize(
    "output",
    [
        {"cat": 0.7, "dog": 0.3},
        [{"label": "dog", "score": 0.3}, {"label": "cat", "score": 0.7}],
        [["dog", 0.3], ["cat", 0.7]],
        {"label": "cat", "score": 0.7},
        [[{"label": "cat", "score": 0.7}]],
    ],
)
def test_a_classification_has_its_first_label_and_score(output: Any) -> None:
    assert features(b"", output) == {"input": "", "output.label": "cat", "output.score": 0.7}


def test_other_responses_are_documents() -> None:
    assert features(1, {"price": 3.5, "currency": "EUR"}) == {
        "input": 1.0,
        "output.price": 3.5,
        "output.currency": "EUR",
    }
    assert features(1, "cat")["output"] == "cat"
    assert features(1, ["cat"])["output.label"] == "cat"


def test_redacted_values_have_no_features() -> None:
    document = {"user": {"email": "a@b.c"}, "x": 1}
    assert features(document, {"email": "a@b.c"}, ("$.user.email", "$.email")) == {"input.x": 1.0}
    assert features(b"some text", redact=("$.user.email",)) == {}, "unknown content"
    assert features(5, redact=("$.secret",), name="secret") == {}


def test_tensors_have_features_by_place_and_no_number_that_is_not_finite() -> None:
    x = tensors.from_array("x", np.array([[1, 2], [3, np.nan]], np.float32))
    words = tensors.from_list("w", "BYTES", [2], ["a", "b"])
    inputs = tuple(InputPart(*tensor.to_part()) for tensor in (x, words))
    y = tensors.from_array("y", np.array([0.5, 0.25]))
    secret = tensors.from_array("secret", np.array([1.0]))
    response = InferenceResponse(tensors.pack([y, secret]), tensors.PACKED_MEDIA_TYPE)
    found = find_features(InferenceRequest("m", inputs=inputs), response, ("$.secret",))
    assert found == [
        ("input.x[0]", 1.0),
        ("input.x[1]", 2.0),
        ("input.x[0]", 3.0),
        ("input.w", "a"),
        ("input.w", "b"),
        ("output.y", 0.5),
        ("output.y", 0.25),
    ]
