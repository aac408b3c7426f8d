"""Register the models and the workflow, and ask questions about this project: run.py [QUESTION ...]."""

import os
import sys
from contextlib import suppress

from torchrelay import Client, ConflictError

INFERENCE = os.environ.get("TORCHRELAY_INFERENCE", "http://127.0.0.1:8080")
MANAGEMENT = os.environ.get("TORCHRELAY_MANAGEMENT", "http://127.0.0.1:8081")
QUESTIONS = (
    "How do I stop an experiment?",
    "What happens when a new version has more errors?",
    "Which extra installs ONNX Runtime for GPUs?",
)

if __name__ == "__main__":
    with Client(INFERENCE, MANAGEMENT) as client:
        for url, task in (("minilm", "sentence-embedding"), ("ranker.mar", "")):
            with suppress(ConflictError):  # it is registered already
                client.register(url, initial_workers=1, **({"task": task} if task else {}))
        with suppress(ConflictError):
            print(client.register_workflow("answers.war"))
        for question in sys.argv[1:] or QUESTIONS:
            response = client.request("answers", question.encode(), content_type="text/plain")
            found = response.json()
            print(
                f"\n{question}\n  {found['answer']}\n  {found['page']}, {found['section']} ({found['score']})"
            )
        for step in response.headers["server-timing"].split(", "):
            name, _, milliseconds = step.partition(";dur=")
            print(f"{name:>8} {float(milliseconds):7.1f} ms")
