"""Explain why the image of a three is classified as a three and not as an eight, and draw the result."""

import os
from contextlib import suppress
from pathlib import Path

from torchrelay import Client, ConflictError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
IMAGE = Path(__file__).resolve().parent.parent / "01_first_model" / "three.png"
MODEL = "reasons"

INK = " .:*#"
NEGATIVE, POSITIVE = "-=", "+#"  # weak and strong


def explain(client: Client, version: str | None = None, **options: str) -> dict:
    return client.request(
        MODEL, {"data": IMAGE.read_bytes(), **options}, version=version, explain=True
    ).json()


def draw_image(rows: list[list[float]]) -> list[str]:
    return ["".join(INK[min(4, int(value / 3.5))] * 2 for value in row) for row in rows]


def draw_attributions(rows: list[list[float]]) -> list[str]:
    """Draw a sign per pixel by its share of the largest attribution."""
    largest = max(abs(value) for row in rows for value in row)

    def sign(value: float) -> str:
        share = abs(value) / largest
        return " " if share < 0.1 else (POSITIVE if value > 0 else NEGATIVE)[share > 0.5]

    return ["".join(sign(value) * 2 for value in row) for row in rows]


def show(explanations: dict[str, dict], image: list[list[float]]) -> None:
    """Print the image beside the attributions, and the sums of the attributions."""
    columns = {
        "the image": draw_image(image),
        **{
            title: draw_attributions(explanation["attributions"])
            for title, explanation in explanations.items()
        },
    }
    print("  " + "".join(f"{title:<28}" for title in columns).rstrip())
    for lines in zip(*columns.values()):
        print("  " + "".join(f"{line:<28}" for line in lines).rstrip())
    for title, explanation in explanations.items():
        total = sum(value for row in explanation["attributions"] for value in row)
        difference = explanation["score"] - explanation["score_of_empty"]
        print(
            f"  {title} The attributions sum to {total:.3f}, "
            f"score less score of an empty image is {difference:.3f}"
        )


def main() -> None:
    with Client(INFERENCE, MANAGEMENT) as client:
        with suppress(ConflictError):  # it is registered already
            client.register(f"{MODEL}.mar", initial_workers=1)
        prediction = client.request(MODEL, IMAGE.read_bytes()).json()
        print("It is read as " + ", ".join(f"{digit} {share:.4f}" for digit, share in prediction.items()))
        three = explain(client)
        print("\nWhat speaks for (+ #) and against (- =) a digit, by integrated gradients:")
        show({"three?": three, "eight?": explain(client, "1.0", target="8")}, three["pixels"])
        print("\nThe same by Shapley values, which need no gradients:")
        shapley = {"method": "shapley", "steps": "20"}
        show(
            {"three?": explain(client, **shapley), "eight?": explain(client, target="8", **shapley)},
            three["pixels"],
        )


if __name__ == "__main__":
    main()
