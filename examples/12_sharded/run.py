"""Serve the rhyme from two processes, kill one of them during a stream, and send the request again."""

import json
import os
import signal
import time
from contextlib import suppress

import httpx
from torchrelay import NO_RETRIES, Client, ConflictError, ServerError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
PROMPT = {"prompt": "Twinkle", "temperature": 0}
ONCE = {**PROMPT, "max_new_tokens": 50}


def list_processes() -> list[int]:
    """Print the processes of the model and return their ids."""
    [version] = httpx.get(f"{MANAGEMENT}/models/rhyme?customized=true", timeout=60).raise_for_status().json()
    ranks = version["customizedMetadata"]["ranks"]
    for number, rank in enumerate(ranks):
        print(f"  rank {number}: process {rank['pid']} holds {rank['parameters']:,} parameters")
    return [rank["pid"] for rank in ranks]


def kill_during_stream(client: Client, process: int) -> None:
    """Stream the rhyme repeatedly, and kill the process after a few chunks."""
    request = json.dumps({**PROMPT, "max_new_tokens": 240, "stream": True})
    killed_at = 0.0
    print("Twinkle", end="", flush=True)
    try:
        for number, chunk in enumerate(client.stream("rhyme", request, "application/json")):
            print(chunk.decode(), end="", flush=True)
            if number == 5:
                os.kill(process, signal.SIGKILL)
                killed_at = time.monotonic()
    except httpx.RemoteProtocolError as error:
        print(f"\nthe stream broke off after {time.monotonic() - killed_at:.1f} s: {error}")
    else:
        raise SystemExit("\nthe stream came to its end: was the wrong process killed?")


with Client(INFERENCE, MANAGEMENT, retries=NO_RETRIES) as client:  # show every error
    with suppress(ConflictError):  # it is registered already
        client.register("rhyme.mar", initial_workers=1)
    print(f"Twinkle{client.predict_json('rhyme', ONCE)['text']}")
    before = list_processes()

    kill_during_stream(client, before[1])
    started = time.monotonic()
    answer, reasons = None, []
    while answer is None:
        try:
            answer = client.predict_json("rhyme", ONCE)
        except ServerError as error:
            if error.reason not in reasons:
                print(f"  {error.status}: {error.reason}")
                reasons.append(error.reason)
            if time.monotonic() > started + 60:
                raise
            time.sleep(0.2)
    print(f"answered again after {time.monotonic() - started:.1f} s, by two new processes:")
    print(f"Twinkle{answer['text']}")
    assert not set(list_processes()) & set(before)
