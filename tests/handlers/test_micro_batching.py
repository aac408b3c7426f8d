"""Batches cut up for stages that work side by side."""

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
    """Bodies are numbers; negative ones are refused, zeros crash the stage that they name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any]] = []

    def preprocess(self, data: list[Any]) -> list[Any]:
        self.seen.append(("preprocess", [row["body"] for row in data]))
        for index, row in enumerate(data):
            if row["body"] == "refused":
                self.reject(index, PredictionException("Refused", 422))
            if row["body"] == "preprocess":
                raise KeyError("preprocess")
        return [row["body"] for row in data]

    def inference(self, data: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        if "inference" in data:
            raise SystemExit(3)
        self.seen.append(("inference", torch.is_inference_mode_enabled()))
        return [value * 2 for value in data]

    def postprocess(self, data: list[Any]) -> list[Any]:
        if "postprocess" * 2 in data:
            raise KeyError("postprocess")
        return data


@pytest.fixture
def cut() -> Iterator[Callable[..., MicroBatching]]:
    made: list[MicroBatching] = []

    def make(*args: Any, **kwargs: Any) -> MicroBatching:
        made.append(MicroBatching(*args, **kwargs))
        return made[-1]

    yield make
    for micro in made:
        micro.shutdown()


def rows(*bodies: Any) -> list[dict[str, Any]]:
    return [{"body": body} for body in bodies]


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_the_answers_are_in_the_rows_order(cut: Any, size: int) -> None:
    micro = cut(Doubler(), size, {"preprocess": 3, "inference": 2, "postprocess": 2})
    assert micro.handle(rows(*range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert micro.handle([]) == []
    sent = [batch for stage, batch in micro.handler.seen if stage == "preprocess"]
    assert sorted(map(len, sent), reverse=True) == [size] * (7 // size) + ([7 % size] if 7 % size else [])


def test_stages_work_side_by_side(cut: Any) -> None:
    together = threading.Barrier(3, timeout=60)

    class Meeting(Doubler):
        """Each stage waits for the two others, which only other micro-batches can bring."""

        def preprocess(self, data: list[Any]) -> list[Any]:
            if data[0]["body"] == 2:
                together.wait()
            return super().preprocess(data)

        def inference(self, data: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
            if data[0] == 1:
                together.wait()
            return super().inference(data)

        def postprocess(self, data: list[Any]) -> list[Any]:
            if data[0] == 0:
                together.wait()
            return super().postprocess(data)

    assert cut(Meeting()).handle(rows(0, 1, 2)) == [0, 2, 4]


def test_calls_may_overlap(cut: Any) -> None:
    micro = cut(Doubler(), 2)
    answers: dict[int, Any] = {}

    def ask(start: int) -> None:
        answers[start] = micro.handle(rows(*range(start, start + 9)))

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {start: [2 * value for value in range(start, start + 9)] for start in (0, 100, 200)}


@pytest.mark.parametrize("stage", ["preprocess", "inference", "postprocess"])
def test_what_a_stage_raises_reaches_the_caller_and_nothing_hangs(cut: Any, begin: Any, stage: str) -> None:
    micro = cut(Doubler(), 2)
    with pytest.raises((KeyError, SystemExit)):
        micro.handle(rows(1, 2, stage, 4))
    assert micro.handle(rows(1, 2)) == [2, 4], "its threads live on"
    context = begin(Context("m", "/m", {}), 5)
    with pytest.raises((KeyError, SystemExit)):
        micro(rows(stage, 2), context)
    if stage == "inference":
        with pytest.raises(SystemExit):  # which is no row's answer
            micro(rows(1, 2, stage, 4, 5), context)
        return
    first, second, bad, beside, last = micro(rows(1, 2, stage, 4, 5), context)
    assert (first, second, last) == (2, 4, 10) and bad is beside and isinstance(bad, KeyError)


def test_a_refused_row_is_its_own_wherever_it_stands(cut: Any, begin: Any) -> None:
    micro = cut(Doubler(), 2)
    answers = micro(rows(1, 2, 3, "refused", "refused"), begin(Context("m", "/m", {}), 5))
    assert answers[:3] == [2, 4, 6]
    assert [answer.message for answer in answers[3:]] == ["Refused", "Refused"]


def test_each_thread_knows_its_micro_batch(cut: Any) -> None:
    class Counting(Doubler):
        def postprocess(self, data: list[Any]) -> list[Any]:
            return [micro.get_micro_batch_idx() for _ in data]

    micro = cut(Counting(), 2, {"postprocess": 2})
    assert micro.handle(rows(*range(5))) == [0, 0, 1, 1, 2]
    assert micro.get_micro_batch_idx() is None


def test_the_stages_are_in_the_callers_modes(cut: Any) -> None:
    micro = cut(Doubler(), 1)
    with torch.inference_mode():
        micro.handle(rows(1))
    micro.handle(rows(1))
    assert [mode for stage, mode in micro.handler.seen if stage == "inference"] == [True, False]


def test_threads_come_and_go(cut: Any) -> None:
    micro = cut(Doubler(), parallelism={"preprocess": 2})
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


def test_threads_end_with_what_they_belong_to() -> None:
    micro = MicroBatching(Doubler())
    threads = [thread for group in micro.thread_groups.values() for thread in group]
    gone = weakref.ref(micro)
    del micro
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert gone() is None and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("parallelism", "complaint"),
    [({"prepocess": 2}, "no stage 'prepocess'. Did you mean 'preprocess'"), ({"inference": 0}, "1 thread or more")],
)
def test_parallelism_that_cannot_be(parallelism: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        MicroBatching(Doubler(), 1, parallelism)


SUBCLASS = """
from handlers.base import BaseHandler

class Plain(BaseHandler):
    def postprocess(self, data):
        self.sizes = [*getattr(self, "sizes", []), len(data)]
        return super().postprocess(data)
"""


@pytest.fixture
def load(archive: Any) -> Iterator[Callable[..., handlers.Entry]]:
    made: list[handlers.Entry] = []

    def entry(source: str, micro_batching: Any) -> handlers.Entry:
        directory = archive(model=MODEL, handler=source)
        manifest = {"model": {"modelFile": "model.py"}}
        made.append(handlers.load("handler.py", directory, manifest))
        config = {"micro_batching": micro_batching}
        made[-1].initialize(Context("m", str(directory), manifest, model_yaml_config=config))
        return made[-1]

    yield entry
    for one in made:
        if isinstance(one.handle, MicroBatching):
            one.handle.shutdown()


def test_model_config_asks_for_micro_batches(load: Any, begin: Any) -> None:
    entry = load(SUBCLASS, {"micro_batch_size": 2, "parallelism": {"preprocess": 2}})
    handler = entry.instance
    answers = entry(rows([1.0], [2.0], b"no", [4.0], [5.0]), begin(handler.context, 5))
    assert [answers[index] for index in (0, 1, 3, 4)] == [[2.0], [4.0], [8.0], [10.0]]
    assert answers[2].error_code == 400 and sorted(handler.sizes) == [1, 2, 2]
    assert handler.handle.parallelism["preprocess"] == 2
    assert entry([{}], begin(handler.context, describe="True")) == [None]
    with pytest.raises(PredictionException, match="explains nothing"):
        entry(rows([1.0]), begin(handler.context, explain="True"))


def test_a_handler_that_sees_to_it_itself_is_left_alone(load: Any, begin: Any) -> None:
    source = """
    from handlers.base import BaseHandler
    from handlers.micro_batching import MicroBatching

    class Own(BaseHandler):
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
def test_a_configuration_that_cannot_be(load: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=r"model-config.yaml: micro_batching"):
        load(SUBCLASS, options)
