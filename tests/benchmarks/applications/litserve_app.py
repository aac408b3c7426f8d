"""The models as LitServe serves them: ``litserve_app.py PORT``.

LitServe passes the annotations of ``decode_request`` and ``encode_response`` to FastAPI as schemas. Without
annotations a request is any JSON.
"""

from __future__ import annotations

import sys
from typing import Any

import litserve
import torch

from tests.benchmarks.archives import MODELS
from tests.benchmarks.frameworks import BATCH, BATCH_DELAY_S


class Echo(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):
        return request

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, x: list[Any]) -> list[Any]:
        return x

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output):
        return output


class Perceptron(litserve.LitAPI):
    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.model = MODELS["mlp"].build().to(device)

    def decode_request(self, request):
        return torch.tensor(request, dtype=torch.float32)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(x)

    def encode_response(self, output):
        return {"class": int(output.argmax()), "logits": output.tolist()}


if __name__ == "__main__":
    apis = [
        api(max_batch_size=BATCH, batch_timeout=BATCH_DELAY_S, api_path=f"/predictions/{name}")
        for name, api in (("echo", Echo), ("mlp", Perceptron))
    ]
    server = litserve.LitServer(apis, accelerator="cpu", fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
