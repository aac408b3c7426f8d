"""Tests of the handler from tensors to tensors."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

import handlers
from handlers.context import Context

MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x.sum(dim=2)
"""


def serialize(value: Any) -> bytearray:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return bytearray(buffer.getvalue())


def test_each_tensor_has_its_own_output(archive: Any, begin: Any) -> None:
    manifest = {"model": {"modelFile": "model.py"}}
    entry = handlers.load("densenet_handler", archive(model=MODEL), manifest)
    entry.initialize(Context("m", str(archive()), manifest))
    ones, identity = serialize(torch.ones(2, 3)), serialize(torch.eye(2, 3))
    rows = [{"data": ones}, {"body": b"none"}, {"body": serialize([1])}, {"body": identity}]
    first, damaged, no_tensor, second = entry(rows, begin(entry.instance.context, 4))
    assert torch.equal(first, torch.tensor([[3.0, 3.0]])) and torch.equal(second, torch.tensor([[1.0, 1.0]]))
    assert first.untyped_storage().nbytes() == 8, "only the row itself is serialized"
    assert damaged.error_code == 400 and "torch.save" in damaged.message
    assert no_tensor.error_code == 400 and "list" in no_tensor.message


def test_tensors_that_are_larger_than_their_bytes_are_refused(archive: Any, begin: Any) -> None:
    manifest = {"model": {"modelFile": "model.py"}}
    entry = handlers.load("densenet_handler", archive(model=MODEL), manifest)
    entry.initialize(Context("m", str(archive()), manifest))
    expanded = serialize(torch.zeros(1).expand(2, 10**6))
    compressed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(serialize(torch.zeros(2, 10**6)))) as plain,
        zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    rows = [{"data": bytes(expanded)}, {"data": compressed.getvalue()}, {"data": serialize(torch.ones(2, 3))}]
    *refused, answer = entry(rows, begin(entry.instance.context, 3))
    assert [error.error_code for error in refused] == [400, 400]
    assert "contiguous" in refused[0].message and "torch.save" in refused[1].message
    assert torch.equal(answer, torch.tensor([[3.0, 3.0]]))
