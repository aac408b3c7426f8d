"""Tests of explanations of model folders: attributions sum to the difference of the model's scores."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from handlers.context import Row
from tests.support.explanation_checks import (
    ENTITIES,
    METHODS,
    NLI_LABELS,
    approximate_scores,
    assert_sums,
    label_config,
    model_output,
    pad_tokens,
    rejection_message,
)
from tests.support.hf_folders import (
    LONG,
    MINILM,
    SHORT,
    ServedFolder,
    explain_row,
    make_tokenizer,
    save_bert,
)

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.slow]

# Entities


@pytest.fixture
def serve_entities(tmp_path: Path) -> Callable[..., ServedFolder]:
    folder = save_bert("BertForTokenClassification", tmp_path, **label_config(ENTITIES))
    return lambda **config: ServedFolder(folder, **config)


@METHODS
def test_the_most_probable_entity_is_explained(
    serve_entities: Any, options: dict[str, Any], tolerance: float
) -> None:
    served = serve_entities(explain=options)
    [entities] = served(LONG)
    best = max(entities, key=lambda entity: entity["score"])
    explanation = explain_row(served, data=LONG.encode())
    assert explanation["target"] == best
    assert explanation["tokens"] == ["[CLS]", *LONG.split(), "[SEP]"]
    assert_sums(explanation, tolerance)
    assert explanation["attributions"][0] == explanation["attributions"][-1] == 0, (
        "special tokens have no attribution"
    )

    starts = [match.start() for match in re.finditer(r"\S+", LONG)]
    tokens = [1 + i for i, start in enumerate(starts) if best["start"] <= start < best["end"]]
    labels = [index for index, label in ENTITIES.items() if label.endswith(best["entity_group"])]
    ids = make_tokenizer()(LONG).input_ids
    logits = model_output(served, ids, [2, *[0] * (len(ids) - 2), 3]).logits
    most_probable = [labels[int(logits[0, token, labels].argmax())] for token in tokens]
    assert approximate_scores(explanation) == logits[:, tokens, most_probable].mean(-1).tolist()


def test_entities_are_selected_by_number_label_and_token(
    serve_entities: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handlers.tasks.token_classification.MAX_EXPLANATIONS", 3)
    served = serve_entities(explain={"steps": 5})
    [entities] = served(LONG)
    assert len({entity["entity_group"] for entity in entities}) == 2, "the test needs entities of two groups"
    every = explain_row(served, data=LONG.encode(), target="all")
    by_score = sorted(entities, key=lambda entity: -entity["score"])
    assert (
        [explanation["target"] for explanation in every]
        == [entity for entity in entities if entity in by_score[:3]]
        != entities
    )
    assert explain_row(served, data=LONG.encode(), target=b"1")["target"] == entities[1]
    assert explain_row(served, body={"inputs": LONG, "target": 1})["target"] == entities[1]
    for label in ("PER", "LOC"):
        first = next(entity for entity in by_score if entity["entity_group"] == label)
        assert explain_row(served, data=LONG.encode(), target=label)["target"] == first

    selector = {"token": 3, "label": "B-LOC"}
    explanation = explain_row(served, body={"inputs": LONG, "target": selector, "steps": 500})
    assert explanation["target"] == selector
    assert_sums(explanation, 0.03)
    ids = make_tokenizer()(LONG).input_ids
    logits = model_output(served, ids, [2, *[0] * (len(ids) - 2), 3]).logits
    assert approximate_scores(explanation) == logits[:, 3, 3].tolist()
    assert (
        explain_row(served, data=LONG.encode(), target=json.dumps(selector).encode(), steps=b"500")
        == explanation
    )
    default_label = explain_row(served, body={"inputs": LONG, "target": {"token": 3}})["target"]
    assert default_label == {"token": 3, "label": ENTITIES[int(logits[0, 3].argmax())]}
    unaggregated = {"inputs": LONG, "parameters": {"aggregation_strategy": "none"}}
    assert explain_row(served, body=unaggregated)["target"]["entity"] in ENTITIES.values()


def test_unknown_entities_are_rejected(serve_entities: Any) -> None:
    served = serve_entities()
    [entities] = served(SHORT)
    for target in (b"99", b"-1", b"ORG"):
        message = rejection_message(served, data=SHORT.encode(), target=target)
        assert f"{len(entities) - 1}: {entities[-1]['entity_group']} {entities[-1]['word']!r}" in message
    without_entities = {"inputs": SHORT, "parameters": {"ignore_labels": list(ENTITIES.values())}}
    without_entities["parameters"]["aggregation_strategy"] = "none"
    for target in (None, "all"):
        assert "The text has: none." in rejection_message(served, body={**without_entities, "target": target})
    for selector in ({"token": 0}, {"token": 99, "label": "O"}, {"token": "a"}, {"place": 1, "token": 1}, {}):
        assert "token is one of those that are no frame, 1 to 6" in rejection_message(
            served, body={"text": SHORT, "target": selector}
        )
    for label in ("B-ORG", 5, ["O"], {}):
        message = rejection_message(served, body={"text": SHORT, "target": {"token": 1, "label": label}})
        assert f"no label {label!r}; there are O, B-PER, I-PER" in message


# Question answering


@METHODS
def test_both_ends_of_an_answer_are_explained(
    tmp_path: Path, options: dict[str, Any], tolerance: float
) -> None:
    served = ServedFolder(save_bert("BertForQuestionAnswering", tmp_path, limit=64), explain=options)
    request = {"question": "who is it ?", "context": LONG}
    [answer] = served(request)
    start, end = explain_row(served, body=request)
    tokens = ["[CLS]", *request["question"].split(), "[SEP]", *LONG.split(), "[SEP]"]
    assert start["tokens"] == end["tokens"] == tokens
    first, last = start["target"]["start"], end["target"]["end"]
    assert " ".join(tokens[first : last + 1]) == answer["answer"]
    encoded = make_tokenizer(64)(request["question"], LONG)
    padded = pad_tokens(encoded.input_ids, [part is not None for part in encoded.sequence_ids()])
    expected = model_output(served, encoded.input_ids, padded)
    for explanation, logits in (
        (start, expected.start_logits[:, first]),
        (end, expected.end_logits[:, last]),
    ):
        assert_sums(explanation, tolerance)
        assert approximate_scores(explanation) == logits.tolist()


def test_answer_ends_are_selected_by_name_and_token(tmp_path: Path) -> None:
    served = ServedFolder(save_bert("BertForQuestionAnswering", tmp_path, limit=24), explain={"steps": 5})
    context = f"{SHORT} . {LONG} {SHORT} . Ada is in London ."  # long enough for several windows
    request = {"question": "who is it ?", "context": context}
    [answer] = served(request)
    start, end = explain_row(served, body=request)
    ends = {**start["target"], **end["target"]}
    assert " ".join(start["tokens"][ends["start"] : ends["end"] + 1]) == answer["answer"]
    assert len(start["tokens"]) <= 24 and "[PAD]" not in start["tokens"]
    form = {name: text.encode() for name, text in request.items()}
    assert explain_row(served, **form, target=b"end") == end
    assert (
        explain_row(served, data=json.dumps(request).encode(), target=b'{"start": %d}' % ends["start"])
        == start
    )
    other = explain_row(served, body={**request, "target": {"end": ends["end"], "start": 6}})
    assert [explanation["target"] for explanation in other] == [{"end": ends["end"]}, {"start": 6}] and other[
        0
    ] == end
    last = len(start["tokens"]) - 2
    for invalid in (0, "middle", {"start": 1}, {"begin": 7}, {"start": last + 1}, {}):
        message = rejection_message(served, body={**request, "target": invalid})
        assert f'none of start, end and {{"start": {ends["start"]}' in message
        assert f"the context's tokens are 6 to {last}." in message
    assert "question" in rejection_message(served, body={"question": "who ?", "target": "start"})


# Zero-shot classification


@METHODS
def test_the_best_label_is_explained(tmp_path: Path, options: dict[str, Any], tolerance: float) -> None:
    served = ServedFolder(
        save_bert("BertForSequenceClassification", tmp_path, **label_config(NLI_LABELS)),
        task="zero-shot-classification",
        explain=options,
    )
    labels = {"candidate_labels": ["sport", "politics", "nice", "7"], "hypothesis_template": "it is {} ."}
    request = {"inputs": SHORT, "parameters": labels}
    [answer] = served(request)
    explanation = explain_row(served, body=request)
    best = answer["labels"][0]
    assert explanation["target"] == best
    words = SHORT.split()
    assert explanation["tokens"] == [
        "[CLS]",
        *words,
        "[SEP]",
        "it",
        "is",
        best if best != "7" else "[UNK]",
        ".",
        "[SEP]",
    ]
    assert_sums(explanation, tolerance)
    assert not any(explanation["attributions"][len(words) + 1 :]), "the hypothesis has no attribution"
    encoded = make_tokenizer()(SHORT, f"it is {best} .")
    padded = pad_tokens(encoded.input_ids, [part == 0 for part in encoded.sequence_ids()])
    assert (
        approximate_scores(explanation)
        == model_output(served, encoded.input_ids, padded).logits[:, 2].tolist()
    )


def test_labels_are_selected_by_name_number_and_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = ServedFolder(
        save_bert("BertForSequenceClassification", tmp_path, **label_config(NLI_LABELS)),
        task="zero-shot-classification",
        explain={"steps": 3},
    )
    labels = ["sport", "politics", "7"]
    request = {"inputs": SHORT, "parameters": {"candidate_labels": labels}}
    every = explain_row(served, body={**request, "target": "all"})
    assert [explanation["target"] for explanation in every] == served(request)[0]["labels"]
    by_label = {explanation["target"]: explanation for explanation in every}
    with monkeypatch.context() as patch:
        patch.setattr("handlers.tasks.zero_shot_classification.MAX_EXPLANATIONS", 2)
        assert explain_row(served, body={**request, "target": "all"}) == every[:2]
    parameters = json.dumps(request["parameters"]).encode()
    for target, label in ((b"sport", "sport"), (b"1", "politics"), (b"7", "7")):
        assert (
            explain_row(served, data=SHORT.encode(), parameters=parameters, target=target) == by_label[label]
        )
    for invalid in ("nice", 3, -1, {"label": "sport"}):
        assert "there are sport, politics, 7" in rejection_message(
            served, body={**request, "target": invalid}
        )


@METHODS
def test_an_encoder_and_a_decoder_share_the_text(
    tmp_path: Path, options: dict[str, Any], tolerance: float
) -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        init_std=0.5, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        decoder_start_token_id=3, scale_embedding=True, **label_config(NLI_LABELS),
    )  # fmt: skip
    transformers.BartForSequenceClassification(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    served = ServedFolder(
        tmp_path, task="zero-shot-classification", parameters={"candidate_labels": ["sport", "nice"]}
    )
    explanation = explain_row(served, body={"text": SHORT, "method": "integrated_gradients", **options})
    assert_sums(explanation, tolerance)
    encoded = make_tokenizer()(SHORT, f"This example is {explanation['target']}.")
    padded = pad_tokens(encoded.input_ids, [part == 0 for part in encoded.sequence_ids()])
    assert (
        approximate_scores(explanation)
        == model_output(served, encoded.input_ids, padded).logits[:, 2].tolist()
    )


def test_json_targets_select_a_label(tmp_path: Path) -> None:
    served = ServedFolder(save_bert("BertForSequenceClassification", tmp_path, **label_config(NLI_LABELS)))
    request = {"text": SHORT, "text_pair": LONG, "steps": 3}
    by_label = explain_row(served, body={**request, "target": "entailment"})
    assert explain_row(served, body={**request, "target": 2}) == by_label
    assert (
        explain_row(served, body={"inputs": {"text": SHORT, "text_pair": LONG}, "target": "2", "steps": 3})
        == by_label
    )
    for invalid in ("politics", [0], {"label": 0}, 1.5):
        assert "there are contradiction, neutral, entailment" in rejection_message(
            served, body={**request, "target": invalid}
        )
    assert "no output 3" in rejection_message(served, body={**request, "target": 3})


def test_roberta_positions_start_behind_the_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=0, initializer_range=0.8,
    )  # fmt: skip
    transformers.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert_sums(explain_row(ServedFolder(tmp_path), data=SHORT.encode(), steps=b"500"), 0.03)


# Embeddings


@pytest.mark.nightly
@METHODS
def test_similarity_is_explained_by_token(options: dict[str, Any], tolerance: float) -> None:
    served = ServedFolder(MINILM, explain=options)
    text, other = "A kitten hunts mice.", "The cat catches a mouse."
    vectors = torch.tensor(served(text, other))
    explanation = explain_row(served, data=text.encode(), target=other.encode())
    assert explanation["target"] == other
    assert explanation["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)
    assert_sums(explanation, tolerance)
    assert explanation["tokens"] == ["[CLS]", "a", "kitten", "hunts", "mice", ".", "[SEP]"]
    by_token = dict(zip(explanation["tokens"], explanation["attributions"]))
    assert set(sorted(by_token, key=by_token.__getitem__)[-3:]) >= {"kitten", "mice"}
    assert by_token["[CLS]"] == by_token["[SEP]"] == 0
    assert explain_row(served, body={"inputs": text, "target": other}) == explanation


def test_similarity_needs_two_texts(tmp_path: Path) -> None:
    served = ServedFolder(MINILM)
    for fields in (
        {"data": b"A kitten."},
        {"data": b"A kitten.", "target": b" "},
        {"body": {"text": "Hi", "target": 7}},
    ):
        message = rejection_message(served, **fields)
        assert '"inputs" (of a form, data), and the one that it is compared with as "target"' in message
    folder = save_bert("BertModel", tmp_path)
    vectors = ServedFolder(folder)
    means = [torch.tensor(row).mean(0) for row in vectors(SHORT, "7")]
    explanation = explain_row(vectors, data=SHORT.encode(), target=b"7", steps=b"500")
    assert explanation["score"] == pytest.approx(float(torch.cosine_similarity(*means, dim=0)), abs=1e-5)
    assert_sums(explanation, 0.03)
    configured = ServedFolder(folder, explain={"target": "the dog", "steps": 3})
    assert explain_row(configured, data=SHORT.encode())["target"] == "the dog"


def test_rows_of_a_batch_have_their_own_targets(serve_entities: Any) -> None:
    served = serve_entities(explain={"steps": 3})
    rows = [{"data": LONG, "target": "all"}, {"data": LONG, "target": "ORG"}, {"data": 3}, {"data": SHORT}]
    served.context.begin(list("abcd"), [{"explain": "True"}] * 4, [{}] * 4)
    every, unknown, invalid, default = served.entry([Row(row) for row in rows], served.context)
    assert isinstance(every, list) and default["tokens"][1:-1] == SHORT.split()
    assert unknown.error_code == invalid.error_code == 400
    [error] = served({"inputs": SHORT, "target": "all"})
    assert error.error_code == 400, "a prediction has no target"


def test_tokens_are_perturbed_without_gradients(tmp_path: Path) -> None:
    served = ServedFolder(
        save_bert("BertForQuestionAnswering", tmp_path, limit=64), optimize={"quantize": "int8"}
    )
    request = {"question": "where ?", "context": SHORT, "target": "start"}
    explanation = explain_row(served, body=request)
    assert any(explanation["attributions"][1:3]) and any(explanation["attributions"][4:-1])
    assert "no gradients" in rejection_message(served, body={**request, "method": "integrated_gradients"})
