"""Tests of invalid rows and of model folders that are rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from handlers import tasks
from tests.support.hf_folders import (
    LONG,
    MINILM,
    SHORT,
    ServedFolder,
    assert_close,
    load_error,
    save_bert,
    save_vit,
)

pytestmark = pytest.mark.usefixtures("deterministic")


def test_invalid_rows_fail_alone(tmp_path: Path) -> None:
    served = ServedFolder(save_bert("BertForSequenceClassification", tmp_path))
    invalid = [
        [SHORT, LONG],
        3,
        None,
        {"txt": SHORT},
        bytearray(b"\xff\xfe"),
        bytearray(b"{broken"),
        "\ud800",
        {"text": SHORT, "text_pair": 3},
        {"text": SHORT, "parameters": {"topk": 2}},
        {"text": SHORT, "parameters": [2]},
        {"text": SHORT, "parameters": {"top_k": 0}},
        {"inputs": {"inputs": SHORT}},
    ]
    results = served(SHORT, *invalid, bytearray(SHORT.encode()))
    assert_close([results[0], results[-1]], served(SHORT) * 2)
    assert [row.error_code for row in results[1:-1]] == [400] * len(invalid)
    assert "did you mean 'top_k'?" in results[9].message
    [alone] = served(invalid[8])
    assert alone.error_code == 400


def test_errors_name_missing_parts_of_a_folder(tmp_path: Path) -> None:
    assert "no model folder: there is no config.json" in load_error(tmp_path)
    folder = save_bert("BertForSequenceClassification", tmp_path)
    assert "did you mean 'text-classification'?" in load_error(folder, "text-clasification")
    assert "summarization, text-classification" in load_error(folder, "poetry")
    assert "is for text-classification or zero-shot-classification, not for token-" in load_error(
        folder, "ner"
    )
    assert "'topp' here" in load_error(folder, parameters={"topp": 1})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "needs a tokenizer, and there is no tokenizer.json" in load_error(folder)
    assert "is for image-classification, not for feature-" in load_error(
        save_vit(tmp_path / "vit"), "feature-extraction"
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertForNextSentencePrediction"]})
    )
    assert "BertForNextSentencePrediction" in load_error(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in load_error(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    assert "no weights; put model.safetensors beside it" in load_error(folder)


def test_a_missing_head_is_an_error(tmp_path: Path) -> None:
    folder = save_bert("BertModel", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertForTokenClassification"]})
    )
    assert "lack classifier.bias, classifier.weight, which would be random" in load_error(folder)


def test_pickles_require_trust(tmp_path: Path) -> None:
    folder = save_bert("BertForSequenceClassification", tmp_path)
    expected = ServedFolder(folder)(SHORT)
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "trusted=true" in load_error(folder)
    assert_close(ServedFolder(folder, trusted=True)(SHORT), expected)


def test_code_in_a_folder_requires_trust(tmp_path: Path) -> None:
    folder = save_bert("BertForSequenceClassification", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    reference = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps({**config, **reference}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnConfig: pass\n")
    assert "transformers cannot load it" in load_error(folder)
    assert not (tmp_path / "ran").exists()


def test_unsupported_modules_are_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "minilm"
    shutil.copytree(MINILM, folder)
    words = {"type": "sentence_transformers.models.WordEmbeddings", "path": "2_WordEmbeddings"}
    (folder / "modules.json").write_text(json.dumps([words]))
    assert "its modules.json has a WordEmbeddings" in load_error(folder)


@pytest.mark.parametrize(
    "architecture, tag, task",
    [
        ("T5ForConditionalGeneration", None, "text2text-generation"),
        ("MarianMTModel", "translation", "translation"),
        ("BertModel", "sentence-similarity", "sentence-embedding"),
        ("BertModel", "[", "feature-extraction"),
        ("BertModel", "translation", "feature-extraction"),
        ("GPT2LMHeadModel", None, "text-generation"),
        ("BartForSequenceClassification", "zero-shot-classification", "zero-shot-classification"),
        ("DetrForSegmentation", None, "image-segmentation"),
    ],
)
def test_the_task_is_read_from_the_folder(
    tmp_path: Path, architecture: str, tag: str | None, task: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    for name in ("model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
    if tag is not None:
        (tmp_path / "README.md").write_text(f"---\npipeline_tag: {tag}\n---\n# Its card\n")
    assert tasks.select_task(tmp_path) == task
    (tmp_path / "modules.json").write_text("[]")
    assert tasks.select_task(tmp_path) == "sentence-embedding"


def test_every_task_has_a_class_and_a_description(tmp_path: Path) -> None:
    for task in tasks.TASKS:
        assert tasks.load_task_class(task).__doc__
    served = ServedFolder(save_bert("BertForSequenceClassification", tmp_path))
    description = served.entry.instance.describe_handle()
    parameters = description.pop("parameters")
    assert parameters["top_k"] == "a whole number from 1 to 2147483647"
    assert parameters["function_to_apply"] == "one of softmax, sigmoid, none"
    assert parameters["tokens"] == "true or false"
    assert description == {
        "task": "text-classification",
        "architecture": ["BertForSequenceClassification"],
        "dtype": "float32",
        "outputs": ["label", "labels", "score", "token_ids", "text"],
        "max_length": 32,
        "labels": {"0": "LABEL_0", "1": "LABEL_1"},
    }
