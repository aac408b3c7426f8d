"""Tests of model folders with text tasks, compared with transformers' own pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from handlers import PredictionException
from tests.support.hf_folders import (
    LONG,
    MINILM,
    SHORT,
    TEXTS,
    ServedFolder,
    assert_close,
    make_pipeline,
    make_tokenizer,
    save_bert,
)

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.integration]


def test_text_classification_equals_the_pipeline(tmp_path: Path) -> None:
    folder = save_bert("BertForSequenceClassification", tmp_path, num_labels=3)
    served, reference = ServedFolder(folder), make_pipeline("text-classification", tmp_path)
    assert_close(served(*TEXTS), [reference(text)[0] for text in TEXTS])
    assert_close(
        served({"inputs": SHORT, "parameters": {"top_k": 2}}, LONG),
        [reference([SHORT], top_k=2)[0], reference(LONG)[0]],
    )
    pair = {"text": SHORT, "text_pair": "who is it ?"}
    assert_close(
        served(pair, SHORT, {"inputs": pair}),
        [reference([pair])[0], reference(SHORT)[0], reference([pair])[0]],
    )
    [answer] = served({"text": SHORT, "parameters": {"function_to_apply": "none"}})
    assert_close(answer, reference(SHORT, function_to_apply="none")[0])
    [item] = served({"text": SHORT, "parameters": {"top_k": 1}})
    assert len(item) == 1, "with top_k, the value is a list"


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    folder = save_bert("BertForSequenceClassification", tmp_path, num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    encoded = make_tokenizer()([SHORT] * 3, TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**encoded).logits[:, 0]
    rows = [{"text": SHORT, "text_pair": text, "parameters": {"tokens": True}} for text in TEXTS]
    answers = ServedFolder(folder, task="text-ranking")(*rows)
    assert [answer["score"] for answer in answers] == pytest.approx(logits.sigmoid().tolist(), abs=1e-5)
    assert [answer["tokens"] for answer in answers] == encoded["attention_mask"].sum(1).tolist()
    config = json.loads((folder / "config.json").read_text())
    for field in (
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ):
        (folder / "config.json").write_text(json.dumps({**config, **field}))
        answers = ServedFolder(folder)(*rows)
        assert [answer["score"] for answer in answers] == pytest.approx(logits.tolist(), abs=1e-5)


def test_a_folder_is_quantized_if_configured(tmp_path: Path) -> None:
    folder = save_bert("BertForSequenceClassification", tmp_path, num_labels=3)
    plain, int8 = ServedFolder(folder)(*TEXTS), ServedFolder(folder, optimize={"quantize": "int8"})(*TEXTS)
    assert int8 != plain
    assert [row["score"] for row in int8] == pytest.approx([row["score"] for row in plain], abs=0.1)


def test_texts_beyond_the_limit_are_truncated(tmp_path: Path) -> None:
    served = ServedFolder(save_bert("BertForSequenceClassification", tmp_path, limit=8))
    truncated, whole, other = served("cat " * 500, "cat " * 6, "cat " * 5)
    assert_close(truncated, whole)
    assert other["score"] != pytest.approx(whole["score"], abs=1e-5)


def test_multi_label_classification_equals_the_pipeline(tmp_path: Path) -> None:
    served = ServedFolder(
        save_bert("BertForSequenceClassification", tmp_path, problem_type="multi_label_classification")
    )
    assert_close(served(SHORT), make_pipeline("text-classification", tmp_path)(SHORT))


def test_token_classification_equals_the_pipeline(tmp_path: Path) -> None:
    labels = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))
    folder = save_bert(
        "BertForTokenClassification", tmp_path, id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    served, reference = ServedFolder(folder), make_pipeline("token-classification", folder)
    results = served(*TEXTS)
    assert_close(results, [reference(text, aggregation_strategy="simple") for text in TEXTS])
    assert sum(map(len, results)) > 5, "the model must find entities"
    assert all(
        text[item["start"] : item["end"]] == item["word"] for text, row in zip(TEXTS, results) for item in row
    )
    json.dumps(results)
    none = served({"text": LONG, "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}, SHORT)[
        0
    ]
    assert_close(none, reference(LONG, aggregation_strategy="none", ignore_labels=[]))


def test_question_answering_reads_long_contexts_in_parts(tmp_path: Path) -> None:
    served = ServedFolder(save_bert("BertForQuestionAnswering", tmp_path, limit=24))
    context = f"{SHORT} . {LONG} {SHORT} . Ada is in London ."
    request = {"question": "who is it ?", "context": context}
    separate = [served(item)[0] for item in (request, {"question": "where ?", "context": SHORT})]
    batched = served(request, {"inputs": {"question": "where ?", "context": SHORT}})
    assert_close(batched, separate)
    for answer, text in zip(batched, (context, SHORT)):
        assert answer["answer"] == text[answer["start"] : answer["end"]] != ""
    [item] = served({**request, "parameters": {"max_answer_len": 1}})
    assert " " not in item["answer"]

    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    encoded = make_tokenizer()("where ?", SHORT, return_tensors="pt")
    with torch.inference_mode():
        output = model(**encoded)
    inside = torch.tensor([part == 1 for part in encoded.sequence_ids()])
    start, end = (
        x[0].masked_fill(~inside, -torch.inf).softmax(0) for x in (output.start_logits, output.end_logits)
    )
    best = max(start[i] * end[j] for i in range(len(start)) for j in range(i, min(len(start), i + 15)))
    assert batched[1]["score"] == pytest.approx(float(best), abs=1e-5)
    invalid = served({"question": "who ?"}, request, "who ?", {"question": "who " * 20, "context": SHORT})
    assert [getattr(row, "error_code", 200) for row in invalid] == [400, 200, 400, 400]


def test_zero_shot_classification_equals_the_pipeline(tmp_path: Path) -> None:
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    folder = save_bert(
        "BertForSequenceClassification", tmp_path, id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    served = ServedFolder(
        folder, task="zero-shot-classification", parameters={"candidate_labels": ["politics", "bad"]}
    )
    reference = make_pipeline("zero-shot-classification", folder)
    three = {"candidate_labels": ["sport", "politics", "nice"], "hypothesis_template": "it is {} ."}
    each = {"candidate_labels": ["sport", "nice"], "multi_label": True}
    results = served({"inputs": LONG, "parameters": three}, SHORT, {"inputs": SHORT, "parameters": each})
    expected = [
        reference(LONG, **three),
        reference(SHORT, candidate_labels=["politics", "bad"]),
        reference(SHORT, **each),
    ]
    assert_close(results, expected)
    templates = ["no place", "{} {}", "{:>9}", "{!r}", "{0.__class__}", "{1}", "{", "{}" + "x" * 999]
    rows = [{"text": SHORT, "parameters": {"hypothesis_template": template}} for template in templates]
    *invalid, valid = served(*rows, {"text": SHORT, "parameters": {"candidate_labels": ["\ud800"]}}, SHORT)
    assert [row.error_code for row in invalid] == [400] * 9
    assert_close(valid, expected[1])
    [deep] = served({"text": SHORT, "parameters": '{"candidate_labels":' + "[" * 300 + "]" * 300 + "}"})
    assert (deep.error_code, "more than 250 levels" in str(deep)) == (400, True)


def test_feature_extraction_equals_the_pipeline(tmp_path: Path) -> None:
    folder = save_bert("BertModel", tmp_path)
    reference = make_pipeline("feature-extraction", folder)
    assert_close(ServedFolder(folder)(*TEXTS), [reference(text)[0] for text in TEXTS])


def test_lengths_are_tokens_with_bucket_by_length(tmp_path: Path) -> None:
    folder = save_bert("BertForSequenceClassification", tmp_path, limit=12)
    assert ServedFolder(folder).entry.instance.length is None
    served = ServedFolder(folder, bucket_by_length=True)
    length = served.entry.instance.length
    pair = {"inputs": {"text": SHORT, "text_pair": "who ?"}}
    rows = [SHORT, "what ?", b"what ?", {"inputs": SHORT, "target": 1}, pair, LONG]
    assert [length({"body": row}) for row in rows] == [8, 4, 4, 8, 11, 12], (
        "with special tokens, and truncated at the limit"
    )
    answers = served(*rows)
    assert answers[3].error_code == 400, "a prediction has no target"
    assert [length({"body": row}) for row in rows] == [8, 4, 4, 8, 11, 12], (
        "a batch does not change the tokenizer"
    )
    assert answers[1] == answers[2]
    with pytest.raises(PredictionException):
        length({"body": 3})


def test_minilm_embeddings_equal_transformers() -> None:
    """Compare a batch of mixed lengths, and each text alone, with a mean over the mask computed here."""
    revenue = "Revenue rose by four per cent in the third quarter, " * 6
    texts = ["A cat sits on the mat.", "A kitten rests.", revenue, "Hi"]
    served = ServedFolder(MINILM)
    assert served.entry.instance.task_name == "sentence-embedding"
    batched = torch.tensor(served(*texts))
    separate = torch.tensor([served(text)[0] for text in texts])
    model = transformers.AutoModel.from_pretrained(MINILM).eval()
    words = transformers.AutoTokenizer.from_pretrained(MINILM)
    vectors = []
    for text in texts:
        encoded = words(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(model(**encoded).last_hidden_state[0].mean(dim=0))
    expected = torch.nn.functional.normalize(torch.stack(vectors), dim=-1)
    for results in (batched, separate):
        assert results.shape == (4, 384)
        assert torch.allclose(results @ results.T, expected @ expected.T, atol=1e-5)
        assert torch.allclose(results, expected, atol=1e-5)
    [plain] = served({"inputs": texts[0], "parameters": {"normalize": False}})
    assert torch.allclose(torch.tensor(plain), vectors[0], atol=1e-5)
    assert (batched @ batched.T)[0, 1] > 0.5 > (batched @ batched.T)[0, 2]


@pytest.mark.parametrize("pooling", ["cls", "max", "lasttoken", "mean_sqrt_len_tokens"])
def test_poolings_are_read_from_the_folder(tmp_path: Path, pooling: str) -> None:
    folder = save_bert("BertModel", tmp_path)
    (folder / "1_Pooling").mkdir()
    flag = {"cls": "cls_token", "max": "max_tokens"}.get(pooling, pooling)
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{flag}": True}))
    served = ServedFolder(folder, task="sentence-embedding", parameters={"normalize": False})
    states = [torch.tensor(row) for row in ServedFolder(folder, task="feature-extraction")(*TEXTS)]
    pool = {
        "cls": lambda x: x[0],
        "max": lambda x: x.amax(dim=0),
        "lasttoken": lambda x: x[-1],
        "mean_sqrt_len_tokens": lambda x: x.sum(dim=0) / len(x) ** 0.5,
    }[pooling]
    assert_close(served(*TEXTS), [pool(x).tolist() for x in states])
