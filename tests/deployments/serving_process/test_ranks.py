"""One model over two processes: the answers of one, half of it in each, and what happens when one of them
dies.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from handlers.builtin.causal_lm import CausalLM
from handlers.context import Context
from handlers.errors import HandlerLoadError
from tests.support.archives import make_archive
from tests.support.hf_folders import save_llama
from tests.support.load import Pulse
from tests.support.server import Server

pytestmark = pytest.mark.slow


PROMPTS = [[5, 6, 7], [100, 3, 250, 77, 9], [42], list(range(40, 60))]

# "ranks" answers with every rank's process, how many parameters lie there, and the cores that it computes on.
HANDLER = """
import os
import torch.distributed as dist
from handlers.builtin.causal_lm import CausalLM

class Sharded(CausalLM):
    def handle(self, data, context):
        if data[0].get("body") != "ranks":
            return super().handle(data, context)
        held = sum(getattr(p, "to_local", lambda: p)().numel() for p in self.model.parameters())
        ranks = [None] * dist.get_world_size()
        mine = {"rank": dist.get_rank(), "pid": os.getpid(), "held": held,
        "cores": [*os.sched_getaffinity(0)]}
        dist.all_gather_object(ranks, mine)
        return [ranks] * len(data)
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a Llama of random weights, 4 heads and 2 key-value heads."""
    return save_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False)


def archive(llama: Path, folder: Path, name: str, **config: Any) -> Path:
    files = {file.name: file.read_bytes() for file in llama.iterdir()}
    return make_archive(folder, name, HANDLER, files=files, config={"batchSize": 4, **config})


@pytest.mark.parametrize(
    ("config", "result"),
    [
        (
            {"tensor_parallel": 3},
            "tensor_parallel: 3 does not divide 4 attention heads and 2 key-value heads.*: 1, 2",
        ),
        ({"tensor_parallel": 4}, "tensor_parallel: 4 does not divide"),
        ({"pipeline_parallel": 3}, "pipeline_parallel: 3 is more than the model's 2 layers"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_figures(
    llama: Path, config: dict[str, int], result: str
) -> None:
    with pytest.raises(HandlerLoadError, match=result):
        CausalLM().initialize(Context("m", str(llama), {}, model_yaml_config=config))


@pytest.mark.nightly
@pytest.mark.cluster
def test_two_ranks_answer_as_one_and_are_replaced_together(
    server: Server, llama: Path, tmp_path: Path
) -> None:
    assert server.register(archive(llama, tmp_path, "whole")).status_code == 200
    requested = time.monotonic()
    sharded = server.register(archive(llama, tmp_path, "halves", tensor_parallel=2))
    assert sharded.status_code == 200, sharded.text
    start = time.monotonic() - requested

    for prompt in PROMPTS:
        one, two = (ask(server, model, prompt=prompt, logits=True)["logits"] for model in ("whole", "halves"))
        assert two == pytest.approx(one, abs=1e-4)
    with ThreadPoolExecutor(len(PROMPTS)) as together:  # batches of rows that differ in length
        one, two = (
            list(together.map(lambda prompt: ask(server, model, prompt=prompt, max_new_tokens=24), PROMPTS))  # noqa: B023
            for model in ("whole", "halves")
        )
    assert one == two
    assert [len(answer["tokens"]) for answer in two] == [24] * len(PROMPTS)

    refused = server.http.post("/predictions/halves", json={"prompt": [1000]})
    assert (refused.status_code, "from 0 to 255" in refused.text) == (400, True), refused.text
    ranks = held(server)
    whole = sum(math.prod(tensor.shape) for tensor in load_file(llama / "model.safetensors").values())
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert all(rank["held"] == pytest.approx(whole / 2, rel=0.02) for rank in ranks)
    memory = [psutil.Process(rank["pid"]).memory_info().rss for rank in ranks]
    server.wait(
        lambda: server.workers("halves")[0]["memoryUsage"] > 0.9 * sum(memory),
        description="the memory of both ranks",
    )

    with Generation(server) as load, Pulse() as pulse:
        server.wait(lambda: len(load.answers) > 10, description="answers before the kill")
        killed = time.monotonic()
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        server.wait(lambda: load.failed, timeout=60, description="an error for the rows in flight")
        failed_at = time.monotonic()
        assert failed_at - killed - pulse.stalled_seconds(killed) < 5
        server.wait(
            lambda: load.answers[-1][0] == 200, timeout=60, description="an answer of the next replica"
        )
        # on a machine that needs longer than that to start two ranks at all, no later than they started
        assert time.monotonic() - failed_at - pulse.stalled_seconds(failed_at) < max(20, start)
    assert {status for status, _ in load.failed} <= {500, 503}, load.failed
    assert any("Worker died" in text for _, text in load.failed)
    [result] = server.client.describe("halves")
    assert "rank 1 of 2 ended" in result["lastError"]
    assert not {rank["pid"] for rank in ranks} & {rank["pid"] for rank in held(server)}, (
        "both processes are new"
    )
    for model in ("whole", "halves"):
        assert server.management.delete(f"/models/{model}").status_code == 200


@pytest.mark.nightly
@pytest.mark.cluster
def test_deepspeeds_ranks_answer_as_one_each_on_a_core_of_its_own(
    server: Server, llama: Path, tmp_path: Path
) -> None:
    config = {"tensor_parallel": 2, "engine": {"name": "deepspeed"}, "pin": True, "threads": 1}
    answer = server.register(archive(llama, tmp_path, "deep", **config))
    assert answer.status_code == 200, answer.text
    whole = CausalLM()
    whole.initialize(Context("m", str(llama), {}))
    for prompt in PROMPTS[:2]:
        rows = [{"prompt": prompt, "logits": True}, {"prompt": prompt, "max_new_tokens": 8}]
        logits, tokens = whole.handle([{"body": row} for row in rows], None)
        assert ask(server, "deep", **rows[0])["logits"] == pytest.approx(logits["logits"], abs=1e-4)
        assert ask(server, "deep", **rows[1]) == tokens
    sampled = {"prompt": PROMPTS[0], "max_new_tokens": 12, "temperature": 0.8}
    [expected] = whole.handle([{"body": {**sampled, "seed": 3}}], None)
    assert ask(server, "deep", **sampled, seed=3) == expected
    assert len(ask(server, "deep", **sampled)["tokens"]) == 12, "without a seed, by the tokens of rank 0"

    ranks = held(server, "deep")
    every = sum(parameter.numel() for parameter in whole.model.parameters())
    assert [rank["rank"] for rank in ranks] == [0, 1] and len({rank["pid"] for rank in ranks}) == 2
    assert all(rank["held"] < 0.7 * every for rank in ranks), "half of each layer, and the embeddings"
    assert [len(rank["cores"]) for rank in ranks] == [1, 1]
    assert os.cpu_count() == 1 or ranks[0]["cores"] != ranks[1]["cores"]
    assert server.management.delete("/models/deep").status_code == 200


def ask(server: Server, model: str, **requested: Any) -> Any:
    answer = server.http.post(f"/predictions/{model}", json=requested)
    assert answer.status_code == 200, answer.text
    return answer.json()


def held(server: Server, model: str = "halves") -> list[dict[str, Any]]:
    return server.http.post(
        f"/predictions/{model}", content="ranks", headers={"content-type": "text/plain"}
    ).json()


class Generation:
    """Callers that never stop asking for text, each one call after the other."""

    def __init__(self, server: Server, callers: int = 3) -> None:
        self.answers: list[tuple[int, str]] = []
        self._url = f"{server.url}/predictions/halves"
        self._stop = threading.Event()
        self._callers = [threading.Thread(target=self._call) for _ in range(callers)]

    @property
    def failed(self) -> list[tuple[int, str]]:
        return [answer for answer in self.answers if answer[0] != 200]

    def __enter__(self) -> Generation:
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for caller in self._callers:
            caller.join()

    def _call(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(self._url, json={"prompt": [1, 2, 3], "max_new_tokens": 16})
                    self.answers.append((answer.status_code, answer.text))
                except (httpx.RemoteProtocolError, httpx.ReadError):  # the replica's connections end with it
                    continue
                self._stop.wait(0.02)
