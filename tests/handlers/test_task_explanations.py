"""Why a model folder's answer is what it is: what is attributed sums to what the model itself says more."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from folders import LONG, MINILM, SHORT, Served, bert, explained, gpt2, nllb, t5, tokenizer

from handlers.causal_lm import CausalLM
from handlers.context import Context, Row
from handlers.errors import PredictionException
from handlers.llm import LanguageModel

pytest.importorskip("captum")
pytestmark = pytest.mark.usefixtures("alike")

ENTITIES = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))
FOLLOWS = {0: "contradiction", 1: "neutral", 2: "entailment"}
# Integrated gradients come near the sum, the nearer the more steps; Shapley values meet it.
METHODS = pytest.mark.parametrize(
    "how, tolerance", [({"steps": 500}, 0.03), ({"method": "shapley", "steps": 2}, 1e-5)], ids=["gradients", "shapley"]
)


def named(labels: dict[int, str]) -> dict[str, Any]:
    return {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}


def sums(found: dict[str, Any], tolerance: float) -> None:
    """A finite attribution for each token, and all of them what the score is more than the baseline's."""
    assert len(found["tokens"]) == len(found["attributions"])
    size = sum(map(abs, found["attributions"]))
    assert size > 0 and abs(found["score"] - found["baseline_score"]) > 1e-4
    assert sum(found["attributions"]) == pytest.approx(found["score"] - found["baseline_score"], abs=tolerance * size)


def output(served: Served, *rows: list[int]) -> Any:
    """What the model itself makes of rows of tokens."""
    ids = torch.tensor(rows)
    with torch.inference_mode():
        return served.entry.instance.model(ids, attention_mask=torch.ones_like(ids))


def between(found: dict[str, Any]) -> Any:
    return pytest.approx([found["score"], found["baseline_score"]], abs=1e-4)


def blank(ids: list[int], words: list[bool]) -> list[int]:
    """A row of tokens in which the words are padding."""
    return [0 if word else token for token, word in zip(ids, words)]


def refused(served: Served, **fields: Any) -> str:
    error = explained(served, **fields)
    assert getattr(error, "error_code", error) == 400
    return error.message


# Entities


@pytest.fixture
def finder(tmp_path: Path) -> Callable[..., Served]:
    folder = bert("BertForTokenClassification", tmp_path, **named(ENTITIES))
    return lambda **config: Served(folder, **config)


@METHODS
def test_the_surest_entity_is_explained(finder: Any, how: dict[str, Any], tolerance: float) -> None:
    served = finder(explain=how)
    [entities] = served(LONG)
    surest = max(entities, key=lambda entity: entity["score"])
    found = explained(served, data=LONG.encode())
    assert found["target"] == surest
    assert found["tokens"] == ["[CLS]", *LONG.split(), "[SEP]"]
    sums(found, tolerance)
    assert found["attributions"][0] == found["attributions"][-1] == 0, "nothing is said of the frame"

    starts = [match.start() for match in re.finditer(r"\S+", LONG)]
    tokens = [1 + i for i, start in enumerate(starts) if surest["start"] <= start < surest["end"]]
    labels = [index for index, label in ENTITIES.items() if label.endswith(surest["entity_group"])]
    ids = tokenizer()(LONG).input_ids
    logits = output(served, ids, [2, *[0] * (len(ids) - 2), 3]).logits
    likeliest = [labels[int(logits[0, token, labels].argmax())] for token in tokens]
    assert between(found) == logits[:, tokens, likeliest].mean(-1).tolist()


def test_entities_by_number_by_label_all_of_them_and_any_token(finder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handlers.tasks.token_classification.MOST_EXPLAINED", 3)
    served = finder(explain={"steps": 5})
    [entities] = served(LONG)
    assert len({entity["entity_group"] for entity in entities}) == 2, "else it would prove nothing"
    every = explained(served, data=LONG.encode(), target="all")
    surest = sorted(entities, key=lambda entity: -entity["score"])
    assert [one["target"] for one in every] == [entity for entity in entities if entity in surest[:3]] != entities
    assert explained(served, data=LONG.encode(), target=b"1")["target"] == entities[1]
    assert explained(served, body={"inputs": LONG, "target": 1})["target"] == entities[1]
    for label in ("PER", "LOC"):
        first = next(entity for entity in surest if entity["entity_group"] == label)
        assert explained(served, data=LONG.encode(), target=label)["target"] == first

    place = {"token": 3, "label": "B-LOC"}
    found = explained(served, body={"inputs": LONG, "target": place, "steps": 500})
    assert found["target"] == place
    sums(found, 0.03)
    ids = tokenizer()(LONG).input_ids
    logits = output(served, ids, [2, *[0] * (len(ids) - 2), 3]).logits
    assert between(found) == logits[:, 3, 3].tolist()
    assert explained(served, data=LONG.encode(), target=json.dumps(place).encode(), steps=b"500") == found
    alone = explained(served, body={"inputs": LONG, "target": {"token": 3}})["target"]
    assert alone == {"token": 3, "label": ENTITIES[int(logits[0, 3].argmax())]}
    none = {"inputs": LONG, "parameters": {"aggregation_strategy": "none"}}
    assert explained(served, body=none)["target"]["entity"] in ENTITIES.values()


def test_an_entity_that_is_not_there(finder: Any) -> None:
    served = finder()
    [entities] = served(SHORT)
    for target in (b"99", b"-1", b"ORG"):
        message = refused(served, data=SHORT.encode(), target=target)
        assert f"{len(entities) - 1}: {entities[-1]['entity_group']} {entities[-1]['word']!r}" in message
    nothing = {"inputs": SHORT, "parameters": {"ignore_labels": list(ENTITIES.values())}}
    nothing["parameters"]["aggregation_strategy"] = "none"
    for target in (None, "all"):
        assert "The text has: none." in refused(served, body={**nothing, "target": target})
    for place in ({"token": 0}, {"token": 99, "label": "O"}, {"token": "a"}, {"place": 1, "token": 1}, {}):
        assert "token is one of those that are no frame, 1 to 6" in refused(
            served, body={"text": SHORT, "target": place}
        )
    for label in ("B-ORG", 5, ["O"], {}):
        message = refused(served, body={"text": SHORT, "target": {"token": 1, "label": label}})
        assert f"no label {label!r}; there are O, B-PER, I-PER" in message


# Answers to questions


@METHODS
def test_both_ends_of_an_answer_are_explained(tmp_path: Path, how: dict[str, Any], tolerance: float) -> None:
    served = Served(bert("BertForQuestionAnswering", tmp_path, limit=64), explain=how)
    asked = {"question": "who is it ?", "context": LONG}
    [answer] = served(asked)
    start, end = explained(served, body=asked)
    tokens = ["[CLS]", *asked["question"].split(), "[SEP]", *LONG.split(), "[SEP]"]
    assert start["tokens"] == end["tokens"] == tokens
    first, last = start["target"]["start"], end["target"]["end"]
    assert " ".join(tokens[first : last + 1]) == answer["answer"]
    encoded = tokenizer(64)(asked["question"], LONG)
    nothing = blank(encoded.input_ids, [part is not None for part in encoded.sequence_ids()])
    own = output(served, encoded.input_ids, nothing)
    for found, logits in ((start, own.start_logits[:, first]), (end, own.end_logits[:, last])):
        sums(found, tolerance)
        assert between(found) == logits.tolist()


def test_an_answer_s_ends_by_name_and_by_place(tmp_path: Path) -> None:
    served = Served(bert("BertForQuestionAnswering", tmp_path, limit=24), explain={"steps": 5})
    context = f"{SHORT} . {LONG} {SHORT} . Ada is in London ."  # it is read in parts
    asked = {"question": "who is it ?", "context": context}
    [answer] = served(asked)
    start, end = explained(served, body=asked)
    place = {**start["target"], **end["target"]}
    assert " ".join(start["tokens"][place["start"] : place["end"] + 1]) == answer["answer"]
    assert len(start["tokens"]) <= 24 and "[PAD]" not in start["tokens"]
    form = {name: text.encode() for name, text in asked.items()}
    assert explained(served, **form, target=b"end") == end
    assert explained(served, data=json.dumps(asked).encode(), target=b'{"start": %d}' % place["start"]) == start
    other = explained(served, body={**asked, "target": {"end": place["end"], "start": 6}})
    assert [one["target"] for one in other] == [{"end": place["end"]}, {"start": 6}] and other[0] == end
    last = len(start["tokens"]) - 2
    for wrong in (0, "middle", {"start": 1}, {"begin": 7}, {"start": last + 1}, {}):
        message = refused(served, body={**asked, "target": wrong})
        assert f'none of start, end and {{"start": {place["start"]}' in message
        assert f"the context's tokens are 6 to {last}." in message
    assert "question" in refused(served, body={"question": "who ?", "target": "start"})


# Labels of the request's own


@METHODS
def test_the_likeliest_label_is_explained(tmp_path: Path, how: dict[str, Any], tolerance: float) -> None:
    served = Served(
        bert("BertForSequenceClassification", tmp_path, **named(FOLLOWS)), task="zero-shot-classification", explain=how
    )
    labels = {"candidate_labels": ["sport", "politics", "nice", "7"], "hypothesis_template": "it is {} ."}
    asked = {"inputs": SHORT, "parameters": labels}
    [answer] = served(asked)
    found = explained(served, body=asked)
    best = answer["labels"][0]
    assert found["target"] == best
    words = SHORT.split()
    assert found["tokens"] == ["[CLS]", *words, "[SEP]", "it", "is", best if best != "7" else "[UNK]", ".", "[SEP]"]
    sums(found, tolerance)
    assert not any(found["attributions"][len(words) + 1 :]), "the hypothesis is the question"
    encoded = tokenizer()(SHORT, f"it is {best} .")
    nothing = blank(encoded.input_ids, [part == 0 for part in encoded.sequence_ids()])
    assert between(found) == output(served, encoded.input_ids, nothing).logits[:, 2].tolist()


def test_any_label_and_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(
        bert("BertForSequenceClassification", tmp_path, **named(FOLLOWS)),
        task="zero-shot-classification",
        explain={"steps": 3},
    )
    labels = ["sport", "politics", "7"]
    asked = {"inputs": SHORT, "parameters": {"candidate_labels": labels}}
    every = explained(served, body={**asked, "target": "all"})
    assert [one["target"] for one in every] == served(asked)[0]["labels"]
    by_label = {one["target"]: one for one in every}
    with monkeypatch.context() as patch:
        patch.setattr("handlers.tasks.zero_shot_classification.MOST_EXPLAINED", 2)
        assert explained(served, body={**asked, "target": "all"}) == every[:2]
    parameters = json.dumps(asked["parameters"]).encode()
    for target, label in ((b"sport", "sport"), (b"1", "politics"), (b"7", "7")):
        assert explained(served, data=SHORT.encode(), parameters=parameters, target=target) == by_label[label]
    for wrong in ("nice", 3, -1, {"label": "sport"}):
        assert "there are sport, politics, 7" in refused(served, body={**asked, "target": wrong})


@METHODS
def test_an_encoder_and_a_decoder_that_read_the_same_text(
    tmp_path: Path, how: dict[str, Any], tolerance: float
) -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, init_std=0.5,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=3, scale_embedding=True, **named(FOLLOWS),
    )  # fmt: skip
    transformers.BartForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    served = Served(tmp_path, task="zero-shot-classification", parameters={"candidate_labels": ["sport", "nice"]})
    found = explained(served, body={"text": SHORT, "method": "integrated_gradients", **how})
    sums(found, tolerance)
    encoded = tokenizer()(SHORT, f"This example is {found['target']}.")
    nothing = blank(encoded.input_ids, [part == 0 for part in encoded.sequence_ids()])
    assert between(found) == output(served, encoded.input_ids, nothing).logits[:, 2].tolist()


def test_a_label_of_the_model_s_own_as_json_has_it(tmp_path: Path) -> None:
    served = Served(bert("BertForSequenceClassification", tmp_path, **named(FOLLOWS)))
    asked = {"text": SHORT, "text_pair": LONG, "steps": 3}
    by_label = explained(served, body={**asked, "target": "entailment"})
    assert explained(served, body={**asked, "target": 2}) == by_label
    assert explained(served, body={"inputs": {"text": SHORT, "text_pair": LONG}, "target": "2", "steps": 3}) == by_label
    for wrong in ("politics", [0], {"label": 0}, 1.5):
        assert "there are contradiction, neutral, entailment" in refused(served, body={**asked, "target": wrong})
    assert "no output 3" in refused(served, body={**asked, "target": 3})


def test_a_model_that_counts_its_places_without_the_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=0, initializer_range=0.8,
    )  # fmt: skip
    transformers.RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    sums(explained(Served(tmp_path), data=SHORT.encode(), steps=b"500"), 0.03)


# Vectors


@METHODS
def test_what_makes_two_texts_alike(how: dict[str, Any], tolerance: float) -> None:
    served = Served(MINILM, explain=how)
    one, other = "A kitten hunts mice.", "The cat catches a mouse."
    vectors = torch.tensor(served(one, other))
    found = explained(served, data=one.encode(), target=other.encode())
    assert found["target"] == other
    assert found["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)
    sums(found, tolerance)
    assert found["tokens"] == ["[CLS]", "a", "kitten", "hunts", "mice", ".", "[SEP]"]
    by_token = dict(zip(found["tokens"], found["attributions"]))
    assert set(sorted(by_token, key=by_token.__getitem__)[-3:]) >= {"kitten", "mice"}
    assert by_token["[CLS]"] == by_token["[SEP]"] == 0
    assert explained(served, body={"inputs": one, "target": other}) == found


def test_a_likeness_needs_two_texts(tmp_path: Path) -> None:
    served = Served(MINILM)
    for fields in (
        {"data": b"A kitten."},
        {"data": b"A kitten.", "target": b" "},
        {"body": {"text": "Hi", "target": 7}},
    ):
        message = refused(served, **fields)
        assert '"inputs" (of a form, data), and the one that it is compared with as "target"' in message
    folder = bert("BertModel", tmp_path)
    vectors = Served(folder)
    means = [torch.tensor(row).mean(0) for row in vectors(SHORT, "7")]
    found = explained(vectors, data=SHORT.encode(), target=b"7", steps=b"500")
    assert found["score"] == pytest.approx(float(torch.cosine_similarity(*means, dim=0)), abs=1e-5)
    sums(found, 0.03)
    whole = Served(folder, explain={"target": "the dog", "steps": 3})
    assert explained(whole, data=SHORT.encode())["target"] == "the dog"


# Texts that are written


def log_probability(served: Served, before: list[int], written: list[int], decoder: list[int] | None = None) -> float:
    """Of what is written, one token after the other; ``decoder`` is where a decoder of its own begins."""
    model, total = served.entry.instance.model, 0.0
    for place, token in enumerate(written):
        with torch.inference_mode():
            if decoder is None:
                output = model(torch.tensor([before + written[:place]]))
            else:
                output = model(torch.tensor([before]), decoder_input_ids=torch.tensor([decoder + written[:place]]))
        total += float(output.logits[0, -1].log_softmax(-1)[token])
    return total


@METHODS
def test_what_had_a_decoder_write_is_explained(tmp_path: Path, how: dict[str, Any], tolerance: float) -> None:
    served = Served(gpt2(tmp_path), explain=how, parameters={"max_new_tokens": 5, "return_full_text": False})
    task = served.entry.instance.task
    words = task.tokenizer
    [answer] = served(SHORT)
    found = explained(served, data=SHORT.encode())
    assert found["target"] == answer["generated_text"]
    assert found["tokens"] == SHORT.split()
    sums(found, tolerance)
    before = words(SHORT).input_ids
    whole = served.entry.instance.model.generate(torch.tensor([before]), max_new_tokens=5)[0].tolist()
    written = [token for token in whole[len(before) :] if token != words.eos_token_id]
    nothing = [words.pad_token_id] * len(before)
    assert between(found) == [log_probability(served, row, written) for row in (before, nothing)]

    given = explained(served, data=SHORT.encode(), target=b" . Ada is nice")
    assert given["target"] == ". Ada is nice"
    sums(given, tolerance)
    written = words(". Ada is nice").input_ids
    assert given["score"] == pytest.approx(log_probability(served, before, written), abs=1e-4)


def test_what_cannot_be_written_is_not_explained(tmp_path: Path) -> None:
    served = Served(gpt2(tmp_path))
    assert "65 tokens, and 64 are explained at most" in refused(served, data=SHORT.encode(), target=b"cat " * 65)
    long = refused(served, data=SHORT.encode(), target=b"cat " * 43)
    assert "6 tokens, with 43 written, are more than the model's 32" in long
    for nothing in (" ", 7, {"text": "cat"}):
        assert "is no text that could be written" in refused(served, body={"inputs": SHORT, "target": nothing})
    assert "the text is empty" in refused(served, data=b" ", target=b"cat")


@METHODS
def test_what_had_an_encoder_and_a_decoder_write_is_explained(
    tmp_path: Path, how: dict[str, Any], tolerance: float
) -> None:
    folder = t5(tmp_path, factor=1.0, task_specific_params={"summarization": {"prefix": "it is nice "}})
    served = Served(folder, task="summarization", explain=how, parameters={"max_new_tokens": 5})
    words = tokenizer()
    [answer] = served(SHORT)
    found = explained(served, data=SHORT.encode())
    assert found["target"] == answer["summary_text"] != ""
    assert found["tokens"] == ["[CLS]", "it", "is", "nice", *SHORT.split(), "[SEP]"]
    sums(found, tolerance)
    before = words("it is nice " + SHORT).input_ids
    given = explained(served, data=SHORT.encode(), target=b"the big dog")
    sums(given, tolerance)
    written = words("the big dog", add_special_tokens=False).input_ids
    nothing = [before[0], *[0] * (len(before) - 2), before[-1]]
    assert between(given) == [log_probability(served, row, written, [0]) for row in (before, nothing)]


def test_a_translation_is_explained_behind_its_language(tmp_path: Path) -> None:
    said = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn", "max_new_tokens": 6}
    served = Served(nllb(tmp_path, std=0.3), task="translation", parameters=said, explain={"steps": 500})
    words = transformers.AutoTokenizer.from_pretrained(tmp_path, src_lang="eng_Latn")
    before, begun = words("the cat").input_ids, [2, words.convert_tokens_to_ids("deu_Latn")]
    whole = served.entry.instance.model.generate(
        torch.tensor([before]), max_new_tokens=6, forced_bos_token_id=begun[1]
    )[0].tolist()
    assert whole[:2] == begun
    written = words("die katze", add_special_tokens=False).input_ids
    for fields, tokens in (({}, [token for token in whole[2:] if token != 2]), ({"target": b"die katze"}, written)):
        found = explained(served, data=b"the cat", **fields)
        assert found["tokens"][0] == "eng_Latn" and found["attributions"][0] == 0
        sums(found, 0.03)
        assert found["score"] == pytest.approx(log_probability(served, before, tokens, begun), abs=1e-3)
    assert found["target"] == "die katze"


# The model beside it


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_predictions_go_on_beside_explanations(tmp_path: Path, compiled: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    config = {"pt2": {"compile": {"enable": True, "backend": backend}}} if compiled else {}
    served = Served(bert("BertForTokenClassification", tmp_path, **named(ENTITIES)), **config)
    model = served.entry.instance.model
    encoded = tokenizer()(LONG, return_tensors="pt")
    here, beside = threading.get_ident(), []

    def predicted() -> torch.Tensor:
        with torch.inference_mode():
            return model(**encoded).logits

    def interrupt(module: torch.nn.Module, args: Any) -> None:
        """Each time that the explanation is about to read its tokens, another thread predicts."""
        if threading.get_ident() == here and explaining.is_set():
            with ThreadPoolExecutor(1) as other:
                beside.append(other.submit(predicted).result())

    wanted, explaining = predicted(), threading.Event()
    compilations = len(graphs)
    assert bool(compilations) is compiled
    hook = model.bert.embeddings.register_forward_pre_hook(interrupt)
    explaining.set()
    found = explained(served, data=LONG.encode(), steps=b"100", internal_batch_size=b"10")
    explaining.clear()
    hook.remove()
    sums(found, 0.5)
    assert len(beside) > 10
    assert all(torch.allclose(logits, wanted, atol=1e-6) for logits in beside)
    assert len(graphs) == compilations, "an explanation is nothing to compile for"
    assert torch.allclose(predicted(), wanted, atol=1e-6)
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_rows_of_one_batch_ask_for_themselves(finder: Any) -> None:
    served = finder(explain={"steps": 3})
    rows = [{"data": LONG, "target": "all"}, {"data": LONG, "target": "ORG"}, {"data": 3}, {"data": SHORT}]
    served.context.begin(list("abcd"), [{"explain": "True"}] * 4, [{}] * 4)
    every, none, nothing, one = served.entry([Row(row) for row in rows], served.context)
    assert isinstance(every, list) and one["tokens"][1:-1] == SHORT.split()
    assert none.error_code == nothing.error_code == 400
    [refusal] = served({"inputs": SHORT, "target": "all"})
    assert refusal.error_code == 400, "a prediction has no target"


def test_without_gradients_tokens_are_taken_away(tmp_path: Path) -> None:
    served = Served(bert("BertForQuestionAnswering", tmp_path, limit=64), optimize={"quantize": "int8"})
    asked = {"question": "where ?", "context": SHORT, "target": "start"}
    found = explained(served, body=asked)
    assert any(found["attributions"][1:3]) and any(found["attributions"][4:-1])
    assert "no gradients" in refused(served, body={**asked, "method": "integrated_gradients"})


def test_handlers_that_only_generate_name_the_one_that_explains(language_model: Path, begin: Any) -> None:
    config = {"parameters": {"max_new_tokens": 6}, "explain": {"steps": 300}}
    served = Served(language_model, **config)
    found = explained(served, data=b"Once upon")
    assert "".join(found["tokens"]).replace("\u0120", " ") == "Once upon"
    sums(found, 0.03)

    context, row = Context("m", str(language_model), {}), {"body": {"prompt": "Once upon", "max_new_tokens": 2}}
    handler = CausalLM()
    handler.initialize(context)
    assert len(handler.handle([row], begin(context))[0]["tokens"]) == 2
    with pytest.raises(PredictionException, match="causal_lm explains nothing.*handler=huggingface") as raised:
        handler.handle([row], begin(context, explain="True"))
    assert raised.value.error_code == 501
    with pytest.raises(PredictionException, match="llm explains nothing.*text-generation") as raised:
        asyncio.run(LanguageModel().handle([row], begin(context, explain="True")))
    assert raised.value.error_code == 501
