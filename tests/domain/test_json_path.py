from __future__ import annotations

import pytest

from serve_app.domain.json_path import find, parse

DOCUMENT = {
    "user": {"id": "u1"},
    "items": [{"score": 1}, {"score": 2}],
    "$ref": 3,
    "none": None,
    "text": "abc",
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("$", DOCUMENT),
        ("user.id", "u1"),
        ("$.user.id", "u1"),
        (" $.user.id ", "u1"),
        ("items[1].score", 2),
        ("$.items[-1].score", 2),
        ("$ref", 3),
        ("$.$ref", 3),
        ("$.user", {"id": "u1"}),
    ],
)
def test_what_stands_there(path: str, found: object) -> None:
    assert find(DOCUMENT, path) == found


@pytest.mark.parametrize(
    "path", ["user.name", "user[0]", "items.score", "items[2]", "text[0]", "none.x", "0"]
)
def test_where_nothing_stands(path: str) -> None:
    assert find(DOCUMENT, path) is None


def test_a_list_at_the_root() -> None:
    assert find([[1, 2]], "[0][1]") == find([[1, 2]], "$[0][1]") == 2
    assert find(5, "$") == 5
    assert find(5, "x") is None


@pytest.mark.parametrize(
    "path", ["a..b", "a[", "a[x]", "a]", "a.", ".", "[0]b", "$.", "a[1e3]", "[" + "9" * 10 + "]"]
)
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(
        ValueError, match=r"is no place in a JSON document; write it like \$\.user\.id or scores\[0\]"
    ):
        parse(path)
