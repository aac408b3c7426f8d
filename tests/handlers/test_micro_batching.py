"""Tests of micro-batches, whose stages run in parallel."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import handlers
from handlers.base import BaseHandler
from handlers.context import Context
from handlers.errors import PredictionException
from handlers.micro_batching import MicroBatching

MODEL = """
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""


class Doubler(BaseHandler):
    """A handler of numbers that rejects the body "refused" and fails in the stage that a body names."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def preprocess(self, data: list[Any]) -> list[Any]:
        self.calls.append(("preprocess", [row["body"] for row in data]))
        for index, row in enumerate(data):
            if row["body"] == "refused":
                self.reject(index, PredictionException("Refused", 422))
            if row["body"] == "preprocess":
                raise KeyError("preprocess")
        return [row["body"] for row in data]

    def inference(self, data: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        if "inference" in data:
            raise SystemExit(3)
        self.calls.append(("inference", torch.is_inference_mode_enabled()))
        return [value * 2 for value in data]

    def postprocess(self, data: list[Any]) -> list[Any]:
        if "postprocess" * 2 in data:
            raise KeyError("postprocess")
        return data


@pytest.fixture
def make_micro() -> Iterator[Callable[..., MicroBatching]]:
    created: list[MicroBatching] = []

    def make(*args: Any, **kwargs: Any) -> MicroBatching:
        created.append(MicroBatching(*args, **kwargs))
        return created[-1]

    yield make
    for micro in created:
        micro.shutdown()


def rows(*bodies: Any) -> list[dict[str, Any]]:
    return [{"body": body} for body in bodies]


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_values_are_in_the_order_of_the_rows(make_micro: Any, size: int) -> None:
    micro = make_micro(Doubler(), size, {"preprocess": 3, "inference": 2, "postprocess": 2})
    assert micro.handle(rows(*range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert micro.handle([]) == []
    batches = [batch for stage, batch in micro.handler.calls if stage == "preprocess"]
    assert sorted(map(len, batches), reverse=True) == [size] * (7 // size) + ([7 % size] if 7 % size else [])


def test_stages_run_in_parallel(make_micro: Any) -> None:
    barrier = threading.Barrier(3, timeout=60)

    class WaitingStages(Doubler):
        """A handler whose stages wait for each other, which requires three micro-batches in parallel."""

        def preprocess(self, data: list[Any]) -> list[Any]:
            if data[0]["body"] == 2:
                barrier.wait()
            return super().preprocess(data)

        def inference(self, data: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
            if data[0] == 1:
                barrier.wait()
            return super().inference(data)

        def postprocess(self, data: list[Any]) -> list[Any]:
            if data[0] == 0:
                barrier.wait()
            return super().postprocess(data)

    assert make_micro(WaitingStages()).handle(rows(0, 1, 2)) == [0, 2, 4]


def test_batches_may_overlap(make_micro: Any) -> None:
    micro = make_micro(Doubler(), 2)
    answers: dict[int, Any] = {}

    def run(start: int) -> None:
        answers[start] = micro.handle(rows(*range(start, start + 9)))

    threads = [threading.Thread(target=run, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {start: [2 * value for value in range(start, start + 9)] for start in (0, 100, 200)}


@pytest.mark.parametrize("stage", ["preprocess", "inference", "postprocess"])
def test_errors_of_a_stage_reach_the_caller(make_micro: Any, begin: Any, stage: str) -> None:
    micro = make_micro(Doubler(), 2)
    with pytest.raises((KeyError, SystemExit)):
        micro.handle(rows(1, 2, stage, 4))
    assert micro.handle(rows(1, 2)) == [2, 4], "its threads keep running"
    context = begin(Context("m", "/m", {}), 5)
    with pytest.raises((KeyError, SystemExit)):
        micro(rows(stage, 2), context)
    if stage == "inference":
        with pytest.raises(SystemExit):  # it cannot fail single rows
            micro(rows(1, 2, stage, 4, 5), context)
        return
    first, second, failed, neighbour, last = micro(rows(1, 2, stage, 4, 5), context)
    assert (first, second, last) == (2, 4, 10) and failed is neighbour and isinstance(failed, KeyError)


def test_rejected_rows_fail_alone(make_micro: Any, begin: Any) -> None:
    micro = make_micro(Doubler(), 2)
    answers = micro(rows(1, 2, 3, "refused", "refused"), begin(Context("m", "/m", {}), 5))
    assert answers[:3] == [2, 4, 6]
    assert [answer.message for answer in answers[3:]] == ["Refused", "Refused"]


def test_each_thread_has_its_micro_batch_index(make_micro: Any) -> None:
    class Counting(Doubler):
        def postprocess(self, data: list[Any]) -> list[Any]:
            return [micro.get_micro_batch_idx() for _ in data]

    micro = make_micro(Counting(), 2, {"postprocess": 2})
    assert micro.handle(rows(*range(5))) == [0, 0, 1, 1, 2]
    assert micro.get_micro_batch_idx() is None


def test_stages_run_in_the_callers_gradient_modes(make_micro: Any) -> None:
    micro = make_micro(Doubler(), 1)
    with torch.inference_mode():
        micro.handle(rows(1))
    micro.handle(rows(1))
    assert [mode for stage, mode in micro.handler.calls if stage == "inference"] == [True, False]


def test_the_number_of_threads_can_be_changed(make_micro: Any) -> None:
    micro = make_micro(Doubler(), parallelism={"preprocess": 2})
    assert micro.parallelism == {"preprocess": 2, "inference": 1, "postprocess": 1}
    micro.parallelism = {"preprocess": 1, "inference": 3}
    assert {stage: len(threads) for stage, threads in micro.thread_groups.items()} == micro.parallelism
    assert micro.parallelism == {"preprocess": 1, "inference": 3, "postprocess": 1}
    threads = [thread for group in micro.thread_groups.values() for thread in group]
    assert len(threads) == 5 and all(thread.is_alive() for thread in threads)
    assert micro.handle(rows(1, 2)) == [2, 4]
    micro.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="shut down"):
        micro.handle(rows(1))


def test_threads_end_with_their_object() -> None:
    micro = MicroBatching(Doubler())
    threads = [thread for group in micro.thread_groups.values() for thread in group]
    reference = weakref.ref(micro)
    del micro
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert reference() is None and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        ({"prepocess": 2}, "no stage 'prepocess'. Did you mean 'preprocess'"),
        ({"inference": 0}, "1 thread or more"),
    ],
)
def test_invalid_parallelism_is_rejected(parallelism: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MicroBatching(Doubler(), 1, parallelism)


SUBCLASS = """
from handlers.base import BaseHandler

class Plain(BaseHandler):
    def postprocess(self, data):
        self.sizes = [*getattr(self, "sizes", []), len(data)]
        return super().postprocess(data)
"""


@pytest.fixture
def load(archive: Any) -> Iterator[Callable[..., handlers.LoadedHandler]]:
    created: list[handlers.LoadedHandler] = []

    def entry(source: str, micro_batching: Any) -> handlers.LoadedHandler:
        directory = archive(model=MODEL, handler=source)
        manifest = {"model": {"modelFile": "model.py"}}
        created.append(handlers.load("handler.py", directory, manifest))
        config = {"micro_batching": micro_batching}
        created[-1].initialize(Context("m", str(directory), manifest, model_yaml_config=config))
        return created[-1]

    yield entry
    for entry in created:
        if isinstance(entry.handle, MicroBatching):
            entry.handle.shutdown()


def test_model_config_enables_micro_batches(load: Any, begin: Any) -> None:
    entry = load(SUBCLASS, {"micro_batch_size": 2, "parallelism": {"preprocess": 2}})
    handler = entry.instance
    answers = entry(rows([1.0], [2.0], b"no", [4.0], [5.0]), begin(handler.context, 5))
    assert [answers[index] for index in (0, 1, 3, 4)] == [[2.0], [4.0], [8.0], [10.0]]
    assert answers[2].error_code == 400 and sorted(handler.sizes) == [1, 2, 2]
    assert handler.handle.parallelism["preprocess"] == 2
    assert entry([{}], begin(handler.context, describe="True")) == [None]
    with pytest.raises(PredictionException, match="cannot be explained"):
        entry(rows([1.0]), begin(handler.context, explain="True"))


def test_a_handlers_own_micro_batching_is_kept(load: Any, begin: Any) -> None:
    source = """
    from handlers.base import BaseHandler
    from handlers.micro_batching import MicroBatching

    class CustomHandle(BaseHandler):
        def __init__(self):
            super().__init__()
            self.handle = MicroBatching(self)

        def initialize(self, context):
            super().initialize(context)
            options = context.model_yaml_config["micro_batching"]
            self.handle.micro_batch_size = options["micro_batch_size"]
            self.handle.parallelism = options["parallelism"]
    """
    entry = load(source, {"micro_batch_size": 3, "parallelism": {"inference": 2}})
    assert entry.handle.micro_batch_size == 3 and entry.handle.parallelism["inference"] == 2
    assert entry(rows([1.0], [2.0]), begin(entry.instance.context, 2)) == [[2.0], [4.0]]


@pytest.mark.parametrize("options", [3, {"size": 4}, {"micro_batch_size": 0}])
def test_invalid_configurations_are_rejected(load: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=r"model-config.yaml: micro_batching"):
        load(SUBCLASS, options)
