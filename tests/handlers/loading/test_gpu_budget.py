"""The memory of two models that share a GPU: the numbers that each engine gets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from handlers.engines.continuous_batching import cache_bytes, cache_sizes
from handlers.engines.vllm import engine_arguments
from handlers.errors import HandlerLoadError
from handlers.loading import device, weights
from handlers.loading.gpu_budget import GpuBudget, compute_budget
from handlers.onnx_providers import select_providers
from tests.support.requirements import require_onnx_on_gpu

GIB = 1 << 30
TOTAL = 80 * GIB
AVAILABLE = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")


def half() -> GpuBudget:
    budget = compute_budget(0.5, TOTAL)
    assert budget is not None
    return budget


def test_two_halves_and_their_contexts_fit_the_device() -> None:
    budgets = [half(), half()]
    assert [budget.limit for budget in budgets] == [int(39.5 * GIB)] * 2
    assert sum(budget.limit + GIB // 2 for budget in budgets) <= TOTAL
    assert [budget.fraction for budget in budgets] == [0.4937] * 2  # of torch
    assert all(budget.fraction * TOTAL <= budget.limit for budget in budgets)


def test_onnx_runtime_gets_what_torch_has_not_reserved() -> None:
    ((name, options),) = select_providers({}, "cuda", 0, AVAILABLE, half().remaining(GIB))
    assert name == "CUDAExecutionProvider"
    assert options["gpu_mem_limit"] == int(38.5 * GIB)
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    config = {"onnx": {"providers": ["tensorrt", "cuda"]}}
    tensorrt, cuda = select_providers(config, "cuda", 0, AVAILABLE, half().limit)
    assert tensorrt[1]["trt_max_workspace_size"] == cuda[1]["gpu_mem_limit"] == half().limit
    assert "gpu_mem_limit" not in select_providers({}, "cuda", 0, AVAILABLE)[0][1]


def test_the_generation_cache_has_fewer_blocks() -> None:
    # 32 layers with 8 heads of 128 numbers in 2 bytes: 128 KiB for each token.
    config = SimpleNamespace(
        num_attention_heads=32,
        hidden_size=4096,
        num_key_value_heads=8,
        num_hidden_layers=32,
        max_position_embeddings=None,
    )
    model = SimpleNamespace(
        dtype=torch.float16,
        device=torch.device("cuda"),
        config=SimpleNamespace(get_text_config=lambda: config),
    )
    small = compute_budget(0.5, 8 * GIB)
    assert small is not None
    whole = cache_sizes(model, {}, memory=cache_bytes(7 * GIB, None))
    shared = cache_sizes(model, {}, memory=cache_bytes(7 * GIB, small.remaining(2 * GIB)))
    assert whole["num_blocks"] == 128  # eight contexts of 4,096 tokens, in pages of 256
    assert shared["num_blocks"] == int(0.6 * 1.5 * GIB / (256 * 128 * 1024)) == 28
    assert cache_bytes(GIB, small.remaining(0)) == 0.6 * GIB  # the neighbour has taken more than its half


def test_vllm_gets_the_fraction(tmp_path: Path) -> None:
    made = engine_arguments(tmp_path, {"max_model_len": 512}, half())
    assert made == {"max_model_len": 512, "model": str(tmp_path), "gpu_memory_utilization": 0.4937}
    assert (
        engine_arguments(tmp_path, {"gpu_memory_utilization": 0.3}, half())["gpu_memory_utilization"] == 0.3
    )
    assert "gpu_memory_utilization" not in engine_arguments(tmp_path, {}, None)
    with pytest.raises(HandlerLoadError, match=r"is 0\.9, and num_gpus: 0\.5 allows 0\.4937 of the GPU"):
        engine_arguments(tmp_path, {"gpu_memory_utilization": 0.9}, half())


@pytest.mark.parametrize("num_gpus", [0.0, 1.0, 2.0])
def test_a_whole_device_has_no_limit(num_gpus: float) -> None:
    assert compute_budget(num_gpus, TOTAL) is None


def test_a_small_part_keeps_half_beside_its_context() -> None:
    small = compute_budget(0.1, 8 * GIB)
    assert small is not None
    assert small.limit == int(0.1 * 8 * GIB) // 2


@pytest.mark.gpu
def test_a_graph_runs_out_of_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx
    from onnx import TensorProto, helper

    require_onnx_on_gpu()
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")
    monkeypatch.setattr(device, "_budget", None)
    device.limit_gpu_memory(0, 0.05)
    limit = device.remaining_gpu_bytes(torch.device("cuda", 0))
    assert limit is not None
    model = weights.load(tmp_path / "model.onnx", torch.device("cuda", 0))
    assert len(model(torch.ones(1000))) == 1000
    with pytest.raises(MemoryError):
        model(torch.ones(limit // 4))
