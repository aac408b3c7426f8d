"""Model folders without code: tiny random models of every task, answered as transformers' own pipelines answer."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from folders import LONG, MINILM, SHORT, TEXTS, TINY, Served, bert, explained, gpt2, nllb, t5, tokenizer
from PIL import Image

import handlers
from handlers import HandlerLoadError, PredictionException, explanations, tasks
from handlers.context import Context, Row

pytestmark = pytest.mark.usefixtures("alike")


def image(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def close(found: Any, wanted: Any) -> None:
    """Equal, numbers within 1e-5."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            close(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            close(one, other)
    elif isinstance(wanted, (float, np.floating)):
        assert found == pytest.approx(float(wanted), abs=1e-5)
    else:
        assert found == wanted


def pipeline(task: str, folder: Path, **more: Any) -> Callable[..., Any]:
    return transformers.pipeline(task, model=str(folder), device="cpu", **more)


def test_text_classification(tmp_path: Path) -> None:
    folder = bert("BertForSequenceClassification", tmp_path, num_labels=3)
    served, own = Served(folder), pipeline("text-classification", tmp_path)
    close(served(*TEXTS), [own(text)[0] for text in TEXTS])
    close(served({"inputs": SHORT, "parameters": {"top_k": 2}}, LONG), [own([SHORT], top_k=2)[0], own(LONG)[0]])
    pair = {"text": SHORT, "text_pair": "who is it ?"}
    close(served(pair, SHORT, {"inputs": pair}), [own([pair])[0], own(SHORT)[0], own([pair])[0]])
    [answer] = served({"text": SHORT, "parameters": {"function_to_apply": "none"}})
    close(answer, own(SHORT, function_to_apply="none")[0])
    [one] = served({"text": SHORT, "parameters": {"top_k": 1}})
    assert len(one) == 1, "who says how many gets a list"


def test_a_folder_is_optimised_as_its_configuration_asks(tmp_path: Path) -> None:
    folder = bert("BertForSequenceClassification", tmp_path, num_labels=3)
    plain, int8 = Served(folder)(*TEXTS), Served(folder, optimize={"quantize": "int8"})(*TEXTS)
    assert int8 != plain
    assert [row["score"] for row in int8] == pytest.approx([row["score"] for row in plain], abs=0.1)


def test_a_text_beyond_the_limit_is_cut_off(tmp_path: Path) -> None:
    served = Served(bert("BertForSequenceClassification", tmp_path, limit=8))
    cut, whole, other = served("cat " * 500, "cat " * 6, "cat " * 5)
    close(cut, whole)
    assert other["score"] != pytest.approx(whole["score"], abs=1e-5)


def test_several_labels_and_none(tmp_path: Path) -> None:
    served = Served(bert("BertForSequenceClassification", tmp_path, problem_type="multi_label_classification"))
    close(served(SHORT), pipeline("text-classification", tmp_path)(SHORT))


def test_token_classification(tmp_path: Path) -> None:
    labels = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))
    folder = bert("BertForTokenClassification", tmp_path, id2label=labels, label2id={v: k for k, v in labels.items()})
    served, own = Served(folder), pipeline("token-classification", folder)
    found = served(*TEXTS)
    close(found, [own(text, aggregation_strategy="simple") for text in TEXTS])
    assert sum(map(len, found)) > 5, "a model that finds nothing would prove nothing"
    assert all(text[one["start"] : one["end"]] == one["word"] for text, row in zip(TEXTS, found) for one in row)
    json.dumps(found)
    none = served({"text": LONG, "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}, SHORT)[0]
    close(none, own(LONG, aggregation_strategy="none", ignore_labels=[]))


def test_question_answering_reads_long_contexts_in_parts(tmp_path: Path) -> None:
    served = Served(bert("BertForQuestionAnswering", tmp_path, limit=24))
    context = f"{SHORT} . {LONG} {SHORT} . Ada is in London ."
    asked = {"question": "who is it ?", "context": context}
    alone = [served(one)[0] for one in (asked, {"question": "where ?", "context": SHORT})]
    together = served(asked, {"inputs": {"question": "where ?", "context": SHORT}})
    close(together, alone)
    for answer, text in zip(together, (context, SHORT)):
        assert answer["answer"] == text[answer["start"] : answer["end"]] != ""
    [one] = served({**asked, "parameters": {"max_answer_len": 1}})
    assert " " not in one["answer"]

    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    encoded = tokenizer()("where ?", SHORT, return_tensors="pt")
    with torch.inference_mode():
        output = model(**encoded)
    inside = torch.tensor([part == 1 for part in encoded.sequence_ids()])
    start, end = (x[0].masked_fill(~inside, -torch.inf).softmax(0) for x in (output.start_logits, output.end_logits))
    best = max(start[i] * end[j] for i in range(len(start)) for j in range(i, min(len(start), i + 15)))
    assert together[1]["score"] == pytest.approx(float(best), abs=1e-5)
    bad = served({"question": "who ?"}, asked, "who ?", {"question": "who " * 20, "context": SHORT})
    assert [getattr(row, "error_code", 200) for row in bad] == [400, 200, 400, 400]


def test_zero_shot_classification(tmp_path: Path) -> None:
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    folder = bert(
        "BertForSequenceClassification", tmp_path, id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    served = Served(folder, task="zero-shot-classification", parameters={"candidate_labels": ["politics", "bad"]})
    own = pipeline("zero-shot-classification", folder)
    three = {"candidate_labels": ["sport", "politics", "nice"], "hypothesis_template": "it is {} ."}
    each = {"candidate_labels": ["sport", "nice"], "multi_label": True}
    found = served({"inputs": LONG, "parameters": three}, SHORT, {"inputs": SHORT, "parameters": each})
    wanted = [own(LONG, **three), own(SHORT, candidate_labels=["politics", "bad"]), own(SHORT, **each)]
    close(found, wanted)
    bad = served({"text": SHORT, "parameters": {"hypothesis_template": "no place"}}, SHORT)
    assert bad[0].error_code == 400
    close(bad[1], wanted[1])


def test_feature_extraction(tmp_path: Path) -> None:
    folder = bert("BertModel", tmp_path)
    own = pipeline("feature-extraction", folder)
    close(Served(folder)(*TEXTS), [own(text)[0] for text in TEXTS])


def test_a_decoder_without_a_padding_token_embeds_and_writes(tmp_path: Path) -> None:
    gpt2(tmp_path)
    served, own = Served(tmp_path), pipeline("text-generation", tmp_path)
    ask = {"max_new_tokens": 6}
    less = {"text": SHORT, "parameters": {"max_new_tokens": 3}}
    found = served(*({"inputs": text, "parameters": ask} for text in TEXTS), less)
    wanted = [own(text, do_sample=False, **ask)[0] for text in TEXTS]
    assert found[:3] == wanted
    assert wanted[0]["generated_text"].startswith(found[3]["generated_text"])
    [rest] = served({"inputs": SHORT, "parameters": {**ask, "return_full_text": False}})
    assert SHORT + rest["generated_text"] == wanted[0]["generated_text"]
    bad = served({"text": LONG, "parameters": {"max_new_tokens": 40}}, "", {"text": SHORT, "parameters": ask})
    assert [getattr(row, "error_code", 200) for row in bad] == [400, 400, 200]
    chat = served({"messages": [{"role": "user", "content": "hello"}]}, {"prompt": "hello"})
    assert all(row.error_code == 400 and "register the same folder with handler=llm" in row.message for row in chat)

    embedded = Served(tmp_path, task="sentence-embedding")
    close(embedded(*TEXTS), [embedded(text)[0] for text in TEXTS])


@pytest.mark.parametrize(
    "task, key",
    [
        ("text2text-generation", "generated_text"),
        ("summarization", "summary_text"),
        ("translation", "translation_text"),
    ],
)
def test_sequence_to_sequence(tmp_path: Path, task: str, key: str) -> None:
    prefix = "it is nice " if task == "summarization" else ""
    t5(tmp_path, task_specific_params={task: {"prefix": prefix}})
    model, words = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval(), tokenizer()
    found = Served(tmp_path, task=task, parameters={"max_new_tokens": 7})(*TEXTS)
    if task == "translation":
        [foreign] = Served(tmp_path, task=task)({"inputs": SHORT, "parameters": {"src_lang": "de"}})
        assert foreign.error_code == 400 and "one pair of languages" in foreign.message
    for text, answer in zip(TEXTS, found):
        encoded = words(prefix + text, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**encoded, max_new_tokens=7)
        assert answer == {key: words.decode(ids[0], skip_special_tokens=True)}
    assert any(answer[key] for answer in found)


def test_languages_that_a_prefix_says(tmp_path: Path) -> None:
    prefixes = {("en", "de"): "this is red ", ("en", "fr"): "who sat in Paris ", ("fr", "en"): "bad politics ? "}
    specific = {f"translation_{one}_to_{two}": {"prefix": prefix} for (one, two), prefix in prefixes.items()}
    folder = t5(tmp_path, task_specific_params={**specific, "summarization": {"prefix": "nice "}})
    served = Served(folder, task="translation", parameters={"max_new_tokens": 7})

    def asked(**languages: str) -> dict[str, Any]:
        return {"inputs": SHORT, "parameters": languages}

    found = served(*(asked(src_lang=one, tgt_lang=two) for one, two in prefixes), asked(tgt_lang="de"), SHORT)
    plain = Served(folder, task="text2text-generation", parameters={"max_new_tokens": 7})
    wanted = [answer["generated_text"] for answer in plain(*(prefix + SHORT for prefix in prefixes.values()), SHORT)]
    assert [answer["translation_text"] for answer in found] == [*wanted[:3], wanted[0], wanted[3]]
    assert len(set(wanted)) == 4
    assert served({"inputs": SHORT, "parameters": {"prefix": "this is red ", "tgt_lang": "fr"}}) == found[:1]

    many, none = served(asked(src_lang="en"), asked(src_lang="de", tgt_lang="fr"))
    assert many.error_code == none.error_code == 400
    assert "src_lang 'en' and tgt_lang None are too little; it has en to de, en to fr, fr to en." in many.message
    assert "src_lang 'de' and tgt_lang 'fr' are no pair of this model; it has en to de" in none.message
    assert "tgt_lang 'klingon' are no pair" in refused(folder, "translation", parameters={"tgt_lang": "klingon"})
    usual = Served(folder, task="translation", parameters={"max_new_tokens": 7, "src_lang": "en", "tgt_lang": "fr"})
    assert usual(SHORT, asked(tgt_lang="de")) == [found[1], found[0]]


@pytest.mark.parametrize(
    "config",
    [{"prefix": "this is red "}, {"task_specific_params": {"translation_en_to_de": {"prefix": "this is red "}}}],
)
def test_the_one_prefix_of_a_folder_stands_before_every_text(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = t5(tmp_path, **config)
    before, without = "this is red " + SHORT, {"prefix": ""}
    [found] = Served(folder, task="translation")(SHORT)
    assert found == Served(folder, task="translation")({"inputs": before, "parameters": without})[0]
    assert found != Served(folder, task="translation")({"inputs": SHORT, "parameters": without})[0]


def test_languages_of_a_translation(tmp_path: Path) -> None:
    nllb(tmp_path)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()

    def wanted(text: str, source: str, target: str) -> dict[str, str]:
        words.src_lang = source
        ids = model.generate(
            **words(text, return_tensors="pt"), max_new_tokens=8,
            forced_bos_token_id=words.convert_tokens_to_ids(target),
        )  # fmt: skip
        return {"translation_text": words.decode(ids[0], skip_special_tokens=True)}

    def asked(text: str, **languages: str) -> dict[str, Any]:
        return {"inputs": text, "parameters": languages}

    served = Served(tmp_path, task="translation", parameters={"max_new_tokens": 8, "src_lang": "eng_Latn"})
    german, french = {"tgt_lang": "deu_Latn"}, {"src_lang": "deu_Latn", "tgt_lang": "fra_Latn"}
    found = served(asked("the cat", **german), asked("die katze", **french), asked("a dog", **german))
    assert found == [
        wanted("the cat", "eng_Latn", "deu_Latn"),
        wanted("die katze", "deu_Latn", "fra_Latn"),
        wanted("a dog", "eng_Latn", "deu_Latn"),
    ]
    assert served(asked("the cat", **german))[0] != served(asked("the cat", tgt_lang="fra_Latn"))[0]
    silent, wrong, token = served("the cat", asked("the cat", tgt_lang="deu_Latm"), asked("the cat", tgt_lang="a"))
    assert [row.error_code for row in (silent, wrong, token)] == [400] * 3
    assert "say which one with tgt_lang" in silent.message
    assert "'deu_Latm' is no language of this model; did you mean 'deu_Latn'?" in wrong.message
    assert "'klingon' is no language" in refused(tmp_path, "translation", parameters={"tgt_lang": "klingon"})


def test_lengths_are_tokens_where_rows_of_similar_length_run_together(tmp_path: Path) -> None:
    folder = bert("BertForSequenceClassification", tmp_path, limit=12)
    assert Served(folder).entry.instance.length is None
    served = Served(folder, bucket_by_length=True)
    length = served.entry.instance.length
    pair = {"inputs": {"text": SHORT, "text_pair": "who ?"}}
    rows = [SHORT, "what ?", b"what ?", {"inputs": SHORT, "target": 1}, pair, LONG]
    assert [length({"body": row}) for row in rows] == [8, 4, 4, 8, 11, 12], "with the frame, and cut at the limit"
    answers = served(*rows)
    assert answers[3].error_code == 400, "an explanation has a target, and a prediction none"
    assert [length({"body": row}) for row in rows] == [8, 4, 4, 8, 11, 12], "whatever the batches do to the tokenizer"
    assert answers[1] == answers[2]
    with pytest.raises(PredictionException):
        length({"body": 3})


def test_the_limit_of_pixels_is_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = vit(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    [refusal] = Served(folder)(bytearray(png(image(0))))
    assert refusal.error_code == 400 and "limit_max_image_pixels: false lifts this limit" in refusal.message
    context = Context("m", str(folder), {}, limit_max_image_pixels=False)
    entry = handlers.load("huggingface", folder, {})
    entry.initialize(context)
    context.begin(["1"], [{}], [{}])
    [answer] = entry([Row({"body": bytearray(png(image(0)))})], context)
    assert len(answer) == 5


def vit(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=7, initializer_range=0.8, **TINY)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_image_classification(tmp_path: Path) -> None:
    served, own = Served(vit(tmp_path)), pipeline("image-classification", tmp_path)
    pictures = [image(0), image(1, 64, 20)]
    coded = {"inputs": base64.b64encode(png(pictures[1])).decode(), "parameters": {"top_k": 2}}
    broken, first, second = served(bytearray(b"no image"), bytearray(png(pictures[0])), coded)
    assert isinstance(broken, PredictionException) and broken.error_code == 400
    close([first, second], [own(pictures[0]), own(pictures[1], top_k=2)])
    row = Row({"body": bytearray(png(pictures[0]))})
    row.prepared = served.entry.instance.prepare_row(row)
    row["body"] = b"is not looked at again"
    served.context.begin(["1"], [{}], [{}])
    close(served.entry([row], served.context), [first])


def yolos(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.YolosConfig(
        image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=3, initializer_range=0.2, **TINY
    )
    transformers.YolosForObjectDetection(config).save_pretrained(folder)
    transformers.YolosImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_object_detection(tmp_path: Path) -> None:
    yolos(tmp_path)
    pictures = [image(0), image(1)]
    own = pipeline("object-detection", tmp_path)
    rows = [{"inputs": base64.b64encode(png(p)).decode(), "parameters": {"threshold": 0.01}} for p in pictures]
    found = Served(tmp_path)(*rows, bytearray(png(pictures[0])))
    close(found, [*(own(picture, threshold=0.01) for picture in pictures), own(pictures[0])])
    assert found[0]


def segformer(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3, initializer_range=0.8,
    )  # fmt: skip
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(folder)
    transformers.SegformerImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_image_segmentation(tmp_path: Path) -> None:
    segformer(tmp_path)
    own = pipeline("image-segmentation", tmp_path)
    pictures = [image(0), image(1, 20, 50)]
    for answer, picture in zip(Served(tmp_path)(*(bytearray(png(p)) for p in pictures)), pictures):
        for segment, wanted in zip(answer, own(picture), strict=True):
            mask = Image.open(io.BytesIO(base64.b64decode(segment.pop("mask"))))
            assert np.array_equal(np.asarray(mask), np.asarray(wanted.pop("mask")))
            assert mask.size == picture.size and segment == wanted


def test_panoptic_instance_and_semantic_segments(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ones = [1, 1, 1, 1]
    backbone = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=ones, num_heads=ones, window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        dim_feedforward=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=6, num_labels=3,
        init_std=1.0, init_xavier_std=3.0,
    )  # fmt: skip
    transformers.Mask2FormerForUniversalSegmentation(config).save_pretrained(tmp_path)
    processor = transformers.Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}, ignore_index=255)
    processor.save_pretrained(tmp_path)
    own, served = pipeline("image-segmentation", tmp_path), Served(tmp_path)
    pictures = [image(0), image(1, 20, 50)]
    limits = {"threshold": 0.3, "mask_threshold": 0.3, "overlap_mask_area_threshold": 0.1}
    asked = [(picture, kind) for kind in ("panoptic", "instance", "semantic") for picture in pictures]
    rows = [
        {"inputs": base64.b64encode(png(picture)).decode(), "parameters": {"subtask": kind, **limits}}
        for picture, kind in asked
    ]
    found, kinds = served(*rows), set()
    for answer, (picture, kind) in zip(found, asked, strict=True):
        for segment, wanted in zip(answer, own(picture, subtask=kind, **limits), strict=True):
            mask = Image.open(io.BytesIO(base64.b64decode(segment.pop("mask"))))
            assert np.array_equal(np.asarray(mask), np.asarray(wanted.pop("mask"))) and mask.size == picture.size
            close(segment, wanted)
            kinds.add(kind)
    assert kinds == {"panoptic", "instance", "semantic"}, "some segments of each"
    [whole] = Served(segformer(tmp_path / "classes"))({**rows[0], "parameters": {"subtask": "panoptic"}})
    assert whole.error_code == 400 and "no panoptic segments; the subtask may be semantic" in whole.message


# Real weights.


def test_minilm_embeds_as_transformers_itself_does() -> None:
    """Mixed lengths in one batch, and each alone, against a mean over the mask written down here."""
    revenue = "Revenue rose by four per cent in the third quarter, " * 6
    texts = ["A cat sits on the mat.", "A kitten rests.", revenue, "Hi"]
    served = Served(MINILM)
    assert served.entry.instance.task_name == "sentence-embedding"
    together = torch.tensor(served(*texts))
    alone = torch.tensor([served(text)[0] for text in texts])
    model = transformers.AutoModel.from_pretrained(MINILM).eval()
    words = transformers.AutoTokenizer.from_pretrained(MINILM)
    vectors = []
    for text in texts:
        encoded = words(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            vectors.append(model(**encoded).last_hidden_state[0].mean(dim=0))
    wanted = torch.nn.functional.normalize(torch.stack(vectors), dim=-1)
    for found in (together, alone):
        assert found.shape == (4, 384)
        assert torch.allclose(found @ found.T, wanted @ wanted.T, atol=1e-5)
        assert torch.allclose(found, wanted, atol=1e-5)
    [plain] = served({"inputs": texts[0], "parameters": {"normalize": False}})
    assert torch.allclose(torch.tensor(plain), vectors[0], atol=1e-5)
    assert (together @ together.T)[0, 1] > 0.5 > (together @ together.T)[0, 2]


@pytest.mark.parametrize("pooling", ["cls", "max", "lasttoken", "mean_sqrt_len_tokens"])
def test_other_poolings(tmp_path: Path, pooling: str) -> None:
    folder = bert("BertModel", tmp_path)
    (folder / "1_Pooling").mkdir()
    flag = {"cls": "cls_token", "max": "max_tokens"}.get(pooling, pooling)
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{flag}": True}))
    served = Served(folder, task="sentence-embedding", parameters={"normalize": False})
    states = [torch.tensor(row) for row in Served(folder, task="feature-extraction")(*TEXTS)]
    pool = {
        "cls": lambda x: x[0],
        "max": lambda x: x.amax(dim=0),
        "lasttoken": lambda x: x[-1],
        "mean_sqrt_len_tokens": lambda x: x.sum(dim=0) / len(x) ** 0.5,
    }[pooling]
    close(served(*TEXTS), [pool(x).tolist() for x in states])


# Bad rows, and bad folders.


def test_a_bad_row_is_answered_alone(tmp_path: Path) -> None:
    served = Served(bert("BertForSequenceClassification", tmp_path))
    bad = [
        [SHORT, LONG], 3, None, {"txt": SHORT}, bytearray(b"\xff\xfe"), bytearray(b"{broken"), "\ud800",
        {"text": SHORT, "text_pair": 3}, {"text": SHORT, "parameters": {"topk": 2}}, {"text": SHORT, "parameters": [2]},
        {"text": SHORT, "parameters": {"top_k": 0}}, {"inputs": {"inputs": SHORT}},
    ]  # fmt: skip
    found = served(SHORT, *bad, bytearray(SHORT.encode()))
    close([found[0], found[-1]], served(SHORT) * 2)
    assert [row.error_code for row in found[1:-1]] == [400] * len(bad)
    assert "did you mean 'top_k'?" in found[9].message
    [alone] = served(bad[8])
    assert alone.error_code == 400


def refused(folder: Path, task: str | None = None, **config: Any) -> str:
    with pytest.raises(HandlerLoadError) as error:
        Served(folder, **config, **({"task": task} if task else {}))
    return str(error.value)


def test_what_a_folder_lacks_is_said(tmp_path: Path) -> None:
    assert "no model folder: there is no config.json" in refused(tmp_path)
    folder = bert("BertForSequenceClassification", tmp_path)
    assert "did you mean 'text-classification'?" in refused(folder, "text-clasification")
    assert "summarization, text-classification" in refused(folder, "poetry")
    assert "is for text-classification or zero-shot-classification, not for token-" in refused(folder, "ner")
    assert "'topp' here" in refused(folder, parameters={"topp": 1})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "needs a tokenizer, and there is no tokenizer.json" in refused(folder)
    assert "is for image-classification, not for feature-" in refused(vit(tmp_path / "vit"), "feature-extraction")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForNextSentencePrediction"]}))
    assert "BertForNextSentencePrediction" in refused(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    assert "no weights; put model.safetensors beside it" in refused(folder)


def test_a_head_that_was_not_saved_is_not_invented(tmp_path: Path) -> None:
    folder = bert("BertModel", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForTokenClassification"]}))
    assert "lack classifier.bias, classifier.weight, which would be random" in refused(folder)


def test_pickles_need_trust(tmp_path: Path) -> None:
    folder = bert("BertForSequenceClassification", tmp_path)
    wanted = Served(folder)(SHORT)
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "trusted: true" in refused(folder)
    close(Served(folder, trusted=True)(SHORT), wanted)


def test_code_in_a_folder_needs_trust(tmp_path: Path) -> None:
    folder = bert("BertForSequenceClassification", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnConfig: pass\n")
    assert "transformers cannot load it" in refused(folder)
    assert not (tmp_path / "ran").exists()


def test_a_module_that_is_not_served_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "minilm"
    shutil.copytree(MINILM, folder)
    dense = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    (folder / "modules.json").write_text(json.dumps([dense]))
    assert "its modules.json has a Dense" in refused(folder)


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
def test_the_task_is_read_off_the_folder(tmp_path: Path, architecture: str, tag: str | None, task: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    for name in ("model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
    if tag is not None:
        (tmp_path / "README.md").write_text(f"---\npipeline_tag: {tag}\n---\n# Its card\n")
    assert tasks.choose(tmp_path) == task
    (tmp_path / "modules.json").write_text("[]")
    assert tasks.choose(tmp_path) == "sentence-embedding"


def test_every_task_has_its_class_and_says_what_it_takes(tmp_path: Path) -> None:
    for task in tasks.TASKS:
        assert tasks.task_class(task).__doc__
    served = Served(bert("BertForSequenceClassification", tmp_path))
    assert served.entry.instance.describe_handle() == {
        "task": "text-classification",
        "parameters": {"top_k": "a whole number from 1", "function_to_apply": "one of softmax, sigmoid, none"},
        "architecture": ["BertForSequenceClassification"],
    }


# Explanations


@pytest.mark.parametrize("method, steps, tolerance", [("integrated_gradients", 500, 0.03), ("shapley", 3, 1e-5)])
def test_a_text_s_label_is_explained_by_token(tmp_path: Path, method: str, steps: int, tolerance: float) -> None:
    pytest.importorskip("captum")
    labels = {0: "cats", 1: "dogs"}
    config = {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}
    how = {"method": method, "steps": steps}
    served = Served(bert("BertForSequenceClassification", tmp_path, **config), explain=how)
    found = explained(served, data=SHORT.encode(), target=b"dogs")
    assert found["tokens"] == ["[CLS]", *SHORT.split(), "[SEP]"]
    encoded = tokenizer()([SHORT, SHORT], return_tensors="pt")
    encoded["input_ids"][1, 1:-1] = 0
    with torch.inference_mode():
        scores = served.entry.instance.model(**encoded).logits[:, 1].tolist()
    assert [found["score"], found["baseline_score"]] == pytest.approx(scores, abs=1e-5)
    tolerated = tolerance * np.abs(found["attributions"]).sum()
    assert sum(found["attributions"]) == pytest.approx(scores[0] - scores[1], abs=tolerated)
    assert explained(served, data=SHORT.encode(), target="1", steps="2")["score"] == found["score"]
    assert explained(served, data=SHORT.encode(), steps="2")["score"] != found["score"]
    assert explained(served, data=SHORT.encode(), target="birds").error_code == 400


def test_an_image_s_label_is_explained_by_pixel(tmp_path: Path) -> None:
    pytest.importorskip("captum")
    served = Served(vit(tmp_path), task="image-classification")
    found = np.array(explained(served, data=png(image(1)), method="feature_ablation"))
    assert found.ndim == 3 and len(found) == 3 and np.isfinite(found).all() and found.any()


def test_detections_and_segments_are_explained_by_pixel(tmp_path: Path) -> None:
    pytest.importorskip("captum")
    for folder in (yolos(tmp_path / "boxes"), segformer(tmp_path / "segments")):
        served = Served(folder)
        handler = served.entry.instance
        picture = image(1, 32, 32)
        found = np.array(explained(served, data=png(picture), target="LABEL_1", steps="200"))
        pixels = handler.task.processor(images=[picture], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            scores = handler.task.scores(handler.model(torch.cat([pixels, pixels * 0])))[:, 1].tolist()
        assert found.shape == pixels.shape[1:] and found.any()
        assert found.sum() == pytest.approx(scores[0] - scores[1], abs=0.02 * np.abs(found).sum())
        assert np.array(explained(served, data=png(picture), target="1", method="feature_ablation")).any()
        row = Row({"body": {"inputs": base64.b64encode(png(picture)).decode(), "target": "LABEL_1", "steps": 200}})
        with pytest.raises(PredictionException):  # it is made ready as if it were a prediction's
            handler.prepare_row(row)
        row.prepared = PredictionException("strange", 400)
        served.context.begin(["1"], [{"explain": "True"}], [{}])
        assert np.allclose(served.entry([row], served.context)[0], found, atol=1e-6)


def test_minilm_s_similarity_is_explained_by_token() -> None:
    """Any output will do, also one that no head gives: how like two sentences are."""
    pytest.importorskip("captum")
    handler = Served(MINILM).entry.instance

    class Likeness:
        device, get_input_embeddings = torch.device("cpu"), handler.model.get_input_embeddings

        def __call__(self, **inputs: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.normalize(handler.model(**inputs).last_hidden_state.mean(1)) @ self.other

    likeness, words = Likeness(), handler.task.tokenizer
    with torch.inference_mode():
        likeness.other = torch.eye(384)
        [likeness.other] = likeness(**words("The cat catches a mouse.", return_tensors="pt"))
    likeness.other = likeness.other.clone()
    found = explanations.of_text(likeness, words, "A kitten hunts mice.", explanations.Question())
    by_token = dict(zip(found["tokens"], found["attributions"]))
    assert sum(by_token.values()) == pytest.approx(found["score"] - found["baseline_score"], abs=0.01)
    assert set(sorted(by_token, key=by_token.get)[-3:]) >= {"kitten", "mice"}
