"""The YAML loader of files from outside: what it reads as PyYAML does, and what it refuses."""

from __future__ import annotations

import pytest
import yaml

from handlers import untrusted_files
from handlers.untrusted_files import YamlError

ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &a {k: 1}\nb: {<<: *a}", "line 2: has a merge key"),
        (ALIASES, "holds more than 100000 values once its aliases are written out"),
        (ALIASES.replace(": &", ": &").replace("[*", "!!pairs [k: *").replace(", *", ", k: *"), "holds"),
        ("a: &a [*a]", "holds more than 100000 values"),
        pytest.param("- 1\n" * 100_001, "holds more than 100000 values", marks=pytest.mark.nightly),
        ("a" * (1 << 20) + "b", "has 1048577 bytes, and at most 1048576"),
        ("[" * 100_000, "nests more than 64 levels"),
        ("a: 1" + ":1" * 100_000, "an integer of more than 64 bits"),
        ("a: 1" + ":1" * 100_000 + ".5", "base 60"),
        ("a: 0x" + "f" * 17, "an integer of more than 64 bits"),
        ("a: " + "9" * 5_000, "an integer of more than 64 bits"),
        ("a: !!timestamp x", "is not YAML"),
        ("a: !!bool x", "is not YAML"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: [", "line 1: expected the node content"),
        (b"\xff\xfe\x00", "is not YAML"),
    ],
)
def test_a_text_that_costs_too_much_is_refused(text: str, problem: str) -> None:
    with pytest.raises(YamlError, match=problem):
        untrusted_files.load_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1\nb: [1.5, -3, 0x1F, 0o7, 017, 1_000, 1:30, 1:30.5, .inf, 18446744073709551615]",
        "a: &x {k: [1, 2]}\nb: *x",
        "d: 2026-01-02\nn: null\ns: '<<'\nt: true",
        "x: |\n  text\n",
    ],
)
def test_other_texts_are_read_as_by_pyyaml(text: str) -> None:
    assert untrusted_files.load_yaml(text) == yaml.safe_load(text)
