"""Three people speak in turns, each into a line of their own; the model says when, as they go."""

import os
from concurrent.futures import ThreadPoolExecutor

from voices import RATE, recording

from serve_app.client import Client, Conflict

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
VERSIONS = {"1.0": "voice.mar", "2.0": "voice-script.mar"}
SECONDS = 6
PIECE = RATE // 4  # samples a call
# Who -> the pitch of the voice in Hz, and when it speaks, in seconds.
PEOPLE = {
    "Ada": (210, [(0.5, 2.0), (4.5, 5.5)]),
    "Ben": (120, [(2.0, 3.5)]),
    "Cleo": (170, [(3.5, 4.5)]),
}


def heard(client: Client, who: str, version: str) -> tuple[list[float], list[tuple[float, float]]]:
    """The probability of speech in each window, and the turns, as (seconds, seconds), that a version hears."""
    samples = recording(SECONDS, PEOPLE[who][1], PEOPLE[who][0], seed=len(who))
    windows, began, ended, sequence = [], [], [], ""
    pieces = [samples[start : start + PIECE].tobytes() for start in range(0, len(samples), PIECE)]
    for piece in pieces:
        last = piece is pieces[-1]
        answer = client.ask("voice", piece, "application/octet-stream", version, sequence=sequence, ends=last)
        sequence = answer.sequence  # the first call had none
        said = answer.json()
        windows, began, ended = windows + said["speech"], began + said["began"], ended + said["ended"]
    return windows, list(zip(began, ended))


def main() -> None:
    with Client(INFERENCE, MANAGEMENT, timeout=120) as client, ThreadPoolExecutor(len(PEOPLE)) as lines:
        found = {}
        for version, archive in VERSIONS.items():
            try:
                client.register(archive, initial_workers=1)
            except Conflict:
                print(f"{archive} is registered already")
            found[version] = dict(zip(PEOPLE, lines.map(lambda who, on=version: heard(client, who, on), PEOPLE)))
    for who, (_, turns) in PEOPLE.items():
        print(f"{who} speaks {in_words(turns)}")
        for version in VERSIONS:
            print(f"  version {version} heard {in_words(found[version][who][1])}")
    apart = max(
        abs(one - other) for who in PEOPLE for one, other in zip(*(found[version][who][0] for version in VERSIONS))
    )
    print(f"ONNX and TorchScript are at most {apart:.4f} apart")


def in_words(turns: list[tuple[float, float]]) -> str:
    return ", ".join(f"{start:.1f} to {end:.1f} s" for start, end in turns)


if __name__ == "__main__":
    main()
