"""The example of voice activity hears who speaks and when, on a real server: a stateful graph in two
formats.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest

from tests.support.server import ROOT, Server

EXAMPLE = ROOT / "examples/19_voice_activity"
NAME, END = "ts_request_sequence_id", "ts_request_sequence_end"
TURN = re.compile(r"(\d\.\d) to (\d\.\d) s")
BYTES = {"content-type": "application/octet-stream"}
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_stays"), pytest.mark.nightly]


@pytest.fixture
def voices() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("voices", EXAMPLE / "voices.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["voices"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["voices"]


def alone(samples: np.ndarray) -> list[float]:
    """Return the output of the package's own graph for a recording, window by window."""
    package = importlib.util.find_spec("silero_vad")
    assert package is not None
    graph = onnxruntime.InferenceSession(Path(package.submodule_search_locations[0], "data/silero_vad.onnx"))
    received = np.concatenate([np.zeros(64), samples / 32768]).astype(np.float32)
    memory, result = np.zeros((2, 1, 128), np.float32), []
    for start in range(0, len(samples) - 511, 512):
        given = {"input": received[None, start : start + 576], "state": memory, "sr": np.array(16_000)}
        probability, memory = graph.run(None, given)
        result.append(float(probability[0, 0]))
    return result


def test_19_voice_activity(server: Server, run: Callable[..., str], voices: ModuleType) -> None:
    run("19_voice_activity/archive.py", "--model-store", str(server.store))
    printed = run("19_voice_activity/run.py")
    lines = [[tuple(map(float, turn)) for turn in TURN.findall(line)] for line in printed.splitlines()[:9]]
    for spoken, *received in (lines[start : start + 3] for start in (0, 3, 6)):
        assert spoken
        for found in received:  # by the graph, and by TorchScript
            assert len(found) == len(spoken), printed
            assert np.abs(np.array(found) - np.array(spoken)).max() <= 0.25, printed
    assert float(re.findall(r"at most (\d\.\d+) apart", printed)[0]) < 0.01

    # Pieces of other lengths, lines of other lengths at the same time: each hears what it would hear alone.
    recordings = [voices.recording(2, [(0.5, 1.5)], pitch, seed=pitch) for pitch in (110, 140, 180, 220)]

    def received_by(version: str, samples: np.ndarray, length: int) -> list[float]:
        headers, result = dict(BYTES), []
        for start in range(0, len(samples), length):
            end = {END: "true"} if start + length >= len(samples) else {}
            piece = samples[start : start + length].tobytes()
            answer = server.http.post(
                f"/predictions/voice/{version}", content=piece, headers={**headers, **end}
            )
            assert answer.status_code == 200, answer.text
            headers[NAME] = answer.headers[NAME]
            result += answer.json()["speech"]
        return result

    for version in ("1.0", "2.0"):
        with ThreadPoolExecutor(len(recordings)) as callers:
            requested = zip(recordings, (700, 4000, 9001, 32000))
            found = list(callers.map(lambda one, version=version: received_by(version, *one), requested))
        for samples, result in zip(recordings, found):
            assert result == pytest.approx(alone(samples), abs=2e-3)

    for body in (b"\0\0\0", "a voice"):
        headers = BYTES if isinstance(body, bytes) else {"content-type": "text/plain"}
        refused = server.http.post("/predictions/voice", content=body, headers={**headers, END: "true"})
        assert refused.status_code == 400 and "16-bit samples as bytes" in refused.text
