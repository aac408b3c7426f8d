"""Has six rhymes told at once, and shows when each one's first words came and when its last; then by OpenAI's client.

Ends with 1 where a rhyme was not told as it is, or where a caller's leaving left its place taken.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import aclosing, suppress
from pathlib import Path

from openai import AsyncOpenAI, BadRequestError

from serve_app.client import AsyncClient, Conflict, HandlerFailed

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
MODEL = "rhymes"
RHYMES = (Path(__file__).resolve().parent / "rhymes.txt").read_text().strip().split("\n\n")


async def tell(client: AsyncClient, rhyme: str, began: float) -> str:
    """The rhyme as the model tells it, from its first two words; prints what it has said after each piece."""
    prompt = " ".join(rhyme.split()[:2])
    request = json.dumps({"prompt": prompt, "temperature": 0, "stream": True})
    text, pieces, first = prompt, 0, 0.0
    async for piece in client.stream(MODEL, request, "application/json"):
        pieces += 1
        first = first or time.perf_counter() - began
        text += piece.decode()
        if pieces <= 3:
            print(f"  {time.perf_counter() - began:6.3f} s  {prompt}: {piece.decode()!r}")
    last = time.perf_counter() - began
    print(f"  {last:6.3f} s  {prompt}: told in {pieces} pieces, the first after {first * 1000:.0f} ms")
    return text


async def leave(client: AsyncClient) -> None:
    """A caller that has enough after the first piece."""
    request = json.dumps({"prompt": "Mary", "stream": True})
    async with aclosing(client.stream(MODEL, request, "application/json")) as pieces:
        async for _ in pieces:
            return


async def chat() -> bool:
    """The first rhyme by OpenAI's client, in pieces, whole, and as TorchServe's path has it; and what it refuses."""
    rhyme, first = RHYMES[0], " ".join(RHYMES[0].split()[:2])
    messages = [{"role": "user", "content": first}]
    text = first
    async with AsyncOpenAI(base_url=f"{INFERENCE}/v1", api_key="none is wanted") as client:
        print(f"models: {', '.join([model.id async for model in client.models.list()])}")
        asked = {"model": MODEL, "messages": messages, "temperature": 0}
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            text += chunk.choices[0].delta.content or ""
        whole = await client.completions.create(model=f"{MODEL}:1.0", prompt=first, temperature=0, logprobs=1)
        try:
            await client.chat.completions.create(**asked, max_tokens=5000)
        except BadRequestError as error:
            print(f"refused: {error.code}, {error.body['message'][:60]} ...")
    async with AsyncOpenAI(base_url=f"{INFERENCE}/predictions/{MODEL}/1.0/v1", api_key="none is wanted") as client:
        there = await client.chat.completions.create(**asked)
    likely = sum(whole.choices[0].logprobs.token_logprobs)
    print(f"{whole.usage.completion_tokens} tokens, e^{likely:.2f} likely together")
    return text == rhyme == first + whole.choices[0].text == first + there.choices[0].message.content


async def main() -> bool:
    async with AsyncClient(INFERENCE, MANAGEMENT) as client:
        with suppress(Conflict):  # it is registered already
            await client.register(f"{MODEL}.mar", initial_workers=1, synchronous=True)
        print("six rhymes at once:")
        began = time.perf_counter()
        told = await asyncio.gather(*(tell(client, rhyme, began) for rhyme in RHYMES))
        right = all(text == rhyme for text, rhyme in zip(told, RHYMES))
        print(f"\n{told[0]}\n")
        print(f"{'yes' if right else 'NO '}  each rhyme was told as it is")

        await asyncio.gather(*(leave(client) for _ in range(20)))
        whole = await client.predict_json(MODEL, {"prompt": "Jack and", "stop": "water", "temperature": 0})
        good = whole["finish_reason"] == "stop" and whole["text"].endswith("pail of ")
        print(f"{'yes' if good else 'NO '}  after 20 callers left, the next one is answered: {whole}")

        try:
            refused, told = False, await client.predict_json(MODEL, {"prompt": "Mary had", "max_new_tokens": 5000})
        except HandlerFailed as error:
            refused, told = error.status == 400, error.message
        print(f"{'yes' if refused else 'NO '}  what does not fit is refused: {told}")

    print("\nby OpenAI's client:")
    chatted = await chat()
    print(f"{'yes' if chatted else 'NO '}  it tells the same")
    return right and good and refused and chatted


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(not asyncio.run(main()))
