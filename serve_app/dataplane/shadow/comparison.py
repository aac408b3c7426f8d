"""Comparison of two responses: pure functions of the responses and the operator's rule.

A different status or media type is a mismatch under every rule. JSON is compared as JSON: formatting does not
matter, 3 is 3.0, true is not 1, NaN equals NaN, and an infinity equals itself.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from serve_app.domain import json_path, tensors
from serve_app.domain.request import InferenceResponse
from serve_app.domain.traffic_policy import ComparisonRule

# The largest distance, and that of answers that cannot be measured against each other.
MAX_DISTANCE = 1e9
MAX_BYTES = 1 << 20  # of an answer that is looked into; larger ones are equal or they are not
# Characters of a text whose likeness is measured: the time for it grows with their square.
_MAX_TEXT_LENGTH = 500


class ResponseComparison(NamedTuple):
    """The result of a comparison.

    ``distance`` is 0 for equal responses and grows with the mismatch; it is comparable within one kind.
    ``why`` is the code of a mismatch: status, content_type, shape, numbers, label, labels, text, body or
    missing. ``measures`` holds those of max_abs_difference, label_flipped, top_k_agreement and
    text_similarity that were measured.
    """

    agreed: bool
    distance: float = 0.0
    why: str = ""
    measures: Mapping[str, float] = {}


def compare(rule: ComparisonRule, live: InferenceResponse, shadow: InferenceResponse) -> ResponseComparison:
    """Return whether the response of a shadow version agrees with the live one."""
    if live.status != shadow.status:
        return _max_distance("status")
    if _media_type(live) != _media_type(shadow):
        return _max_distance("content_type")
    first = _document(live)
    second = first if shadow.body == live.body else _document(shadow)
    if first is json_path.NO_JSON or second is json_path.NO_JSON:
        return _texts(rule, _text(live.body), _text(shadow.body))
    if json_path.parse(rule.at):
        first, second = json_path.find(first, rule.at), json_path.find(second, rule.at)
        if first is None or second is None:
            return _max_distance("missing")
    try:
        return _KINDS[rule.kind](rule, first, second)
    except RecursionError:
        return ResponseComparison(True) if live.body == shadow.body else _max_distance("body")


def _plain(tensor: tensors.Tensor) -> Any:
    if tensor.datatype == "BYTES":
        return [element.decode("utf-8", "replace") for element in tensors.decode_elements(tensor)]
    return tensor.to_array().tolist()


def _max_distance(why: str, **measures: float) -> ResponseComparison:
    return ResponseComparison(False, MAX_DISTANCE, why, measures)


def _media_type(reply: InferenceResponse) -> str:
    return (reply.content_type or "").partition(";")[0].strip().lower()


def _document(reply: InferenceResponse) -> Any:
    """Return the JSON of a body, with NaN and infinities as handlers write them; ``{name: nested list}`` for
    tensors.

    Returns json_path.NO_JSON for other bodies.
    """
    body = reply.body
    if len(body) > MAX_BYTES:
        return json_path.NO_JSON
    if reply.content_type == tensors.PACKED_MEDIA_TYPE:
        return {tensor.name: _plain(tensor) for tensor in tensors.unpack(body)}
    return json_path.parse_json(body)


def _text(body: bytes) -> str | bytes:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


# Kinds


def _auto(how: ComparisonRule, live: Any, other: Any) -> ResponseComparison:
    if is_ranking(live) and is_ranking(other):
        return _top_k(how, live, other)
    if isinstance(live, str) and isinstance(other, str):
        return _texts(how, live, other)
    return _allclose(how, live, other)


def _allclose(how: ComparisonRule, live: Any, other: Any) -> ResponseComparison:
    """Compare numbers with the tolerance of the live ones; shapes, keys and other values must be equal."""
    gap = _gap(how.rtol, how.atol, live, other)
    if gap is None:
        return _max_distance("shape")
    difference, excess = gap
    return _judged(excess <= 1, excess, "numbers", max_abs_difference=difference)


def _top_k(how: ComparisonRule, live: Any, other: Any) -> ResponseComparison:
    """Compare rankings: the same first label, and enough of the first ``k`` in common, in any order."""
    first, second = _ranked(live), _ranked(other)
    if first is None or second is None:
        return _max_distance("shape")
    first, second = first[: how.k], second[: how.k]
    longer = max(len(first), len(second))
    agreement = len(set(first) & set(second)) / longer if longer else 1.0
    flipped = first[:1] != second[:1]
    measures = {"label_flipped": float(flipped), "top_k_agreement": agreement}
    agreed = not flipped and agreement >= how.least - 1e-9
    return _judged(agreed, flipped + 1 - agreement, "label" if flipped else "labels", **measures)


def _label(how: ComparisonRule, live: Any, other: Any) -> ResponseComparison:
    same = _gap(0.0, 0.0, live, other) == (0.0, 0.0)
    return _judged(same, 1.0, "label", label_flipped=float(not same))


def _words(how: ComparisonRule, live: Any, other: Any) -> ResponseComparison:
    if isinstance(live, str) and isinstance(other, str):
        return _texts(how, live, other)
    if _gap(0.0, 0.0, live, other) == (0.0, 0.0):
        return _texts(how, "", "")
    return _texts(how, *(json.dumps(value, sort_keys=True, ensure_ascii=False) for value in (live, other)))


_KINDS: Mapping[str, Callable[[ComparisonRule, Any, Any], ResponseComparison]] = {
    "auto": _auto,
    "allclose": _allclose,
    "top_k": _top_k,
    "label": _label,
    "text": _words,
}


def _texts(how: ComparisonRule, live: str | bytes, other: str | bytes) -> ResponseComparison:
    """Compare texts for equality, or by the similarity ``least``, which is measured only if it is below 1."""
    if isinstance(live, bytes) or isinstance(other, bytes):
        return ResponseComparison(True) if live == other else ResponseComparison(False, 1.0, "body")
    if how.kind == "label":
        return _judged(live == other, 1.0, "label", label_flipped=float(live != other))
    if how.least >= 1:
        return _judged(live == other, 1.0, "text")
    likeness = 1.0
    if live != other:
        likeness = difflib.SequenceMatcher(
            None, live[:_MAX_TEXT_LENGTH], other[:_MAX_TEXT_LENGTH], autojunk=False
        ).ratio()
    return _judged(likeness >= how.least, 1 - likeness, "text", text_similarity=likeness)


def _judged(agreed: bool, distance: float, why: str, **measures: float) -> ResponseComparison:
    return (
        ResponseComparison(True, 0.0, "", measures)
        if agreed
        else ResponseComparison(False, min(distance, MAX_DISTANCE), why, measures)
    )


# Numbers


def _gap(rtol: float, atol: float, live: Any, other: Any) -> tuple[float, float] | None:
    """Return the largest difference of two numbers, and the largest multiple of the tolerance; None for
    other shapes.
    """
    if _is_number(live) and _is_number(other):
        return _between(rtol, atol, live, other)
    if type(live) is not type(other):
        return None
    if isinstance(live, dict):
        if live.keys() != other.keys():
            return None
        return _largest(rtol, atol, ((value, other[key]) for key, value in live.items()))
    if isinstance(live, list):
        if len(live) != len(other):
            return None
        if len(live) > 8 and _are_numbers(live) and _are_numbers(other):
            return _between_all(rtol, atol, live, other)
        return _largest(rtol, atol, zip(live, other))
    return (0.0, 0.0) if live == other else None


def _largest(rtol: float, atol: float, pairs: Any) -> tuple[float, float] | None:
    difference = excess = 0.0
    for live, other in pairs:
        gap = _gap(rtol, atol, live, other)
        if gap is None:
            return None
        difference, excess = max(difference, gap[0]), max(excess, gap[1])
    return difference, excess


def _between(rtol: float, atol: float, live: float, other: float) -> tuple[float, float] | None:
    if live == other or (live != live and other != other):
        return 0.0, 0.0
    try:
        difference, tolerance = abs(float(live) - float(other)), atol + rtol * abs(float(live))
    except OverflowError:
        return None
    if not math.isfinite(difference):
        return None
    return difference, difference / tolerance if tolerance else MAX_DISTANCE


def _between_all(
    rtol: float, atol: float, live: list[float], other: list[float]
) -> tuple[float, float] | None:
    try:
        a, b = np.array(live, np.float64), np.array(other, np.float64)
    except OverflowError:
        return _largest(rtol, atol, zip(live, other))
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    a, b = a[differ], b[differ]
    if not a.size:
        return 0.0, 0.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    with np.errstate(over="ignore", divide="ignore"):
        differences = np.abs(a - b)
        excess = (differences / (atol + rtol * np.abs(a))).max()
    largest = float(differences.max())
    return (largest, min(float(excess), MAX_DISTANCE)) if math.isfinite(largest) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_numbers(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int, float}


# Labels


def is_ranking(document: Any) -> bool:
    """Return whether the document looks like a classifier's output: probabilities by label, or ordered
    labels.
    """
    document = unwrap(document)
    if isinstance(document, dict):
        scores = list(document.values())
        return (
            len(scores) > 1
            and _are_numbers(scores)
            and all(0 <= score <= 1 for score in scores)
            and sum(scores) <= 1.001
        )
    if not isinstance(document, list) or not document or _are_numbers(document):
        return False
    labels = _ranked(document)
    return labels is not None and len(set(labels)) == len(labels)


def unwrap(document: Any) -> Any:
    """Return the only response of a list of one; a single label with its score becomes a ranking of one."""
    if _pair(document) is not None:
        return [document]
    if isinstance(document, list) and len(document) == 1 and isinstance(document[0], (list, dict)):
        return document if _pair(document[0]) is not None else unwrap(document[0])
    return document


def _ranked(document: Any) -> list[Any] | None:
    """Return labels, the best first; None where there are none.

    The source is scores by label, labels in order, ``[label, score]`` or ``{"label": …, "score": …}``; a list
    of scores has its indices as labels.
    """
    document = unwrap(document)
    if isinstance(document, dict):
        return _by_score(document.items()) if _are_numbers(list(document.values())) else None
    if not isinstance(document, list):
        return None
    if any(isinstance(value, float) for value in document):
        return _by_score(enumerate(document)) if _are_numbers(document) else None
    if all(isinstance(value, str) or _is_number(value) for value in document):
        return document
    pairs = [_pair(value) for value in document]
    return _by_score(pair for pair in pairs if pair is not None) if None not in pairs else None


def _pair(value: Any) -> tuple[Any, float] | None:
    score: Any
    match value:
        case {"label": str() | int() as label, **rest}:
            score = rest.get("score", 0.0)
        case [str() as label, score]:
            pass
        case _:
            return None
    return (label, score) if _is_number(score) else None


def _by_score(pairs: Any) -> list[Any]:
    return [
        label for label, _ in sorted(pairs, key=lambda pair: math.inf if pair[1] != pair[1] else -pair[1])
    ]
