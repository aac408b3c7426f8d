"""Generate six rhymes concurrently with the times of their first and last words; then use OpenAI's client.

Exits with 1 if a rhyme is not reproduced exactly, or if disconnected clients block later requests.
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
from torchrelay import AsyncClient, ConflictError, HandlerFailedError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
MODEL = "rhymes"
RHYMES = (Path(__file__).resolve().parent / "rhymes.txt").read_text().strip().split("\n\n")


async def generate(client: AsyncClient, rhyme: str, started: float) -> str:
    """Generate a rhyme from its first two words, and print its first three chunks."""
    prompt = " ".join(rhyme.split()[:2])
    request = json.dumps({"prompt": prompt, "temperature": 0, "stream": True})
    text, chunks, first = prompt, 0, 0.0
    async for chunk in client.stream(MODEL, request, "application/json"):
        chunks += 1
        first = first or time.perf_counter() - started
        text += chunk.decode()
        if chunks <= 3:
            print(f"  {time.perf_counter() - started:6.3f} s  {prompt}: {chunk.decode()!r}")
    last = time.perf_counter() - started
    print(f"  {last:6.3f} s  {prompt}: {chunks} chunks, the first after {first * 1000:.0f} ms")
    return text


async def disconnect(client: AsyncClient) -> None:
    """Start a stream and disconnect after its first chunk."""
    request = json.dumps({"prompt": "Mary", "stream": True})
    async with aclosing(client.stream(MODEL, request, "application/json")) as chunks:
        async for _ in chunks:
            return


async def chat() -> bool:
    """Generate a rhyme with OpenAI's client, as a stream, an object and by TorchServe's path."""
    rhyme, first = RHYMES[0], " ".join(RHYMES[0].split()[:2])
    messages = [{"role": "user", "content": first}]
    text = first
    async with AsyncOpenAI(base_url=f"{INFERENCE}/v1", api_key="unused") as client:
        print(f"models: {', '.join([model.id async for model in client.models.list()])}")
        params = {"model": MODEL, "messages": messages, "temperature": 0}
        async for chunk in await client.chat.completions.create(**params, stream=True):
            text += chunk.choices[0].delta.content or ""
        completion = await client.completions.create(
            model=f"{MODEL}:1.0", prompt=first, temperature=0, logprobs=1
        )
        try:
            await client.chat.completions.create(**params, max_tokens=5000)
        except BadRequestError as error:
            print(f"refused: {error.code}, {error.body['message'][:60]} ...")
    async with AsyncOpenAI(base_url=f"{INFERENCE}/predictions/{MODEL}/1.0/v1", api_key="unused") as client:
        by_path = await client.chat.completions.create(**params)
    logprob = sum(completion.choices[0].logprobs.token_logprobs)
    print(f"{completion.usage.completion_tokens} tokens, e^{logprob:.2f} likely together")
    return text == rhyme == first + completion.choices[0].text == first + by_path.choices[0].message.content


async def main() -> bool:
    async with AsyncClient(INFERENCE, MANAGEMENT) as client:
        with suppress(ConflictError):  # it is registered already
            await client.register(f"{MODEL}.mar", initial_workers=1, synchronous=True)
        print("six rhymes at once:")
        started = time.perf_counter()
        texts = await asyncio.gather(*(generate(client, rhyme, started) for rhyme in RHYMES))
        exact = all(text == rhyme for text, rhyme in zip(texts, RHYMES))
        print(f"\n{texts[0]}\n")
        print(f"{'yes' if exact else 'NO '}  each rhyme is reproduced exactly")

        await asyncio.gather(*(disconnect(client) for _ in range(20)))
        answer = await client.predict_json(MODEL, {"prompt": "Jack and", "stop": "water", "temperature": 0})
        answered = answer["finish_reason"] == "stop" and answer["text"].endswith("pail of ")
        print(f"{'yes' if answered else 'NO '}  after 20 disconnects, the next request is answered: {answer}")

        try:
            rejected = False
            message = await client.predict_json(MODEL, {"prompt": "Mary had", "max_new_tokens": 5000})
        except HandlerFailedError as error:
            rejected, message = error.status == 400, error.message
        print(f"{'yes' if rejected else 'NO '}  a request beyond the capacity is refused: {message}")

    print("\nby OpenAI's client:")
    same = await chat()
    print(f"{'yes' if same else 'NO '}  the texts are equal")
    return exact and answered and rejected and same


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(not asyncio.run(main()))
