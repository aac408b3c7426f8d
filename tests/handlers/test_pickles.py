"""What is told of a weights file before it is read agrees with what torch says as it reads it."""

from __future__ import annotations

import collections
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import _weights_only_unpickler

from handlers.pickles import foreign, refusal


class Own(torch.nn.Linear):
    pass


TENSORS = {
    "state dict": torch.nn.Linear(2, 2).state_dict(),
    "half": {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.nn.Parameter(torch.ones(1)), "c": torch.float16},
    "sparse": {"a": torch.eye(3).to_sparse(), "b": torch.Size([2]), "c": {1, 2}, "d": 1j, "e": bytearray(b"a")},
    "bytes": {"a": b"bytes", "b": [1, 2.0, None, True, "text", 2**70]},
}
MORE = {
    "whole model": (Own(2, 2), "test_pickles.Own"),
    "model of torch's": (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "numpy": ({"a": np.float64(1.0)}, "numpy"),
    "code": ({"a": eval}, "eval"),
    "a class": ({"a": collections.deque([1])}, "collections.deque"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_left_to_torch_which_reads_them(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.pth"
    torch.save(TENSORS[name], file)
    torch.load(file, weights_only=True)
    assert refusal(file, with_class=True, trusted=False) is None


@pytest.mark.parametrize("name", MORE)
def test_what_is_more_than_tensors_is_refused_as_torch_refuses_it(tmp_path: Path, name: str) -> None:
    held, named = MORE[name]
    file = tmp_path / "model.pt"
    torch.save(held, file)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    said = refusal(file, with_class=True, trusted=False)
    assert said is not None and named in said and "write trusted: true in model-config.yaml" in said
    assert refusal(file, with_class=True, trusted=True) is None


def test_nothing_is_refused_that_torch_allows() -> None:
    for name in _weights_only_unpickler._get_allowed_globals():
        module, _, attribute = name.rpartition(".")
        assert not foreign(f"c{module}\n{attribute}\n.".encode()), name


def test_a_pt_file_without_a_class_is_torchscript(tmp_path: Path) -> None:
    state, script = tmp_path / "state.pt", tmp_path / "script.pt"
    torch.save(torch.nn.Linear(2, 2).state_dict(), state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(script))
    assert "no TorchScript model" in str(refusal(state, with_class=False, trusted=True))
    assert refusal(script, with_class=False, trusted=False) is None


@pytest.mark.parametrize(
    "content", [b"", b"no model", b"PK\x03\x04 half a zip", pickle.dumps({"a": Own}), pickle.dumps(1)]
)
def test_what_is_not_known_is_left_to_loading(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(content)
    assert refusal(file, True, False) is refusal(file, False, False) is None
    assert refusal(tmp_path / "gone.pt", True, False) is refusal(tmp_path, True, False) is None


def test_a_damaged_pickle_is_left_to_loading(tmp_path: Path) -> None:
    assert foreign(b"\x80\x02cos\nsystem\n\x99") == set()


def test_a_pt2_file_runs_code(tmp_path: Path) -> None:
    assert "write trusted: true" in str(refusal(tmp_path / "model.pt2", with_class=False, trusted=False))
    assert refusal(tmp_path / "model.pt2", with_class=False, trusted=True) is None


def test_no_torch_is_needed() -> None:
    told = subprocess.run([sys.executable, "-c", "import handlers.pickles, sys; assert 'torch' not in sys.modules"])
    assert told.returncode == 0
