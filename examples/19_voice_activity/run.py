"""Send three synthetic recordings in chunks, and print when the model detects speech."""

import os
from concurrent.futures import ThreadPoolExecutor

from torchrelay import Client, ConflictError
from voices import RATE, recording

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
VERSIONS = {"1.0": "voice.mar", "2.0": "voice-script.mar"}
SECONDS = 6
CHUNK_LENGTH = RATE // 4  # samples per request
# Speaker -> the pitch of the voice in Hz, and the times of speech in seconds.
SPEAKERS = {
    "Ada": (210, [(0.5, 2.0), (4.5, 5.5)]),
    "Ben": (120, [(2.0, 3.5)]),
    "Cleo": (170, [(3.5, 4.5)]),
}


def detect(client: Client, speaker: str, version: str) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the speech probability of each window and the turns (start, end) that a version detects."""
    samples = recording(SECONDS, SPEAKERS[speaker][1], SPEAKERS[speaker][0], seed=len(speaker))
    windows, began, ended, sequence = [], [], [], ""
    starts = range(0, len(samples), CHUNK_LENGTH)
    chunks = [samples[start : start + CHUNK_LENGTH].tobytes() for start in starts]
    for chunk in chunks:
        last = chunk is chunks[-1]
        answer = client.request(
            "voice", chunk, "application/octet-stream", version, sequence=sequence, sequence_end=last
        )
        sequence = answer.sequence  # the first request has none
        result = answer.json()
        windows += result["speech"]
        began += result["began"]
        ended += result["ended"]
    return windows, list(zip(began, ended))


def main() -> None:
    with Client(INFERENCE, MANAGEMENT, timeout=120) as client, ThreadPoolExecutor(len(SPEAKERS)) as pool:
        results = {}
        for version, archive in VERSIONS.items():
            try:
                client.register(archive, initial_workers=1)
            except ConflictError:
                print(f"{archive} is registered already")
            detected = pool.map(lambda speaker, on=version: detect(client, speaker, on), SPEAKERS)
            results[version] = dict(zip(SPEAKERS, detected))
    for speaker, (_, turns) in SPEAKERS.items():
        print(f"{speaker} speaks {format_turns(turns)}")
        for version in VERSIONS:
            print(f"  version {version} heard {format_turns(results[version][speaker][1])}")
    difference = max(
        abs(first - second)
        for speaker in SPEAKERS
        for first, second in zip(*(results[version][speaker][0] for version in VERSIONS))
    )
    print(f"ONNX and TorchScript are at most {difference:.4f} apart")


def format_turns(turns: list[tuple[float, float]]) -> str:
    return ", ".join(f"{start:.1f} to {end:.1f} s" for start, end in turns)


if __name__ == "__main__":
    main()
