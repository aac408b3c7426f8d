"""Shadow live requests with two versions: one that is nearly as accurate, and one that always fails.

Version 1.0 answers every client meanwhile. Exits with 1 otherwise.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from contextlib import suppress

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torchrelay import NO_RETRIES, AsyncClient, ConflictError, ServerError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
MODEL = "scribble"
CONNECTIONS = 4
REQUESTS_PER_ROUND = 120  # between waits for the shadow: more copies would be dropped where it is slower


async def prepare(client: AsyncClient) -> None:
    for version in ("1.0", "2.0", "3.0"):
        with suppress(ConflictError):  # it is registered already
            await client.register(f"{MODEL}-{version}.mar", initial_workers=1)
    await client.set_default(MODEL, "1.0")


async def set_shadow(client: AsyncClient, version: str) -> None:
    shadow = {
        "version": version,
        "percent": 100,
        "compare": {"kind": "top_k", "k": 3, "least": 0.6},
        "keep": 10,
    }
    print(f"\nPUT /models/{MODEL}/traffic {{'shadow': {shadow}}}")
    await client.set_traffic(MODEL, {"shadow": shadow})
    await client.delete_shadow_stats(MODEL)  # of an earlier run


async def send(client: AsyncClient, images: list[list[float]]) -> Counter[tuple[str, int]]:
    """Send every image, and return the number of responses by version and status."""
    answers: Counter[tuple[str, int]] = Counter()
    remaining = iter(images)

    async def connection() -> None:
        for pixels in remaining:
            try:
                answer = await client.request(MODEL, json.dumps(pixels), "application/json")
            except ServerError as error:
                answer = error
            answers[answer.version or "none", answer.status] += 1

    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return answers


async def wait_for_comparison(client: AsyncClient, calls: int) -> dict:
    """Return the comparison once all copies have finished, shortly after the responses."""
    while True:
        for pair in (await client.shadow(MODEL))["against"]:
            if sum(pair["calls"].values()) == calls:
                return pair
        await asyncio.sleep(0.1)


def show(pair: dict) -> None:
    calls = pair["calls"]
    compared = calls["agreed"] + calls["disagreed"]
    errors = f"{calls['error']} errors {pair['reasons'].get('error', '')}".rstrip()
    print(f"  shadow {pair['shadow']}: {compared} compared, {errors}")
    if not compared:
        return
    flips = round(pair["label_flip_rate"] * compared)
    overlap = pair["measures"]["top_k_agreement"]
    agreement = 100 * pair["agreement_rate"]
    print(f"  {agreement:.1f} % agree; {flips} flips of the first label; {overlap:.2f} of three common")
    worst = pair["disagreements"][0]
    print(f"  the worst of {len(pair['disagreements'])} that are kept:")
    pixels = worst["inputs"][0]["json"]
    for row in range(8):
        line = "".join(" .:*#"[min(4, int(ink / 3.5))] * 2 for ink in pixels[8 * row : 8 * row + 8])
        print(f"    {line}".rstrip())
    for version, answer in ((pair["version"], worst["live"]), (pair["shadow"], worst["shadow"])):
        print(f"    {version}: " + ", ".join(f"{digit} {p:.3f}" for digit, p in answer["json"].items()))


async def main() -> bool:
    digits = load_digits()
    images = train_test_split(
        digits.data, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )[1]
    images = images.tolist()
    succeeded = True
    async with AsyncClient(INFERENCE, MANAGEMENT, retries=NO_RETRIES) as client:  # count every error
        await prepare(client)
        try:
            for version in ("2.0", "3.0"):
                await set_shadow(client, version)
                answers: Counter[tuple[str, int]] = Counter()
                for start in range(0, len(images), REQUESTS_PER_ROUND):
                    chunk = images[start : start + REQUESTS_PER_ROUND]
                    answers += await send(client, chunk)
                    pair = await asyncio.wait_for(wait_for_comparison(client, start + len(chunk)), 60)
                summary = ", ".join(
                    f"{n} by {version} with status {status}" for (version, status), n in answers.items()
                )
                print(f"  {len(images)} requests were answered: {summary}")
                succeeded = succeeded and answers == {("1.0", 200): len(images)}
                show(pair)
        finally:
            await client.reset_traffic(MODEL)
    return succeeded


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
