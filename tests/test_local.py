"""Model classes in this process: values in and out, batches, streams, errors and options."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torchrelay
from PIL import Image
from pydantic import BaseModel

from serve_app.errors import ConfigurationError


class Point(BaseModel):
    x: float
    y: float = 0


class Distance:
    def predict(self, request: Point) -> float:
        return (request.x**2 + request.y**2) ** 0.5


class Upper:
    def predict(self, text: str) -> str:
        return text.upper()


class Words:
    def predict(self, text: str) -> Iterator[str]:
        for word in text.split():
            if word == "!":
                raise RuntimeError("no word")
            yield word


class Counts:
    async def predict(self, request: int) -> AsyncIterator[dict]:
        for number in range(request):
            yield {"number": number}


@torchrelay.model(batch_size=4, max_batch_delay=60_000)
class BatchSizes:
    def predict_batch(self, requests: list[int]) -> list[int]:
        return [len(requests)] * len(requests)


class Double:
    def predict(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return values * 2


class Mirror:
    def predict(self, image: Image.Image) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def test_values_of_each_type() -> None:
    with torchrelay.local(Distance) as client:
        assert client.predict(Point(x=3, y=4)) == 5.0
        assert client.predict({"x": 3, "y": 4}) == 5.0
        assert client.predict(b'{"x": 2}', "application/json") == 2.0
        assert client.request({"x": 1}).content_type == "application/json"
    with torchrelay.local(Upper) as client:
        assert client.predict("ä") == "Ä"
    with torchrelay.local(Double) as client:
        assert client.predict(np.ones((1, 2))) == [[2.0, 2.0]]
    with torchrelay.local(Mirror) as client:
        picture = client.predict(Image.new("RGB", (2, 1), "red"))
        assert Image.open(BytesIO(picture)).size == (2, 1)


def test_an_invalid_request_raises_the_error_of_a_client() -> None:
    with torchrelay.local(Distance) as client:
        with pytest.raises(torchrelay.ServerError, match="x: Field required") as raised:
            client.predict({"y": 1})
        assert raised.value.status == 400
        assert client.predict({"x": 1}) == 1.0


def test_an_exception_of_the_class_has_its_traceback() -> None:
    class Fails:
        def predict(self, request: dict) -> dict:
            return request["absent"]

    with torchrelay.local(Fails) as client, pytest.raises(torchrelay.HandlerFailedError) as raised:
        client.predict({})
    assert "KeyError: 'absent'" in raised.value.detail
    assert "test_local.py" in raised.value.detail


def test_requests_share_a_batch() -> None:
    with torchrelay.local(BatchSizes) as client, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(client.predict, range(4))) == [4] * 4
    with torchrelay.local(BatchSizes, batch_size=1) as client:
        assert client.predict(1) == 1


def test_streams() -> None:
    with torchrelay.local(Words) as client:
        assert list(client.stream("a b")) == ["a", "b"]
        assert client.predict("a b") == "ab"
        pieces = client.stream("a !")
        assert next(pieces) == "a"
        with pytest.raises(torchrelay.HandlerFailedError):
            next(pieces)
    with torchrelay.local(Counts) as client:
        assert list(client.stream(2)) == [{"number": 0}, {"number": 1}]


def test_the_async_client() -> None:
    async def run() -> None:
        async with torchrelay.local_async(Counts) as client:
            assert [piece async for piece in client.stream(2)] == [{"number": 0}, {"number": 1}]
        async with torchrelay.local_async(BatchSizes) as client:
            assert await asyncio.gather(*(client.predict(number) for number in range(4))) == [4] * 4

    asyncio.run(run())


def test_a_file_is_named_with_or_without_its_class(tmp_path: Path) -> None:
    file = tmp_path / "two_classes.py"
    file.write_text(
        "class Model:\n    def predict(self, text: str) -> str: return 'Model'\n"
        "class Other:\n    def predict(self, text: str) -> str: return 'Other'\n"
    )
    for target, expected in ((file, "Model"), (f"{file}:Other", "Other")):
        with torchrelay.local(target) as client:
            assert client.predict("x") == expected
    with pytest.raises(torchrelay.HandlerLoadError, match=r"absent\.py does not exist"):
        torchrelay.local(tmp_path / "absent.py").__enter__()


def test_a_class_that_cannot_be_served_is_refused() -> None:
    class Nothing:
        pass

    class NoSetup(Upper):
        def setup(self) -> None:
            raise FileNotFoundError("weights.pt")

    class Misspelled(Upper):
        pass

    with pytest.raises(torchrelay.HandlerLoadError, match="Nothing has no method predict"):
        torchrelay.local(Nothing).__enter__()
    with pytest.raises(torchrelay.HandlerLoadError, match=r"(?s)NoSetup cannot be set up.*weights\.pt"):
        torchrelay.local(NoSetup).__enter__()
    with pytest.raises(ConfigurationError, match="no option 'batch_sise'; did you mean 'batch_size'"):
        torchrelay.local(torchrelay.model(batch_sise=4)(Misspelled)).__enter__()


@pytest.mark.integration
def test_it_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, torchrelay\n"
        "class Model:\n    def predict(self, text: str) -> str: return text\n"
        "with torchrelay.local(Model) as client: assert client.predict('x') == 'x'\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'sqlalchemy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
