"""Tests of explanations of generated texts, and of predictions that run beside explanations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from handlers.builtin.causal_lm import CausalLM
from handlers.builtin.llm import LanguageModel
from handlers.context import Context
from handlers.errors import PredictionException
from tests.support.explanation_checks import (
    ENTITIES,
    METHODS,
    approximate_scores,
    assert_sums,
    label_config,
    rejection_message,
)
from tests.support.hf_folders import (
    LONG,
    SHORT,
    ServedFolder,
    explain_row,
    make_tokenizer,
    save_bert,
    save_gpt2,
    save_nllb,
    save_t5,
)

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.slow]


def log_probability(
    served: ServedFolder, prompt: list[int], continuation: list[int], decoder: list[int] | None = None
) -> float:
    """Return the log-probability of a continuation; ``decoder`` holds a decoder's first tokens."""
    model, total = served.entry.instance.model, 0.0
    for position, token in enumerate(continuation):
        with torch.inference_mode():
            if decoder is None:
                output = model(torch.tensor([prompt + continuation[:position]]))
            else:
                output = model(
                    torch.tensor([prompt]),
                    decoder_input_ids=torch.tensor([decoder + continuation[:position]]),
                )
        total += float(output.logits[0, -1].log_softmax(-1)[token])
    return total


@METHODS
def test_a_decoders_continuation_is_explained(
    tmp_path: Path, options: dict[str, Any], tolerance: float
) -> None:
    served = ServedFolder(
        save_gpt2(tmp_path), explain=options, parameters={"max_new_tokens": 5, "return_full_text": False}
    )
    task = served.entry.instance.task
    tokenizer = task.tokenizer
    [answer] = served(SHORT)
    explanation = explain_row(served, data=SHORT.encode())
    assert explanation["target"] == answer["generated_text"]
    assert explanation["tokens"] == SHORT.split()
    assert_sums(explanation, tolerance)
    prompt = tokenizer(SHORT).input_ids
    sequence = served.entry.instance.model.generate(torch.tensor([prompt]), max_new_tokens=5)[0].tolist()
    continuation = [token for token in sequence[len(prompt) :] if token != tokenizer.eos_token_id]
    padded = [tokenizer.pad_token_id] * len(prompt)
    assert approximate_scores(explanation) == [
        log_probability(served, row, continuation) for row in (prompt, padded)
    ]

    given = explain_row(served, data=SHORT.encode(), target=b" . Ada is nice")
    assert given["target"] == ". Ada is nice"
    assert_sums(given, tolerance)
    continuation = tokenizer(". Ada is nice").input_ids
    assert given["score"] == pytest.approx(log_probability(served, prompt, continuation), abs=1e-4)


def test_impossible_continuations_are_rejected(tmp_path: Path) -> None:
    served = ServedFolder(save_gpt2(tmp_path))
    assert "65 tokens, and 64 are explained at most" in rejection_message(
        served, data=SHORT.encode(), target=b"cat " * 65
    )
    long = rejection_message(served, data=SHORT.encode(), target=b"cat " * 43)
    assert "6 tokens, with 43 written, are more than the model's 32" in long
    for invalid in (" ", 7, {"text": "cat"}):
        assert "is no text that could be written" in rejection_message(
            served, body={"inputs": SHORT, "target": invalid}
        )
    assert "the text is empty" in rejection_message(served, data=b" ", target=b"cat")


@METHODS
def test_a_summary_is_explained(tmp_path: Path, options: dict[str, Any], tolerance: float) -> None:
    folder = save_t5(tmp_path, factor=1.0, task_specific_params={"summarization": {"prefix": "it is nice "}})
    served = ServedFolder(folder, task="summarization", explain=options, parameters={"max_new_tokens": 5})
    tokenizer = make_tokenizer()
    [answer] = served(SHORT)
    explanation = explain_row(served, data=SHORT.encode())
    assert explanation["target"] == answer["summary_text"] != ""
    assert explanation["tokens"] == ["[CLS]", "it", "is", "nice", *SHORT.split(), "[SEP]"]
    assert_sums(explanation, tolerance)
    prompt = tokenizer("it is nice " + SHORT).input_ids
    given = explain_row(served, data=SHORT.encode(), target=b"the big dog")
    assert_sums(given, tolerance)
    continuation = tokenizer("the big dog", add_special_tokens=False).input_ids
    padded = [prompt[0], *[0] * (len(prompt) - 2), prompt[-1]]
    assert approximate_scores(given) == [
        log_probability(served, row, continuation, [0]) for row in (prompt, padded)
    ]


def test_a_translation_is_explained(tmp_path: Path) -> None:
    parameters = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn", "max_new_tokens": 6}
    served = ServedFolder(
        save_nllb(tmp_path, std=0.3), task="translation", parameters=parameters, explain={"steps": 500}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, src_lang="eng_Latn")
    prompt, decoder = tokenizer("the cat").input_ids, [2, tokenizer.convert_tokens_to_ids("deu_Latn")]
    sequence = served.entry.instance.model.generate(
        torch.tensor([prompt]), max_new_tokens=6, forced_bos_token_id=decoder[1]
    )[0].tolist()
    assert sequence[:2] == decoder
    continuation = tokenizer("die katze", add_special_tokens=False).input_ids
    for fields, tokens in (
        ({}, [token for token in sequence[2:] if token != 2]),
        ({"target": b"die katze"}, continuation),
    ):
        explanation = explain_row(served, data=b"the cat", **fields)
        assert explanation["tokens"][0] == "eng_Latn" and explanation["attributions"][0] == 0
        assert_sums(explanation, 0.03)
        assert explanation["score"] == pytest.approx(
            log_probability(served, prompt, tokens, decoder), abs=1e-3
        )
    assert explanation["target"] == "die katze"


# Concurrent predictions


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_predictions_run_beside_explanations(tmp_path: Path, compiled: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    config = {"pt2": {"compile": {"enable": True, "backend": backend}}} if compiled else {}
    served = ServedFolder(
        save_bert("BertForTokenClassification", tmp_path, **label_config(ENTITIES)), **config
    )
    model = served.entry.instance.model
    encoded = make_tokenizer()(LONG, return_tensors="pt")
    explaining_thread, concurrent = threading.get_ident(), []

    def predict() -> torch.Tensor:
        with torch.inference_mode():
            return model(**encoded).logits

    def interrupt(module: torch.nn.Module, args: Any) -> None:
        """Run a prediction in another thread whenever the explanation embeds its tokens."""
        if threading.get_ident() == explaining_thread and explaining.is_set():
            with ThreadPoolExecutor(1) as executor:
                concurrent.append(executor.submit(predict).result())

    expected, explaining = predict(), threading.Event()
    compilations = len(graphs)
    assert bool(compilations) is compiled
    hook = model.bert.embeddings.register_forward_pre_hook(interrupt)
    explaining.set()
    explanation = explain_row(served, data=LONG.encode(), steps=b"100", internal_batch_size=b"10")
    explaining.clear()
    hook.remove()
    assert_sums(explanation, 0.5)
    assert len(concurrent) > 10
    assert all(torch.allclose(logits, expected, atol=1e-6) for logits in concurrent)
    assert len(graphs) == compilations, "an explanation compiles nothing"
    assert torch.allclose(predict(), expected, atol=1e-6)
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_generating_handlers_name_the_one_that_explains(language_model: Path, begin: Any) -> None:
    config = {"parameters": {"max_new_tokens": 6}, "explain": {"steps": 300}}
    served = ServedFolder(language_model, **config)
    explanation = explain_row(served, data=b"Once upon")
    assert "".join(explanation["tokens"]).replace("\u0120", " ") == "Once upon"
    assert_sums(explanation, 0.03)

    context, row = (
        Context("m", str(language_model), {}),
        {"body": {"prompt": "Once upon", "max_new_tokens": 2}},
    )
    handler = CausalLM()
    handler.initialize(context)
    assert len(handler.handle([row], begin(context))[0]["tokens"]) == 2
    with pytest.raises(
        PredictionException, match=r"causal_lm explains nothing.*handler=huggingface"
    ) as raised:
        handler.handle([row], begin(context, explain="True"))
    assert raised.value.error_code == 501
    with pytest.raises(PredictionException, match=r"llm explains nothing.*text-generation") as raised:
        asyncio.run(LanguageModel().handle([row], begin(context, explain="True")))
    assert raised.value.error_code == 501
