"""Tests of the embeddings of model folders, compared with sentence-transformers and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from tests.support.hf_folders import (
    LONG,
    MINILM,
    SHORT,
    TEXTS,
    ServedFolder,
    assert_close,
    explain_row,
    load_error,
    make_tokenizer,
    save_bert,
)

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.integration]


def select(text: Any, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text, "parameters": parameters}


def test_a_request_selects_the_vector_of_a_text_or_of_its_tokens(tmp_path: Path) -> None:
    folder = save_bert("BertModel", tmp_path)
    features, sentences = ServedFolder(folder), ServedFolder(folder, task="sentence-embedding")
    pooled = [select(text, output_value="sentence_embedding") for text in TEXTS]
    assert_close(features(*pooled), sentences(*pooled))
    assert_close(
        sentences(*[select(text, output_value="token_embeddings") for text in TEXTS]), features(*TEXTS)
    )
    mixed = features(SHORT, pooled[1], select(SHORT, normalize=True, tokens=True))
    assert_close(mixed[:2], [features(SHORT)[0], sentences(LONG)[0]])
    norms = torch.tensor(mixed[2]["embedding"]).norm(dim=-1).tolist()
    assert norms == pytest.approx([1] * mixed[2]["tokens"], abs=1e-5)
    refused = features(select(SHORT, output_value=["score", "labels"]), select(SHORT, output_value=3), SHORT)
    assert [getattr(row, "error_code", 200) for row in refused] == [400, 400, 200]
    assert "no output score or labels; there are token_embeddings" in refused[0].message


def test_the_pooling_of_token_vectors_may_be_unknown(tmp_path: Path) -> None:
    folder = save_bert("BertModel", tmp_path)
    (folder / "modules.json").write_text('[{"type": "x.Transformer", "path": ""}, {"type": "x.Dense"}]')
    served = ServedFolder(folder, task="feature-extraction")
    refused, answer = served(select(SHORT, output_value="sentence_embedding"), SHORT)
    assert refused.error_code == 400 and "its modules.json has a Dense" in refused.message
    assert len(answer) == 8
    (folder / "modules.json").write_text('["Dense"]')
    assert "its modules.json is no list of objects" in load_error(folder, "sentence-embedding")


def test_long_texts_are_truncated_on_either_side_or_refused(tmp_path: Path) -> None:
    served = ServedFolder(save_bert("BertModel", tmp_path, limit=8), task="sentence-embedding")
    words = LONG.split()
    left, first, last, right = served(
        select(LONG, truncation_direction="left"),
        select(" ".join(words[:6]), truncate=False),
        " ".join(words[-6:]),
        LONG,
    )
    assert_close([left, right], [last, first])
    assert_close(served(select(LONG, truncation_direction="left")), [last])
    refused, whole = served(select(LONG, truncate=False), SHORT)
    assert refused.error_code == 413 and "has 19 tokens, and the model reads 8" in refused.message
    assert len(whole) == 16


def test_prompts_equal_sentence_transformers(tmp_path: Path) -> None:
    model = sentence_transformers.SentenceTransformer(str(MINILM), device="cpu")
    model.prompts, model.default_prompt_name = {"query": "Query: ", "plain": ""}, "query"
    model.save_pretrained(str(tmp_path))
    served = ServedFolder(tmp_path)
    default, plain, named = served(
        SHORT, select(SHORT, prompt_name="plain"), select(SHORT, prompt_name="query")
    )
    expected = model.encode([SHORT]).tolist()[0]
    assert_close([default, named], [expected, expected])
    assert_close(plain, model.encode([SHORT], prompt_name="plain").tolist()[0])
    [refused] = served(select(SHORT, prompt_name="none"))
    assert refused.error_code == 400 and "this model has plain, query" in refused.message
    settings = tmp_path / "config_sentence_transformers.json"
    for content, reason in (
        ('{"prompts": {"a": 1}}', "is no object of texts"),
        ('{"default_prompt_name": "a"}', "is 'a'; there are none"),
        ("[]", "this is no JSON object"),
    ):
        settings.write_text(content)
        assert reason in load_error(tmp_path)


def test_prompts_that_are_not_pooled_are_refused(tmp_path: Path) -> None:
    folder = save_bert("BertModel", tmp_path)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"include_prompt": false}')
    settings = folder / "config_sentence_transformers.json"
    settings.write_text('{"prompts": {"query": "who "}}')
    [refused] = ServedFolder(folder, task="sentence-embedding")(select(SHORT, prompt_name="query"))
    assert refused.error_code == 400
    settings.write_text('{"prompts": {"query": "who "}, "default_prompt_name": "query"}')
    assert "include_prompt: false" in load_error(folder, "sentence-embedding")


def test_texts_may_be_token_ids(tmp_path: Path) -> None:
    served = ServedFolder(save_bert("BertModel", tmp_path), task="sentence-embedding")
    ids = make_tokenizer()(SHORT)["input_ids"]
    by_text, with_specials, without = served(SHORT, select(ids), select(ids[1:-1]))
    assert_close([with_specials, without], [by_text, by_text])
    refused = served(select([999]), select([-1]), select([]), select([1.5]), SHORT)
    assert [getattr(row, "error_code", 200) for row in refused] == [400, 400, 400, 400, 200]


def test_the_tokenizer_answers_beside_the_model(tmp_path: Path) -> None:
    served = ServedFolder(save_bert("BertForSequenceClassification", tmp_path))
    [only] = served(select("what ?", output_value="token_ids"))
    tokens, label, text, wrong = served(
        select("what ?", output_value="token_ids", add_special_tokens=False),
        SHORT,
        select([2, 4, 3], output_value="text", skip_special_tokens=False),
        select("what", output_value="text"),
    )
    assert [token["text"] for token in only] == ["[CLS]", "what", "?", "[SEP]"]
    assert only[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert tokens == only[1:-1] and tokens[1]["start"] == 5
    assert label.keys() == {"label", "score"}
    assert (text, wrong.error_code) == ("[CLS] the [SEP]", 400)
    assert served(select([2, 4, 3], output_value="text")) == ["the"]
    long, many = served(select("a" * (2**17 + 1), output_value="token_ids"), "a" * (2**17 + 1))
    assert (long.error_code, many.keys()) == (413, label.keys())
    parameters = json.dumps({"output_value": "token_ids"})
    assert explain_row(served, data=SHORT, parameters=parameters).error_code == 400


def save_modules(folder: Path, kind: Any, *modules: Any, **options: Any) -> Any:
    """Save a model of sentence-transformers of a tiny transformer and ``modules``, and return it."""
    save_bert("BertModel", folder / "bert")
    torch.manual_seed(1)
    transformer = Transformer(str(folder / "bert"), **options)
    model = kind(modules=[transformer, *modules], device="cpu")
    model.save_pretrained(str(folder / "saved"))
    return model


@pytest.mark.parametrize("level", ["sentence_embedding", "token_embeddings"])
def test_projections_equal_sentence_transformers(tmp_path: Path, level: str) -> None:
    dense = [
        Dense(16, 8, module_input_name=level),
        Dense(
            8, 8, bias=False, activation_function=torch.nn.GELU(), use_residual=True, module_input_name=level
        ),
        Dense(8, 4, use_residual=True, activation_function=None, module_input_name=level),
    ]
    modules = [Pooling(16), *dense] if level == "sentence_embedding" else [*dense, Pooling(4)]
    model = save_modules(tmp_path, sentence_transformers.SentenceTransformer, *modules)
    served = ServedFolder(tmp_path / "saved")
    plain = [select(text, normalize=False) for text in TEXTS]
    assert_close(served(*plain), model.encode(TEXTS).tolist())
    by_token = model.encode(SHORT, output_value="token_embeddings").tolist()
    assert_close(served(select(SHORT, output_value="token_embeddings"))[0], by_token)
    folder = next(iter(sorted((tmp_path / "saved").glob("*_Dense"))))
    settings = json.loads((folder / "config.json").read_text())
    for change, reason in (
        ({"activation_function": "os.system"}, "the activation 'system' is not served"),
        ({"module_output_name": "other"}, f"from {level} to other is not served"),
    ):
        (folder / "config.json").write_text(json.dumps({**settings, **change}))
        assert reason in load_error(tmp_path / "saved")
    (folder / "config.json").write_text(json.dumps(settings))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    assert "its weights cannot be read" in load_error(tmp_path / "saved")
    weights.rename(folder / "pytorch_model.bin")
    assert "there is no model.safetensors" in load_error(tmp_path / "saved")


def test_vectors_of_late_interaction_equal_sentence_transformers(tmp_path: Path) -> None:
    modules = (
        Dense(16, 8, bias=False, activation_function=None, module_input_name="token_embeddings"),
        MultiVectorMask(skiplist_words=["the", "."]),
        Normalize(module_input_name="token_embeddings"),
    )
    kind = sentence_transformers.MultiVectorEncoder
    model = save_modules(tmp_path, kind, *modules, query_length=6, document_length=12)
    served = ServedFolder(tmp_path / "saved")
    assert served.entry.instance.task_name == "multi-vector-embedding"
    documents, queries = model.encode_document(TEXTS), model.encode_query(TEXTS)
    answers = served(*TEXTS, *[select(text, prompt_name="query") for text in TEXTS])
    assert [len(answer) for answer in answers] == [6, 11, 4, 6, 6, 4]
    assert_close(answers, [row.tolist() for row in (*documents, *queries)])
    assert served(select(LONG, truncate=False))[0].error_code == 413
    assert served(select(SHORT, output_value="sentence_embedding"))[0].error_code == 400
    explanation = explain_row(served, data=SHORT, target="a dog", steps=8)
    assert len(explanation["tokens"]) == len(explanation["attributions"]) == 8
    mask = next((tmp_path / "saved").glob("*_MultiVectorMask")) / "config.json"
    mask.write_text('{"keep_only_token_ids": [5]}')
    assert "keep_only_token_ids is not served" in load_error(tmp_path / "saved")


def test_a_module_stays_in_its_folder(tmp_path: Path) -> None:
    folder = save_bert("BertModel", tmp_path / "bert")
    (folder / "modules.json").write_text('[{"type": "x.Dense", "path": "../other"}]')
    assert "which is not in the folder" in load_error(folder)


def save_splade(folder: Path, **settings: str) -> Any:
    """Save a model of sentence-transformers, and return it."""
    save_bert("BertForMaskedLM", folder / "bert")
    transformer = Transformer(str(folder / "bert"), transformer_task="fill-mask")
    model = sentence_transformers.SparseEncoder(
        modules=[transformer, SpladePooling(**settings)], device="cpu"
    )
    model.save_pretrained(str(folder / "splade"))
    return model


@pytest.mark.parametrize("settings", [{}, {"pooling_strategy": "sum", "activation_function": "log1p_relu"}])
def test_sparse_embeddings_equal_sentence_transformers(tmp_path: Path, settings: dict[str, str]) -> None:
    expected = save_splade(tmp_path, **settings).encode(TEXTS, convert_to_sparse_tensor=False)
    served = ServedFolder(tmp_path / "splade")
    assert served.entry.instance.task_name == "sparse-embedding"
    for answer, row in zip(served(*TEXTS), expected.tolist()):
        assert 0 < len(answer) < 64 and all(item["value"] > 0 for item in answer)
        assert_close(answer, [{"index": i, "value": value} for i, value in enumerate(row) if value > 0])
    [counted] = served(select(SHORT, tokens=True))
    assert counted["tokens"] == 8


def test_a_sparse_embedding_needs_a_masked_language_model(tmp_path: Path) -> None:
    folder = save_bert("BertForMaskedLM", tmp_path)
    served = ServedFolder(folder, task="sparse-embedding")
    [refused] = served(select(SHORT, output_value="sentence_embedding"))
    assert "there are sparse_embedding, token_ids" in refused.message
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**make_tokenizer()(SHORT, return_tensors="pt")).logits[0]
    best = int(logits.amax(dim=0).argmax())
    explanation = explain_row(served, data=SHORT, steps=8)
    assert explanation["target"] == served.entry.instance.task.tokenizer.convert_ids_to_tokens(best)
    assert explain_row(served, data=SHORT, target="cat", steps=8)["target"] == "cat"
    assert explain_row(served, data=SHORT, target="none").error_code == 400
    assert "not for sparse-embedding" in load_error(
        save_bert("BertModel", tmp_path / "b"), "sparse-embedding"
    )
    (folder / "modules.json").write_text('[{"type": "x.SpladePooling", "path": "p"}]')
    (folder / "p").mkdir()
    (folder / "p/config.json").write_text(json.dumps({"pooling_strategy": "mean"}))
    assert "pooling_strategy is 'mean'" in load_error(folder)
