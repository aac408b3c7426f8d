from __future__ import annotations

import json
from pathlib import Path

import pytest

from handlers.builtin.labels import load_label_mapping, map_class_to_label


@pytest.mark.parametrize(
    "content",
    [
        {"0": "cat", "1": "dog"},
        {"0": ["n02123045", "cat"], "1": ["n02084071", "dog"]},
        {"object_type_names": ["cat", "dog"]},
        {"object_type_names": {"0": "cat", "1": ["n02084071", "dog"]}},
    ],
)
def test_every_form_of_a_mapping_is_read(tmp_path: Path, content: object) -> None:
    file = tmp_path / "index_to_name.json"
    file.write_text(json.dumps(content))
    assert load_label_mapping(file) == {"0": "cat", "1": "dog"}


def test_a_missing_file_is_no_mapping(tmp_path: Path) -> None:
    assert load_label_mapping(tmp_path / "index_to_name.json") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "this is not JSON"),
        ('["cat"]', "this is a list"),
        ('{"0": 1}', "label of class 0 is 1"),
        ('{"0": []}', "label of class 0"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "index_to_name.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        load_label_mapping(file)
    assert str(file) in str(raised.value)


def test_probabilities_get_labels() -> None:
    probs = [[0.9, 0.1], [0.8, 0.2]]
    assert map_class_to_label(probs) == [{"0": 0.9, "1": 0.1}, {"0": 0.8, "1": 0.2}]
    assert map_class_to_label(probs, {"0": "cat", "1": "dog"}) == [
        {"cat": 0.9, "dog": 0.1},
        {"cat": 0.8, "dog": 0.2},
    ]
    assert map_class_to_label(probs, {"3": "cow"}, [[3, 1], [1, 3]]) == [
        {"cow": 0.9, "1": 0.1},
        {"1": 0.8, "cow": 0.2},
    ]
    assert list(map_class_to_label([[0.9, 0.1]], None, [[7, 2]])[0]) == ["7", "2"], (
        "the order of the classes is kept"
    )


def test_other_types_than_lists_are_rejected() -> None:
    with pytest.raises(TypeError, match="tolist"):
        map_class_to_label(((0.5, 0.5),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="load_label_mapping"):
        map_class_to_label([[0.5]], ["cat"])  # type: ignore[arg-type]
