"""Tries two versions on live calls, as shadows: one that is nearly as good, and one that fails each call.

Every caller is answered by 1.0 all the while. Ends with 1 where one was not.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from contextlib import suppress

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from serve_app.client import NEVER, AsyncClient, Conflict, ServerError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
MODEL = "scribble"
CONNECTIONS = 4
TOGETHER = 120  # calls before the shadow is waited for: of more, copies would be dropped where it is slower


async def prepare(client: AsyncClient) -> None:
    for version in ("1.0", "2.0", "3.0"):
        with suppress(Conflict):  # it is there already
            await client.register(f"{MODEL}-{version}.mar", initial_workers=1)
    await client.set_default(MODEL, "1.0")


async def set_shadow(client: AsyncClient, version: str) -> None:
    shadow = {"version": version, "percent": 100, "compare": {"kind": "top_k", "k": 3, "least": 0.6}, "keep": 10}
    print(f"\nPUT /models/{MODEL}/traffic {{'shadow': {shadow}}}")
    await client.set_traffic(MODEL, {"shadow": shadow})
    await client.forget_shadow(MODEL)  # what an earlier run has left


async def send(client: AsyncClient, images: list[list[float]]) -> Counter[tuple[str, int]]:
    """Ask for every image; how often which version answered with which status."""
    answers: Counter[tuple[str, int]] = Counter()
    waiting = iter(images)

    async def connection() -> None:
        for pixels in waiting:
            try:
                answer = await client.ask(MODEL, json.dumps(pixels), "application/json")
            except ServerError as error:
                answer = error
            answers[answer.version or "nobody", answer.status] += 1

    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return answers


async def compared(client: AsyncClient, calls: int) -> dict:
    """What the shadow came to, once every copy has come to its end: that is a moment after the answers."""
    while True:
        for pair in (await client.shadow(MODEL))["against"]:
            if sum(pair["calls"].values()) == calls:
                return pair
        await asyncio.sleep(0.1)


def show(pair: dict) -> None:
    calls = pair["calls"]
    together = calls["agreed"] + calls["disagreed"]
    errors = f"{calls['error']} errors {pair['reasons'].get('error', '')}".rstrip()
    print(f"  shadow {pair['shadow']}: {together} compared, {errors}")
    if not together:
        return
    flips = round(pair["label_flip_rate"] * together)
    common = pair["measures"]["top_k_agreement"]
    agree = 100 * pair["agreement_rate"]
    print(f"  {agree:.1f} % agree; {flips} flips of the first label; {common:.2f} of three common")
    worst = pair["disagreements"][0]
    print(f"  the worst of {len(pair['disagreements'])} that are kept:")
    pixels = worst["inputs"][0]["json"]
    for row in range(8):
        print(("    " + "".join(" .:*#"[min(4, int(ink / 3.5))] * 2 for ink in pixels[8 * row : 8 * row + 8])).rstrip())
    for version, answer in ((pair["version"], worst["live"]), (pair["shadow"], worst["shadow"])):
        print(f"    {version}: " + ", ".join(f"{digit} {p:.3f}" for digit, p in answer["json"].items()))


async def main() -> bool:
    digits = load_digits()
    images = train_test_split(digits.data, digits.target, test_size=0.2, stratify=digits.target, random_state=0)[1]
    images = images.tolist()
    fine = True
    async with AsyncClient(INFERENCE, MANAGEMENT, retries=NEVER) as client:  # every refusal counts
        await prepare(client)
        try:
            for version in ("2.0", "3.0"):
                await set_shadow(client, version)
                answers: Counter[tuple[str, int]] = Counter()
                for begin in range(0, len(images), TOGETHER):
                    lot = images[begin : begin + TOGETHER]
                    answers += await send(client, lot)
                    pair = await asyncio.wait_for(compared(client, begin + len(lot)), 60)
                said = ", ".join(f"{n} by {version} with status {status}" for (version, status), n in answers.items())
                print(f"  {len(images)} calls were answered: {said}")
                fine = fine and answers == {("1.0", 200): len(images)}
                show(pair)
        finally:
            await client.reset_traffic(MODEL)
    return fine


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
