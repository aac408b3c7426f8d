"""Clients of text-embeddings-inference against a server with real models of tiny folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.support.served_models import ServedModel, save_word_bert, serve

pytestmark = pytest.mark.integration

TEXTS = ["cats hunt mice", "banks lend", "money"]
LONG = "cats hunt mice banks lend money " * 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, ServedModel]]]:
    """Yield the address of ``/tei``, and the models by name."""
    classifier = transformers.BertForSequenceClassification

    def save(name: str, kind: Any = transformers.BertModel, **options: Any) -> Path:
        return save_word_bert(tmp_path_factory.mktemp(name), kind, **options)

    sentences = save("sentences")
    served = [
        ServedModel("features", sentences, "huggingface", {"task": "feature-extraction"}),
        ServedModel("ranker", save("ranker", classifier, num_labels=1), "huggingface", {}),
        ServedModel("sentences", sentences, "huggingface", {"task": "sentence-embedding"}),
        ServedModel(
            "splade",
            save("splade", transformers.BertForMaskedLM),
            "huggingface",
            {"task": "sparse-embedding"},
        ),
        ServedModel("topics", save("topics", classifier, num_labels=3), "huggingface", {}),
    ]
    with serve(served) as address:
        yield f"{address}/tei", {model.name: model for model in served}


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def unit(vectors: Any) -> Any:
    vectors = np.asarray(vectors)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("name", ["sentences", "features"])
def test_the_client_of_huggingface_hub_gets_features_and_similarities(server: Any, name: str) -> None:
    client = InferenceClient(model=f"{server[0]}/{name}")
    vectors = client.feature_extraction(TEXTS)  # type: ignore[arg-type]
    assert (vectors.shape, vectors.dtype) == ((3, 16), np.float32)
    assert vectors == pytest.approx(unit(vectors), abs=1e-6)
    assert client.feature_extraction(TEXTS[1]) == pytest.approx(vectors[1:2], abs=1e-6)
    raw = client.feature_extraction(TEXTS[0], normalize=False, truncate=True, truncation_direction="right")
    assert unit(raw) == pytest.approx(vectors[:1], abs=1e-5) and np.linalg.norm(raw) > 1.1
    short = client.feature_extraction(TEXTS[0], dimensions=4)
    assert short == pytest.approx(unit(vectors[:1, :4]), abs=1e-5)
    assert client.sentence_similarity(TEXTS[0], TEXTS[1:]) == pytest.approx(
        (vectors[1:] @ vectors[0]).tolist(), abs=1e-5
    )
    with pytest.raises(HfHubHTTPError) as refused:
        client.feature_extraction(LONG, truncate=False)
    assert refused.value.response.status_code == 413


def test_the_client_of_huggingface_hub_classifies(server: Any) -> None:
    client = InferenceClient(model=f"{server[0]}/topics")
    labels: Any = client.text_classification(TEXTS[0])
    assert len(labels) == 3 and sum(label.score for label in labels) == pytest.approx(1, abs=1e-5)
    assert [label.score for label in labels] == sorted((label.score for label in labels), reverse=True)
    best: Any = client.text_classification(TEXTS[0], top_k=1)
    assert [item.label for item in best] == [labels[0].label]


def test_texts_are_embedded(server: Any, http: httpx.Client) -> None:
    vectors = post(http, "/sentences/embed", inputs=TEXTS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(server[1]["sentences"].folder)
    assert post(http, "/sentences/embed", inputs=tokenizer(TEXTS)["input_ids"]) == vectors
    assert post(http, "/sentences:1.0/embed", inputs=TEXTS[0])[0] == pytest.approx(vectors[0], abs=1e-6)
    served = server[1]["sentences"]
    served.batches.clear()
    assert (
        len(post(http, "/sentences/embed", inputs=TEXTS * 3, truncate=True, truncation_direction="Left")) == 9
    )
    assert sum(served.batches) == 9 and max(served.batches) > 1, "rows share batches"
    tokens = post(http, "/sentences/embed_all", inputs=TEXTS[:2])
    assert [len(rows) for rows in tokens] == [5, 4]
    assert unit(np.mean(tokens[0], axis=0)) == pytest.approx(np.array(vectors[0]), abs=1e-5)
    assert post(http, "/features/embed", inputs=TEXTS) == vectors


def test_openais_client_takes_the_same_base_url(server: Any, http: httpx.Client) -> None:
    expected = post(http, "/sentences/embed", inputs=TEXTS)
    for path in ("", "/v1"):
        address = f"{server[0]}/sentences{path}"
        with openai.OpenAI(base_url=address, api_key="any", max_retries=0, timeout=60) as client:
            response = client.embeddings.create(model="text-embeddings-inference", input=TEXTS)
            assert [row.embedding for row in response.data] == [
                pytest.approx(row, abs=1e-6) for row in expected
            ]
            assert response.model == "sentences"
            with pytest.raises(openai.BadRequestError, match="dimensions is 99"):
                client.embeddings.create(model="", input="a", dimensions=99)


def test_terms_are_weighted(server: Any, http: httpx.Client) -> None:
    folder = server[1]["splade"].folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
        logits = model(**tokenizer(TEXTS[0], return_tensors="pt")).logits[0]
    weights = logits.relu().log1p().amax(dim=0)
    for path in ("/splade/embed_sparse", "/splade"):
        [answer] = post(http, path, inputs=TEXTS[0])
        assert [item["index"] for item in answer] == weights.nonzero()[:, 0].tolist()
        assert [item["value"] for item in answer] == pytest.approx(weights[weights > 0].tolist(), abs=1e-5)
    refused = post(http, "/splade/embed", 422, inputs="cats")
    assert "no output sentence_embedding; there are sparse_embedding" in refused["error"]


def test_texts_are_ranked_and_classified(http: httpx.Client) -> None:
    ranks = post(http, "/ranker/rerank", query="cats hunt", texts=TEXTS, return_text=True)
    assert sorted(rank["index"] for rank in ranks) == [0, 1, 2]
    assert all(rank["text"] == TEXTS[rank["index"]] for rank in ranks)
    raw = post(http, "/ranker/rerank", query="cats hunt", texts=TEXTS, raw_scores=True)
    assert [rank["index"] for rank in raw] == [rank["index"] for rank in ranks]
    sigmoid = 1 / (1 + np.exp([-rank["score"] for rank in raw]))
    assert [rank["score"] for rank in ranks] == pytest.approx(sigmoid.tolist(), abs=1e-5)
    assert raw[0].keys() == {"index", "score"}
    assert post(http, "/ranker", query="cats hunt", texts=TEXTS, raw_scores=True) == raw
    single = post(http, "/topics/predict", inputs=TEXTS[0])
    assert [item.keys() for item in single] == [{"label", "score"}] * 3
    assert post(http, "/topics", inputs=TEXTS[0]) == single
    pair, batch = ["cats", "mice"], [[TEXTS[0]], ["cats", "mice"]]
    both = post(http, "/topics/predict", inputs=batch)
    assert [item["score"] for item in both[0]] == pytest.approx([item["score"] for item in single], abs=1e-5)
    by_pair = post(http, "/topics/predict", inputs=pair)
    assert [item["label"] for item in by_pair] == [item["label"] for item in both[1]]
    logits = post(http, "/topics/predict", inputs=pair, raw_scores=True)
    probabilities = np.exp([item["score"] for item in logits])
    expected = (probabilities / probabilities.sum()).tolist()
    assert [item["score"] for item in by_pair] == pytest.approx(expected, abs=1e-5)


def test_texts_are_tokenized_and_decoded(http: httpx.Client) -> None:
    [tokens, plain] = post(http, "/topics/tokenize", inputs=["cats hunt", "mice"])
    assert [token["text"] for token in tokens] == ["[CLS]", "cats", "hunt", "[SEP]"]
    assert (tokens[2]["start"], tokens[2]["stop"], tokens[2]["special"]) == (5, 9, False)
    [bare] = post(http, "/sentences/tokenize", inputs="mice", add_special_tokens=False)
    assert bare == plain[1:-1]
    ids = [token["id"] for token in tokens]
    assert post(http, "/sentences/decode", ids=ids) == ["cats hunt"]
    assert post(http, "/splade/decode", ids=[ids, ids[1:2]], skip_special_tokens=False) == [
        "[CLS] cats hunt [SEP]",
        "cats",
    ]
    assert post(http, "/sentences/decode", 422, ids=[9999])["error_type"] == "Validation"


@pytest.mark.parametrize(
    ("name", "kind", "details"),
    [
        ("sentences", "embedding", {"pooling": "mean"}),
        ("splade", "embedding", {"pooling": "splade"}),
        ("ranker", "reranker", {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}),
    ],
)
def test_a_model_is_described(http: httpx.Client, name: str, kind: str, details: dict[str, Any]) -> None:
    info = http.get(f"/{name}/info").json()
    assert info["model_type"] == {kind: details}
    assert (info["model_id"], info["model_dtype"], info["max_input_length"]) == (name, "float32", 32)
    assert (info["max_batch_requests"], info["max_batch_tokens"], info["auto_truncate"]) == (4, 128, True)
    for path in ("", "/health"):
        response = http.get(f"/{name}{path}")
        assert (response.status_code, response.content) == (200, b"")
