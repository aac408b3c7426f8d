"""Has six rhymes told at once, and shows when each one's first words came and when its last.

Ends with 1 where a rhyme was not told as it is, or where a caller's leaving left its place taken.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import httpx

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
MODEL = "rhymes"
RHYMES = (Path(__file__).resolve().parent / "rhymes.txt").read_text().strip().split("\n\n")


async def register(workers: int = 1) -> None:
    async with httpx.AsyncClient(base_url=MANAGEMENT, timeout=120) as management:
        answer = await management.post(
            "/models", params={"url": f"{MODEL}.mar", "initial_workers": workers, "synchronous": "true"}
        )
        if answer.status_code != 409:  # 409: it is registered already
            answer.raise_for_status()


async def tell(client: httpx.AsyncClient, rhyme: str, began: float) -> str:
    """The rhyme as the model tells it, from its first two words; prints what it has said after each piece."""
    prompt = " ".join(rhyme.split()[:2])
    request = {"prompt": prompt, "temperature": 0, "stream": True}
    text, pieces, first = prompt, 0, 0.0
    async with client.stream("POST", f"/predictions/{MODEL}", json=request) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for piece in answer.aiter_text():
            pieces += 1
            first = first or time.perf_counter() - began
            text += piece
            if pieces <= 3:
                print(f"  {time.perf_counter() - began:6.3f} s  {prompt}: {piece!r}")
    last = time.perf_counter() - began
    print(f"  {last:6.3f} s  {prompt}: told in {pieces} pieces, the first after {first * 1000:.0f} ms")
    return text


async def leave(client: httpx.AsyncClient) -> None:
    """A caller that has enough after the first piece."""
    request = {"prompt": "Mary", "stream": True}
    async with client.stream("POST", f"/predictions/{MODEL}", json=request) as answer:
        async for _ in answer.aiter_text():
            return


async def main() -> bool:
    await register()
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=INFERENCE, limits=limits, timeout=60) as client:
        print("six rhymes at once:")
        began = time.perf_counter()
        told = await asyncio.gather(*(tell(client, rhyme, began) for rhyme in RHYMES))
        right = all(text == rhyme for text, rhyme in zip(told, RHYMES))
        print(f"\n{told[0]}\n")
        print(f"{'yes' if right else 'NO '}  each rhyme was told as it is")

        await asyncio.gather(*(leave(client) for _ in range(20)))
        request = {"prompt": "Jack and", "stop": "water", "temperature": 0}
        answer = await client.post(f"/predictions/{MODEL}", json=request)
        whole = answer.json()
        good = answer.status_code == 200 and whole["finish_reason"] == "stop" and whole["text"].endswith("pail of ")
        print(f"{'yes' if good else 'NO '}  after 20 callers left, the next one is answered: {whole}")

        answer = await client.post(f"/predictions/{MODEL}", json={"prompt": "Mary had", "max_new_tokens": 5000})
        refused = answer.status_code == 400
        print(f"{'yes' if refused else 'NO '}  what does not fit is refused: {answer.json()['message']}")
    return right and good and refused


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(not asyncio.run(main()))
