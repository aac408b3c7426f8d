"""Serves the rhyme from two processes, ends one of them, and asks again."""

import os
import signal
import time

import httpx

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")


def ask(client: httpx.Client) -> httpx.Response:
    return client.post(f"{INFERENCE}/predictions/rhyme", json={"prompt": list(b"Twinkle"), "max_new_tokens": 50})


def show(answer: httpx.Response) -> list[int]:
    """Print an answer, and return the processes that it came from."""
    said = answer.raise_for_status().json()
    print(f"Twinkle{bytes(said['tokens']).decode()}")
    for number, rank in enumerate(said["ranks"]):
        print(f"  rank {number}: process {rank['pid']} holds {rank['parameters']:,} parameters")
    return [rank["pid"] for rank in said["ranks"]]


with httpx.Client(timeout=120) as client:
    answer = client.post(f"{MANAGEMENT}/models", params={"url": "rhyme.mar", "initial_workers": 1})
    if answer.status_code != 409:  # 409: it is there already
        answer.raise_for_status()
    processes = show(ask(client))

    os.kill(processes[1], signal.SIGKILL)
    began = time.monotonic()
    print("killed rank 1")
    answered = ""
    while (answer := ask(client)).status_code >= 500:
        reason = answer.headers["x-torchrelay-reason"]
        if reason != answered:
            print(f"  {answer.status_code}: {reason}")
        answered = reason
        if time.monotonic() > began + 60:
            answer.raise_for_status()
        time.sleep(0.2)
    print(f"answered again after {time.monotonic() - began:.0f} s, by two new processes:")
    assert not set(show(answer)) & set(processes)
