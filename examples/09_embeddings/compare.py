"""Request the embeddings of a few sentences and print their cosine similarities."""

import os
from concurrent.futures import ThreadPoolExecutor

from torchrelay import Client

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
SENTENCES = (
    "A kitten hunts mice.",
    "The cat is after a mouse.",
    "Revenue rose by four per cent in the third quarter.",
    "From July to September sales were up by about a twenty-fifth, "
    "as the company says in its quarterly report.",
)


def cosine(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second))  # their norms are 1


if __name__ == "__main__":
    # Concurrent requests can share a batch.
    with Client(INFERENCE) as client, ThreadPoolExecutor() as threads:
        vectors = list(threads.map(lambda text: client.predict_json("minilm", {"inputs": text}), SENTENCES))
    print(f"{len(vectors[0])} numbers for a sentence")
    for number, (sentence, vector) in enumerate(zip(SENTENCES, vectors), 1):
        print(f"{number}  {'  '.join(f'{cosine(vector, other):6.3f}' for other in vectors)}  {sentence[:52]}")
