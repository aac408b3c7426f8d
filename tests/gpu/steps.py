"""The steps of the check, each in a process of its own.

``python -m tests.gpu.steps NAME DEVICE`` runs one and prints a JSON object for each result, as soon as it has
it. A failure ends the step, with an ``error`` as its last result.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from serve_app.client import ServerError
from serve_app.load_test import LoadProfile, LoadRequest, LoadResult, generation_load, send
from tests.gpu import bare
from tests.gpu.models import SCALES, VOCABULARY, Scale, archive_bert, build_bert, compile_bert, save_llama
from tests.support.ports import free_port
from tests.support.server import ROOT, Server

Results = Iterator[dict[str, Any]]

_MAX_DIFFERENCE = 1e-3  # of a GPU's answers in float32 from a CPU's
_FREED_MIB = 300  # by which the GPU's memory may differ after a replica has ended
# Variant -> the number format of its bare loop, and its model-config.yaml.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("float32", {}),
    "fp16": ("float16", {"optimize": {"dtype": "float16"}}),
    "bf16": ("bfloat16", {"optimize": {"dtype": "bfloat16"}}),
    "bf16, compiled": ("bfloat16", {"optimize": {"dtype": "bfloat16", "compile": True}}),
    "bf16, CUDA graphs": (
        "bfloat16",
        {"optimize": {"dtype": "bfloat16", "compile": {"mode": "reduce-overhead"}}},
    ),
    "bf16, AOTInductor": ("bfloat16", {}),
}
_COMPILED = "bf16, AOTInductor"
_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")


@contextlib.contextmanager
def serving(scale: Scale, folder: Path) -> Iterator[Server]:
    """Yield a server; without a GPU, Ray assigns one that is not there."""
    env = {} if scale.device == "cuda" else {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'}
    folder.mkdir()
    server = Server(folder, env)
    try:
        server.start()
        yield server
    except BaseException:
        print(server.log(), file=sys.stderr)
        raise
    finally:
        server.close()


def judge(case: str, passed: bool, **figures: Any) -> dict[str, Any]:
    """Return a result, with an error where it is not as it should be; the step goes on."""
    return {"case": case, **figures} if passed else {"case": case, **figures, "error": "unexpected"}


def register(server: Server, archive: Path, **parameters: Any) -> float:
    """Register an archive; return the seconds until it is ready."""
    began = time.perf_counter()
    answer = server.register(archive, **parameters)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - began


def used_mib(scale: Scale) -> int:
    """Return the memory that all processes take on the GPU; 0 without one."""
    if scale.device == "cpu":
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def difference(answer: list[float], expected: list[float]) -> float:
    """Return the largest absolute difference of two answers of one length."""
    return max(abs(one - other) for one, other in zip(answer, expected, strict=True))


def compute_on_cpu(scale: Scale, seed: int = 0) -> list[float]:
    """Return BERT's answer to the request, as PyTorch computes it on the CPU."""
    with torch.inference_mode():
        answer: list[float] = build_bert(scale, seed)(torch.tensor([scale.ids]))[0].tolist()
    return answer


def allocation_error(server: Server, model: str, size: int, version: str | None = None) -> str:
    """Return the reason of the error of a request that allocates ``size`` bytes; empty where it succeeds."""
    try:
        server.client.predict_json(model, {"allocate": size}, version)
    except ServerError as error:
        return f"{error.reason} ({error.status})"
    return ""


def run_gpu_tests(scale: Scale, folder: Path) -> Results:
    """Run the tests with the mark ``gpu``, whatever their tier."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(file) for file in files if "pytest.mark.gpu\n" in file.read_text()]
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={report}", *marked]
    # Packages that only other tests need may be missing, or have warnings that are errors by default.
    command += ["--continue-on-collection-errors", "-W", "default"]
    subprocess.run(command, cwd=ROOT, check=False)
    for case in ElementTree.parse(report).iter("testcase"):
        result = {"case": case.get("name") or case.get("classname"), "seconds": float(case.get("time", 0))}
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            yield {**result, "outcome": "passed"}
        elif missing := _MISSING_MODULE.search(problem.text or ""):
            yield {**result, "outcome": f"needs {missing[1]}"}
        elif problem.tag == "skipped":
            yield {**result, "outcome": problem.get("message")}
        else:
            yield {**result, "error": str(problem.get("message"))[:500]}


def share_one_gpu(scale: Scale, folder: Path) -> Results:
    """Serve four versions on one GPU, exceed a share, and change workers and traffic."""
    versions = ["1.0", "2.0", "3.0", "4.0"]
    with serving(scale, folder / "home") as server:
        before = used_mib(scale)
        for seed, version in enumerate(versions):
            options = {"seed": seed, "handler": "memory.py", "num_gpus": 0.25}
            register(server, archive_bert(folder, scale, "shared", version, **options))
        yield {"case": "four versions of 0.25", "GPU MiB": used_mib(scale) - before}
        expected = {version: compute_on_cpu(scale, seed) for seed, version in enumerate(versions)}

        def compare(case: str, passed: bool = True, **figures: Any) -> dict[str, Any]:
            answers = {name: server.client.predict_json("shared", scale.ids, name) for name in expected}
            largest = max(difference(answers[name], expected[name]) for name in expected)
            return judge(case, passed and largest < _MAX_DIFFERENCE, difference=largest, **figures)

        yield compare("answers of all versions")
        if scale.device == "cuda":
            share = torch.cuda.get_device_properties(0).total_memory // 4
            reason = allocation_error(server, "shared", int(0.9 * share), "1.0")
            yield compare("90 % of a share", not reason, reason=reason)
            reason = allocation_error(server, "shared", int(1.1 * share), "1.0")
            yield compare("110 % of a share", "out_of_memory" in reason, reason=reason)

        del expected["4.0"]
        server.client.unregister("shared", "4.0")
        began = time.perf_counter()
        server.client.scale("shared", "1.0", min_worker=2, max_worker=2, synchronous=True)
        seconds, workers = time.perf_counter() - began, len(server.pids("shared", "1.0"))
        yield compare("a worker in the place of a version", workers == 2, seconds=seconds, workers=workers)
        server.client.set_traffic("shared", {"versions": {"1.0": 5000, "2.0": 5000}})
        answers = [server.client.predict_json("shared", scale.ids) for _ in range(200)]
        second = sum(difference(answer, expected["2.0"]) < _MAX_DIFFERENCE for answer in answers) / 200
        yield judge("traffic split in halves", 0.3 < second < 0.7, **{"share of the second version": second})


def exceed_memory(scale: Scale, folder: Path) -> Results:
    """Allocate more memory than there is, in a request and as the model loads."""
    too_much = 1 << 50
    with serving(scale, folder / "home") as server:
        register(server, archive_bert(folder, scale, "large", handler="memory.py"))
        reason = allocation_error(server, "large", too_much)
        yield judge("a request", "out_of_memory" in reason, reason=reason)
        found = difference(server.client.predict_json("large", scale.ids), compute_on_cpu(scale))
        yield judge("the next request", found < _MAX_DIFFERENCE, difference=found)
        server.client.unregister("large")
        archive = archive_bert(folder, scale, "larger", handler="memory.py", allocate=too_much)
        answer = server.register(archive)
        yield judge("a start", answer.status_code == 507, reason=answer.text[-300:])


def kill_replica(scale: Scale, folder: Path) -> Results:
    """Kill the replica that has the GPU, and measure until the next answer and the memory afterwards."""
    with serving(scale, folder / "home") as server:
        memory = {"MiB before": used_mib(scale)}
        ready = register(server, archive_bert(folder, scale, "bert"))
        expected, memory["MiB loaded"] = server.client.predict_json("bert", scale.ids), used_mib(scale)
        [pid] = server.pids("bert")
        os.kill(pid, signal.SIGKILL)
        began, statuses = time.perf_counter(), []

        def answer() -> Any:
            found = server.http.post("/predictions/bert", json=scale.ids)
            statuses.append(found.status_code)
            return found.status_code == 200 and found.json()

        recovered = server.wait(answer, description="an answer of the next replica")
        figures = {"first start s": ready, "recovery s": time.perf_counter() - began}
        figures["failed requests"] = len(statuses) - 1
        is_new = server.pids("bert") != [pid] and difference(recovered, expected) < _MAX_DIFFERENCE
        yield judge("kill -9", is_new, **figures)
        memory["MiB replaced"] = used_mib(scale)
        server.client.unregister("bert")
        until = time.monotonic() + 30
        while (used := used_mib(scale)) > memory["MiB before"] + _FREED_MIB and time.monotonic() < until:
            time.sleep(0.2)
        memory["MiB unregistered"] = used
        kept = max(memory["MiB replaced"] - memory["MiB loaded"], used - memory["MiB before"])
        yield judge("GPU memory", kept <= _FREED_MIB, **memory)


def split_tensors(scale: Scale, folder: Path) -> Results:
    """Form a process group of one rank, and load a model through transformers' tensor parallelism."""
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from handlers.distributed import placement, process_group
    from handlers.errors import HandlerLoadError

    on_gpu = scale.device == "cuda"
    process_group.Rendezvous(process_group.RankPlacement(0, 1, 0, 1, "127.0.0.1", on_gpu)).join()
    ones = torch.ones(4, device=scale.device)
    torch.distributed.all_reduce(ones)
    backend = torch.distributed.get_backend()
    yield judge("a process group of one rank", ones.tolist() == [1.0] * 4, backend=backend)
    save_llama(folder, SCALES["cpu"])
    ids = torch.tensor([scale.ids], device=scale.device)
    plain = AutoModelForCausalLM.from_pretrained(folder).to(scale.device).eval()
    config = DistributedConfig(tp_size=1, tp_plan="auto")
    split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    with torch.inference_mode():
        found = (plain(ids).logits - split(ids).logits).abs().max().item()
    shards = sum(isinstance(parameter, DTensor) for parameter in split.parameters())
    figures = {"difference": found, "sharded parameters": shards}
    yield judge("logits of one rank", found < _MAX_DIFFERENCE, **figures)
    torch.distributed.destroy_process_group()
    try:
        placement.require_package("deepspeed", "engine: deepspeed")
        yield {"case": "DeepSpeed", "outcome": "installed, and not run: it needs two ranks"}
    except HandlerLoadError as error:
        yield {"case": "DeepSpeed", "outcome": str(error)}


def measure_throughput(scale: Scale, folder: Path) -> Results:
    """Measure BERT's variants, beside a bare loop of each number format and an unbatched FastAPI."""
    loops = {}
    for dtype in dict.fromkeys(dtype for dtype, _ in _VARIANTS.values()):
        loops[dtype] = bare.run_loop(scale, dtype)
        yield {"case": f"bare loop, {dtype}", "requests/s": loops[dtype]}

    def measure(case: str, url: str, dtype: str, **figures: Any) -> Results:
        request = LoadRequest(url, body=json.dumps(scale.ids).encode())
        for connections in scale.connections:
            load = LoadProfile(connections, seconds=scale.seconds, warmup=scale.seconds / 2)
            found = send(request, load)
            share = found.throughput / loops[dtype]
            yield {"case": case, **_figures(found), "of the bare loop": share, **figures}

    with _fastapi(scale) as url:
        for dtype in bare.SERVED:
            yield from measure(f"FastAPI, {dtype}", f"{url}/{dtype}", dtype)
    expected = compute_on_cpu(scale)
    with serving(scale, folder / "home") as server:
        for number, (case, (dtype, config)) in enumerate(_VARIANTS.items()):
            try:  # a variant that does not run costs only its own rows
                graph = folder / "bert.pt2" if case == _COMPILED else None
                if graph is not None:
                    compile_bert(scale, graph, dtype)
                archive = archive_bert(folder, scale, f"bert{number}", graph=graph, **config)
                batch = {"batch_size": scale.batch_size, "trusted": graph is not None}
                ready = register(server, archive, **batch)
                found = difference(server.client.predict_json(f"bert{number}", scale.ids), expected)
                url = f"{server.url}/predictions/bert{number}"
                yield from measure(case, url, dtype, **{"start s": ready, "difference": found})
                server.client.unregister(f"bert{number}")
            except Exception as error:
                yield {"case": case, "error": str(error)[:1000]}


def _figures(found: LoadResult) -> dict[str, Any]:
    return {
        "connections": found.connections,
        "requests/s": found.throughput,
        "p50 ms": 1000 * found.p50,
        "p99 ms": 1000 * found.p99,
        "errors": found.failed,
    }


@contextlib.contextmanager
def _fastapi(scale: Scale) -> Iterator[str]:
    """Yield the address of an unbatched FastAPI, to which a number format is added."""
    port = free_port()
    command = [sys.executable, "-m", "tests.gpu.bare", scale.device, str(port)]
    url = f"http://127.0.0.1:{port}/predictions"
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as process:
        try:
            while True:
                assert process.poll() is None, "FastAPI did not start"
                with contextlib.suppress(httpx.TransportError):
                    for dtype in bare.SERVED:
                        httpx.post(f"{url}/{dtype}", json=scale.ids, timeout=60).raise_for_status()
                    break
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def measure_generation(scale: Scale, folder: Path) -> Results:
    """Measure a Llama with as many streams as requests, beside transformers' own loop of one batch."""
    model = folder / "llama"
    save_llama(model, scale)
    numbers = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, VOCABULARY, (64, scale.tokens), generator=numbers).tolist()
    bodies = [
        {"model": "llama", "prompt": prompt, "max_tokens": scale.new_tokens, "temperature": 0}
        for prompt in prompts
    ]
    expected = []
    for case in _transformers_loops(scale, model, prompts):
        expected = case.pop("tokens") or expected
        yield case
    with serving(scale, folder / "home") as server:
        answer = server.management.post(
            "/models",
            params={"url": model.as_uri(), "model_name": "llama", "handler": "llm", "initial_workers": 1},
        )
        assert answer.status_code == 200, answer.text
        text = httpx.post(f"{server.url}/v1/completions", json=bodies[0], timeout=60).json()["choices"][0][
            "text"
        ]
        same = sum(one == other for one, other in zip(text.split(), [f"w{token}" for token in expected]))
        # In bfloat16 two tokens may be equally likely.
        passed = same == scale.new_tokens or scale.dtype != "float32"
        yield judge("greedy tokens as transformers'", passed, equal=same, of=scale.new_tokens)
        request = generation_load.TokenLoadRequest(f"{server.url}/v1", bodies)
        for streams in scale.streams:
            load = LoadProfile(streams, seconds=5 * scale.seconds, warmup=scale.seconds, timeout=60)
            found = generation_load.run(request, load)
            yield {
                "case": "Torchrelay",
                "streams": streams,
                "tokens/s": found.tokens / found.seconds,
                "first token p50 ms": 1000 * found.ttft_p50,
                "between tokens p50 ms": 1000 * found.itl_p50,
                "errors": found.failed,
            }


def _transformers_loops(scale: Scale, folder: Path, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Yield the figures of ``generate`` for each number of streams, and with the first the tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(scale.device).eval()
    for streams in scale.streams:
        ids = torch.tensor(prompts[:streams], device=scale.device)
        for _ in range(2):  # the first is a warm-up
            began = time.perf_counter()
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=scale.new_tokens, do_sample=False
            )
            tokens = made[0, scale.tokens :].tolist()  # waits for the device
            seconds = time.perf_counter() - began
        yield {
            "case": "transformers' generate",
            "streams": streams,
            "tokens/s": streams * scale.new_tokens / seconds,
            "tokens": tokens if streams == 1 else None,
        }
    del model
    torch.cuda.empty_cache()


STEPS: dict[str, Callable[[Scale, Path], Results]] = {
    "tests": run_gpu_tests,
    "shares": share_one_gpu,
    "memory": exceed_memory,
    "kill": kill_replica,
    "ranks": split_tensors,
    "throughput": measure_throughput,
    "generation": measure_generation,
}


def main(name: str, device: str) -> None:
    # A step that takes too long ends its server before it ends itself.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with os.fdopen(os.dup(1), "w") as results, tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        os.dup2(2, 1)  # libraries print, too

        def send_result(result: dict[str, Any]) -> None:
            print(json.dumps(result), file=results, flush=True)

        try:
            for result in STEPS[name](SCALES[device], Path(folder)):
                send_result(result)
        except Exception as error:
            send_result({"case": "failure", "error": f"{type(error).__name__}: {error}"[:1000]})
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
