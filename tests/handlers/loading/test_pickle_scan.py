"""Tests that compare the checks before loading with torch's own results."""

from __future__ import annotations

import collections
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import _weights_only_unpickler

from handlers.loading import pickle_scan
from handlers.loading.pickle_scan import find_rejection_reason, find_unsafe_globals


class CustomLinear(torch.nn.Linear):
    pass


TENSORS = {
    "state dict": torch.nn.Linear(2, 2).state_dict(),
    "half": {
        "a": torch.ones(2, dtype=torch.bfloat16),
        "b": torch.nn.Parameter(torch.ones(1)),
        "c": torch.float16,
    },
    "sparse": {
        "a": torch.eye(3).to_sparse(),
        "b": torch.Size([2]),
        "c": {1, 2},
        "d": 1j,
        "e": bytearray(b"a"),
    },
    "bytes": {"a": b"bytes", "b": [1, 2.0, None, True, "text", 2**70]},
}
OTHER_OBJECTS = {
    "whole model": (CustomLinear(2, 2), "test_pickle_scan.CustomLinear"),
    "model of torch's": (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    "numpy": ({"a": np.float64(1.0)}, "numpy"),
    "code": ({"a": eval}, "eval"),
    "a class": ({"a": collections.deque([1])}, "collections.deque"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_files_that_torch_loads_are_accepted(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.pth"
    torch.save(TENSORS[name], file)
    torch.load(file, weights_only=True)
    assert find_rejection_reason(file, has_model_file=True, trusted=False) is None


@pytest.mark.parametrize("name", OTHER_OBJECTS)
def test_files_that_torch_rejects_are_rejected(tmp_path: Path, name: str) -> None:
    value, global_name = OTHER_OBJECTS[name]
    file = tmp_path / "model.pt"
    torch.save(value, file)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    reason = find_rejection_reason(file, has_model_file=True, trusted=False)
    assert reason is not None and global_name in reason and "register the model with trusted=true" in reason
    assert find_rejection_reason(file, has_model_file=True, trusted=True) is None


def test_globals_that_torch_allows_are_safe() -> None:
    for name in _weights_only_unpickler._get_allowed_globals():
        module, _, attribute = name.rpartition(".")
        assert not find_unsafe_globals(f"c{module}\n{attribute}\n.".encode()), name


def test_a_pt_file_without_a_class_must_be_torchscript(tmp_path: Path) -> None:
    state, script = tmp_path / "state.pt", tmp_path / "script.pt"
    torch.save(torch.nn.Linear(2, 2).state_dict(), state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(script))
    assert "no TorchScript model" in str(find_rejection_reason(state, has_model_file=False, trusted=True))
    assert find_rejection_reason(script, has_model_file=False, trusted=False) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"no model", b"PK\x03\x04 half a zip", pickle.dumps({"a": CustomLinear}), pickle.dumps(1)],
)
def test_unknown_formats_are_accepted(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(content)
    assert find_rejection_reason(file, True, False) is find_rejection_reason(file, False, False) is None
    assert (
        find_rejection_reason(tmp_path / "gone.pt", True, False)
        is find_rejection_reason(tmp_path, True, False)
        is None
    )


def test_damaged_pickles_are_accepted(tmp_path: Path) -> None:
    assert find_unsafe_globals(b"\x80\x02cos\nsystem\n\x99") == set()


def test_untrusted_pt2_files_are_rejected(tmp_path: Path) -> None:
    assert "with trusted=true" in str(
        find_rejection_reason(tmp_path / "model.pt2", has_model_file=False, trusted=False)
    )
    assert find_rejection_reason(tmp_path / "model.pt2", has_model_file=False, trusted=True) is None


def test_the_module_does_not_import_torch() -> None:
    process = subprocess.run(
        [sys.executable, "-c", "import handlers.loading.pickle_scan, sys; assert 'torch' not in sys.modules"]
    )
    assert process.returncode == 0


def test_weights_with_too_many_entries_are_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Management scans the weights of archives; the entries of a zip take more memory than the file."""
    weights, parsed = tmp_path / "w.pt", []
    with zipfile.ZipFile(weights, "w") as file:
        for n in range(20):
            file.writestr(f"w/{n}", b"")
    monkeypatch.setattr(pickle_scan, "_MAX_ENTRIES", 5)
    monkeypatch.setattr(zipfile, "ZipInfo", lambda *args: parsed.append(args))
    assert pickle_scan.find_rejection_reason(weights, has_model_file=False, trusted=False) is None
    assert not parsed
