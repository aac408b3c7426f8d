"""Every stored input of every fuzzed parser, and a short run of the fuzzer itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.corpus import CORPUS, read_corpus
from tests.fuzz.targets import TARGETS

_HAS_ATHERIS = importlib.util.find_spec("atheris") is not None


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", TARGETS)
def test_stored_inputs_are_parsed_or_refused(name: str) -> None:
    for data in (*TARGETS[name].seeds, *read_corpus(name), b""):
        TARGETS[name].run(data)


def test_every_corpus_belongs_to_a_target() -> None:
    assert {file.stem for file in CORPUS.glob("*.zip")} == set(TARGETS)


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_ATHERIS, reason="needs atheris, which has no package for this platform")
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.nightly
def test_new_inputs_are_parsed_or_refused(name: str, tmp_path: Path) -> None:
    result = fuzz(name, runs=100_000, seconds=5, findings=tmp_path, keep=False)
    assert result.inputs, "the fuzzer did not run"
    assert not result.finding, result.finding
