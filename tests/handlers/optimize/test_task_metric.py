"""Task metrics: accuracy and F1 on labelled samples, in the gate of an archive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import handlers
from handlers.context import Context, Row
from handlers.errors import HandlerLoadError
from handlers.optimize.labelled_samples import read_labelled_samples
from handlers.optimize.task_metric import TaskMetric, accuracy, macro_f1, predicted_classes, predicted_label

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[256.5, 0, 0, 0], [256.6, 0, 0, 0]]))
            self.linear.bias.zero_()

    def forward(self, x):
        return self.linear(x)
"""  # bfloat16 rounds both weights to 256: the classes are equal, and the first one wins


def test_accuracy_and_macro_f1() -> None:
    predicted, labels = ["a", "b", "b", "c"], ["a", "b", "c", "c"]
    assert accuracy(predicted, labels) == 0.75
    assert macro_f1(predicted, labels) == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert accuracy([1], ["1"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ({"cat": 0.9, "dog": 0.1}, "cat"),
        ({"label": "dog", "score": 0.4}, "dog"),
        ([{"label": "cat", "score": 0.3}, {"label": "dog", "score": 0.7}], "dog"),
        ([0.1, 0.8, 0.1], 1),
        ("cat", "cat"),
        (3, 3),
        (torch.tensor([0.1, 0.8]), 1),
    ],
)
def test_the_label_of_an_answer(answer: Any, label: Any) -> None:
    assert predicted_label(answer) == label


def test_classes_of_a_models_output() -> None:
    assert predicted_classes(torch.tensor([[0.1, 0.9], [0.8, 0.2]])) == [1, 0]
    assert predicted_classes(torch.tensor([1, 0])) == [1, 0]


def test_a_loss_beyond_the_limit_is_a_violation() -> None:
    metric = TaskMetric("accuracy", 0.05)
    assert metric.find_violation(0.9, 0.85) == ""
    assert metric.find_violation(0.9, 0.95) == ""
    assert metric.find_violation(0.9, 0.8) == "accuracy is 0.8 instead of 0.9, and may drop by 0.05"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"metric": "auc"}, "accuracy or f1"),
        ({"max_drop": 0.1}, "with a metric"),
        ({"metric": "f1", "max_drop": 2}, "0 to 1"),
    ],
)
def test_an_invalid_metric_is_rejected(block: dict[str, Any], message: str) -> None:
    with pytest.raises(HandlerLoadError, match=message):
        TaskMetric.from_config(block)


def load(folder: Path, samples: Any, accuracy: dict[str, Any], **files: Any) -> None:
    for name, content in {"rows.json": samples, **files}.items():
        (folder / name.replace("_json", ".json")).write_text(json.dumps(content))
    (folder / "model.py").write_text(MODEL)
    manifest = {"model": {"modelFile": "model.py"}}
    config = {"optimize": {"dtype": "bfloat16"}, "accuracy": {"samples": "rows.json", **accuracy}}
    entry = handlers.load("base_handler", folder, manifest)
    entry.initialize(Context("net", str(folder), manifest, model_yaml_config=config))


def test_the_gate_compares_the_metric_on_labels_of_the_archive(tmp_path: Path) -> None:
    rows = [[1.0, 0.0, 0.0, 0.0]] * 4
    with pytest.raises(HandlerLoadError, match=r"accuracy is 0 instead of 1, and may drop by 0\.01"):
        load(tmp_path, rows, {"metric": "accuracy", "labels": "labels.json"}, labels_json=[1] * 4)
    load(tmp_path, rows, {"metric": "accuracy", "labels": "labels.json", "max_drop": 1}, labels_json=[1] * 4)
    load(tmp_path, rows, {"metric": "f1", "labels": "labels.json"}, labels_json=[0] * 4)


def test_labels_may_be_beside_the_samples(tmp_path: Path) -> None:
    rows = [{"x": [1.0, 0.0, 0.0, 0.0], "labels": 1}] * 2
    with pytest.raises(HandlerLoadError, match="accuracy is 0 instead of 1"):
        load(tmp_path, rows, {"metric": "accuracy"})
    with pytest.raises(HandlerLoadError, match="needs the class of each of the 2 rows"):
        load(tmp_path, [{"x": [1.0, 0.0, 0.0, 0.0]}] * 2, {"metric": "accuracy"})


def test_labelled_samples_of_a_search(tmp_path: Path) -> None:
    files, rows = [Path("a.json"), Path("b.json")], [Row({"body": 1}), Row({"body": 2})]
    for content in (["x", "y"], {"b.json": "y", "a.json": "x"}):
        (tmp_path / "labels.json").write_text(json.dumps(content))
        found = read_labelled_samples(tmp_path / "labels.json", files, rows)
        assert (list(found.rows), found.labels) == (rows, ["x", "y"])
    (tmp_path / "rows.jsonl").write_text('{"input": "good", "label": 1}\n{"input": [2], "label": 0}\n')
    found = read_labelled_samples(tmp_path / "rows.jsonl", files, rows)
    assert ([row["body"] for row in found.rows], found.labels) == (["good", [2]], [1, 0])
    (tmp_path / "labels.json").write_text('["x"]')
    with pytest.raises(HandlerLoadError, match="one label for each of the 2 samples"):
        read_labelled_samples(tmp_path / "labels.json", files, rows)
