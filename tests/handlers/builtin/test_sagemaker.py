"""The handler of SageMaker's script mode: functions of ``code/inference.py``, and their defaults."""

from __future__ import annotations

import io
import json
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import handlers
from handlers.context import Context
from handlers.errors import HandlerLoadError, PredictionException
from handlers.sagemaker import decoder, encoder
from handlers.sagemaker.errors import GenericInferenceToolkitError, UnsupportedFormatError

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
Respond = Callable[..., Any]


@pytest.fixture(autouse=True)
def toolkit() -> Iterator[None]:
    """Remove the names of the toolkit, which a script's process has for its whole life."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sagemaker_inference"]:
        del sys.modules[name]


class Model:
    """A loaded model folder; its handler's rows have headers of their own."""

    def __init__(self, folder: Path) -> None:
        self.entry = handlers.load("sagemaker", folder, {})
        self.context = Context("m", str(folder), None, batch_size=4)
        self.entry.initialize(self.context)
        self.emitted: list[tuple[int, Any]] = []

    def batch(self, *rows: tuple[bytes, dict[str, str]]) -> list[Any]:
        parts = [{"body": {"content-type": headers.get("content-type", "")}} for _, headers in rows]
        ids = [f"id-{index}" for index in range(len(rows))]
        self.context.begin(ids, [headers for _, headers in rows], parts, lambda *e: self.emitted.append(e))
        return list(self.entry([{"body": bytearray(body)} for body, _ in rows], self.context))

    def __call__(self, body: bytes, content_type: str = JSON, accept: str | None = None) -> Any:
        headers = {"content-type": content_type} | ({} if accept is None else {"accept": accept})
        return self.batch((body, headers))[0]


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Model]:
    """Return ``load(script, name)``, which loads a folder whose ``code/`` has that script."""

    def load(script: str | None = None, name: str = "inference.py") -> Model:
        if script is not None:
            (tmp_path / "code").mkdir(exist_ok=True)
            (tmp_path / "code" / name).write_text(textwrap.dedent(script))
        return Model(tmp_path)

    return load


def save_double(file: Path) -> None:
    class Double(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values * 2

    torch.jit.script(Double()).save(str(file))


def to_npy(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


# Defaults


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("file", ["model.pt", "net.pth"])
def test_defaults_serve_a_torchscript_model(model: Any, tmp_path: Path, file: str) -> None:
    save_double(tmp_path / file)
    if file == "model.pt":  # it is preferred to others
        (tmp_path / "other.pth").write_bytes(b"")
    served = model()
    assert json.loads(served(b"[[1, 2], [3, 4]]")) == [[2, 4], [6, 8]]
    assert served.context.get_response_content_type(0) == JSON
    assert json.loads(served(b"1,2\n3,4\n", CSV)) == [[2, 4], [6, 8]]
    assert served(b"[[1, 2], [3, 4]]", accept=CSV) == "2.0,4.0\n6.0,8.0\n"
    array = np.load(io.BytesIO(served(to_npy(np.float32([[1, 2]])), NPY, NPY)))
    assert array.tolist() == [[2, 4]]
    assert served.context.get_response_content_type(0) == NPY


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_first_accepted_format_is_written(model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    save_double(tmp_path / "model.pt")
    served = model()
    assert served(b"[[1]]", accept="image/png, text/csv;q=0.5, application/json") == "2.0\n"
    assert served.context.get_response_content_type(0) == CSV
    monkeypatch.setenv("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", CSV)
    for accept in (None, "*/*"):
        assert served(b"[[1]]", accept=accept) == "2.0\n"


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_requests_that_the_defaults_cannot_read_are_refused(model: Any, tmp_path: Path) -> None:
    save_double(tmp_path / "model.pt")
    served = model()
    refused = [
        served(b"x", "image/png"),
        served(b"[1]", accept="image/png"),
        served(b"{", JSON),
        served(pickled_array(), NPY),
    ]
    assert [(type(error), error.error_code) for error in refused] == [
        (PredictionException, status) for status in (415, 415, 400, 400)
    ]
    assert "image/png" in str(refused[0])


def pickled_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"code": "that would run"}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize("files", [(), ("a.pt", "b.pth")])
def test_a_folder_without_one_model_is_refused(model: Any, tmp_path: Path, files: tuple[str, ...]) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(HandlerLoadError, match="Define model_fn, or name the file"):
        model()


# Scripts

FUNCTIONS = """
    import os

    def model_fn(model_dir):
        return sorted(os.listdir(model_dir))

    def input_fn(data, content_type):
        return type(data).__name__, content_type

    def predict_fn(data, model):
        return [*data, *model]

    def output_fn(prediction, accept):
        return f"{prediction} {accept}"
"""


def test_functions_of_a_script(model: Any) -> None:
    served = model(FUNCTIONS)
    assert served(b"{}") == f"['str', '{JSON}', 'code'] {JSON}"
    assert served(b"a", "image/png", "text/plain") == "['bytearray', 'image/png', 'code'] text/plain"
    assert served.context.get_response_content_type(0) == "text/plain"


def test_functions_may_take_the_context(model: Any) -> None:
    served = model("""
        def model_fn(model_dir, context):
            return context.system_properties["model_dir"] == model_dir

        def input_fn(data, content_type, context):
            return context.get_request_header(0, "x-amzn-sagemaker-custom-attributes")

        def predict_fn(data, model, context):
            context.set_response_header(0, "x-amzn-sagemaker-custom-attributes", f"{data} again")
            return [data, model]

        def output_fn(prediction, accept, context):
            return str(prediction)
    """)
    rows = [(b"{}", {"content-type": JSON, "X-Amzn-SageMaker-Custom-Attributes": name}) for name in "abc"]
    assert served.batch(*rows) == [f"['{name}', True]" for name in "abc"]
    for index, name in enumerate("abc"):
        headers = served.context.get_response_headers(index)
        assert headers == {"x-amzn-sagemaker-custom-attributes": f"{name} again", "content-type": JSON}


def test_one_function_may_replace_the_three(model: Any) -> None:
    served = model("""
        calls = []

        def pre_model_fn(model_dir):
            calls.append("pre")

        def model_fn(model_dir):
            calls.append("model")
            return calls

        def model_warmup_fn(model_dir, model):
            model.append("warm")

        def transform_fn(model, data, content_type, accept):
            return ",".join(model), "text/plain"
    """)
    assert served(b"[]") == served(b"[]") == "pre,model,warm"
    assert served.context.get_response_content_type(0) == "text/plain"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("transform_fn = output_fn = lambda *a: a\nmodel_fn = id", "define one or the other"),
        ("def model_fn(): pass", "model_fn takes 0 arguments; write it with 1, or with 2"),
        ("def model_fn(a): pass\ndef predict_fn(a, b, c, d): pass", "predict_fn takes 4 arguments"),
        ("import nowhere_to_be_found", "nowhere_to_be_found"),
    ],
)
def test_a_script_that_cannot_be_called_is_refused(model: Any, script: str, message: str) -> None:
    with pytest.raises(HandlerLoadError, match=message):
        model(script)


def test_a_variable_names_the_script_and_the_script_imports_its_neighbours(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAGEMAKER_PROGRAM", "serve_it.py")
    (tmp_path / "code/parts").mkdir(parents=True)
    (tmp_path / "code/parts/words.py").write_text("WORD = 'from a neighbour'")
    served = model(
        """
        from parts.words import WORD

        def model_fn(model_dir):
            return WORD

        def transform_fn(model, data, content_type, accept):
            return model
        """,
        "serve_it.py",
    )
    assert served(b"{}") == "from a neighbour"


@pytest.mark.parametrize(
    "program", ["serving/run_it.py", "code/serving/run_it.py", "{model}/code/serving/run_it.py"]
)
def test_a_script_below_the_folder_of_code_imports_from_it(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("SAGEMAKER_PROGRAM", program.format(model=tmp_path))
    (tmp_path / "code/serving").mkdir(parents=True)
    (tmp_path / "code/word_list.py").write_text("WORD = 'from above'")
    script = (
        "from word_list import WORD\ndef model_fn(d): return WORD\ndef transform_fn(m, d, c, a): return m"
    )
    (tmp_path / "code/serving/run_it.py").write_text(script)
    assert model()(b"{}") == "from above"


def test_a_script_may_be_in_the_submitted_folder(
    model: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("submitted")
    script = "def model_fn(d): return d\ndef transform_fn(m, d, c, a): return 'submitted'"
    (folder / "inference.py").write_text(script)
    monkeypatch.setenv("SAGEMAKER_SUBMIT_DIRECTORY", f"file://{folder}")
    assert model()(b"{}") == "submitted"
    del sys.modules["inference"]  # it is outside the folder that the fixture forgets


def test_a_generator_is_a_stream(model: Any) -> None:
    served = model("""
        def model_fn(model_dir):
            return "model"

        def transform_fn(model, data, content_type, accept):
            return (f"{word} " for word in data.split()), "text/plain"
    """)
    rows = [(b"one two", {"content-type": CSV}), (b"three", {"content-type": CSV})]
    assert served.batch(*rows) == [b"", b""]
    assert served.emitted == [(0, "one "), (0, "two "), (1, "three ")]
    assert served.context.get_response_content_type(1) == "text/plain"


def test_an_exception_is_that_row_s_error(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    served = model("""
        from sagemaker_inference import content_types, decoder, encoder, errors

        def model_fn(model_dir):
            return None

        def input_fn(data, content_type):
            return decoder.decode(data, content_type)

        def predict_fn(data, model):
            if data[0] == 1:
                raise errors.GenericInferenceToolkitError(422, "not that one")
            if data[0] == 2:
                raise MemoryError
            return 6 // data

        def output_fn(prediction, accept):
            return encoder.encode(prediction, content_types.JSON)
    """)
    headers = {"content-type": JSON}
    first, second, third = served.batch((b"[1]", headers), (b"[2]", headers), (b"[3]", headers))
    assert (first.error_code, "not that one" in str(first)) == (422, True)
    assert isinstance(second, MemoryError)
    assert json.loads(third) == [2]
    assert "predict_fn" in caplog.text  # the traceback, for the model's author
    failed = served(b'["a"]')
    assert failed.error_code == 500


def test_bodies_that_the_server_has_decoded_reach_the_script_as_text(model: Any) -> None:
    served = model(FUNCTIONS)
    served.context.begin(["id"], [{"content-type": JSON}], [{}])
    assert served.entry([{"body": {"a": 1}}], served.context)[0].startswith("['str'")


# The toolkit's names


def test_formats_are_encoded_and_decoded() -> None:
    assert decoder.decode("[[1, 2]]", JSON).tolist() == [[1, 2]]
    assert decoder.decode(b"1,2", CSV).tolist() == [1, 2]
    assert json.loads(encoder.encode({"a": np.float32([1])}, JSON)) == {"a": [1]}
    for function in (decoder.decode, encoder.encode):
        with pytest.raises(UnsupportedFormatError):
            function(b"", "image/png")
    with pytest.raises(TypeError, match="has no JSON"):
        encoder.encode(object(), JSON)


@pytest.mark.parametrize("error", [UnsupportedFormatError("a/b"), GenericInferenceToolkitError(422, "no")])
def test_errors_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
