"""Serves the rhyme from two processes, ends one of them in the middle of a stream, and asks again."""

import json
import os
import signal
import time
from contextlib import suppress

import httpx

from serve_app.client import NEVER, Client, Conflict, ServerError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
PROMPT = {"prompt": "Twinkle", "temperature": 0}
ONCE = {**PROMPT, "max_new_tokens": 50}


def processes() -> list[int]:
    """Print where the model lies, and return the processes."""
    [version] = httpx.get(f"{MANAGEMENT}/models/rhyme?customized=true", timeout=60).raise_for_status().json()
    ranks = version["customizedMetadata"]["ranks"]
    for number, rank in enumerate(ranks):
        print(f"  rank {number}: process {rank['pid']} holds {rank['parameters']:,} parameters")
    return [rank["pid"] for rank in ranks]


def kill_in_a_stream(client: Client, process: int) -> None:
    """Have the rhyme told again and again, and end the process as soon as some words are there."""
    request = json.dumps({**PROMPT, "max_new_tokens": 240, "stream": True})
    began = 0.0
    print("Twinkle", end="", flush=True)
    try:
        for number, piece in enumerate(client.stream("rhyme", request, "application/json")):
            print(piece.decode(), end="", flush=True)
            if number == 5:
                os.kill(process, signal.SIGKILL)
                began = time.monotonic()
    except httpx.RemoteProtocolError as error:
        print(f"\nthe stream broke off after {time.monotonic() - began:.1f} s: {error}")
    else:
        raise SystemExit("\nthe stream came to its end: was the wrong process killed?")


with Client(INFERENCE, MANAGEMENT, retries=NEVER) as client:  # every refusal is to be seen
    with suppress(Conflict):  # it is there already
        client.register("rhyme.mar", initial_workers=1)
    print(f"Twinkle{client.predict_json('rhyme', ONCE)['text']}")
    before = processes()

    kill_in_a_stream(client, before[1])
    began = time.monotonic()
    answer, seen = None, []
    while answer is None:
        try:
            answer = client.predict_json("rhyme", ONCE)
        except ServerError as error:
            if error.reason not in seen:
                print(f"  {error.status}: {error.reason}")
                seen.append(error.reason)
            if time.monotonic() > began + 60:
                raise
            time.sleep(0.2)
    print(f"answered again after {time.monotonic() - began:.1f} s, by two new processes:")
    print(f"Twinkle{answer['text']}")
    assert not set(processes()) & set(before)
