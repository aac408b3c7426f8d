"""Asks why the picture of a three is read as a three and not as an eight, and draws the answer."""

import os
from contextlib import suppress
from pathlib import Path

from serve_app.client import Client, Conflict

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
IMAGE = Path(__file__).resolve().parent.parent / "01_first_model" / "three.png"
MODEL = "reasons"

INK = " .:*#"
AGAINST, FOR = "-=", "+#"  # a little, and much


def explain(client: Client, version: str | None = None, **question: str) -> dict:
    return client.ask(MODEL, {"data": IMAGE.read_bytes(), **question}, version=version, explain=True).json()


def ink(rows: list[list[float]]) -> list[str]:
    return ["".join(INK[min(4, int(value / 3.5))] * 2 for value in row) for row in rows]


def signs(rows: list[list[float]]) -> list[str]:
    """A sign for each pixel that has a say, by what share of the largest it has."""
    largest = max(abs(value) for row in rows for value in row)

    def sign(value: float) -> str:
        share = abs(value) / largest
        return " " if share < 0.1 else (FOR if value > 0 else AGAINST)[share > 0.5]

    return ["".join(sign(value) * 2 for value in row) for row in rows]


def show(found: dict[str, dict], image: list[list[float]]) -> None:
    """The image and the attributions beside each other, and under them what they sum to."""
    columns = {"the image": ink(image), **{title: signs(one["attributions"]) for title, one in found.items()}}
    print("  " + "".join(f"{title:<28}" for title in columns).rstrip())
    for lines in zip(*columns.values()):
        print("  " + "".join(f"{line:<28}" for line in lines).rstrip())
    for title, one in found.items():
        total = sum(value for row in one["attributions"] for value in row)
        difference = one["score"] - one["score_of_empty"]
        print(f"  {title} The attributions sum to {total:.3f}, score less score of an empty image is {difference:.3f}")


def main() -> None:
    with Client(INFERENCE, MANAGEMENT) as client:
        with suppress(Conflict):  # it is there already
            client.register(f"{MODEL}.mar", initial_workers=1)
        read = client.ask(MODEL, IMAGE.read_bytes()).json()
        print("It is read as " + ", ".join(f"{digit} {share:.4f}" for digit, share in read.items()))
        three = explain(client)
        print("\nWhat speaks for (+ #) and against (- =) a digit, by integrated gradients:")
        show({"three?": three, "eight?": explain(client, "1.0", target="8")}, three["pixels"])
        print("\nThe same by Shapley values, which need no gradients:")
        shapley = {"method": "shapley", "steps": "20"}
        show({"three?": explain(client, **shapley), "eight?": explain(client, target="8", **shapley)}, three["pixels"])


if __name__ == "__main__":
    main()
