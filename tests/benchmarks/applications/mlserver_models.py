"""The models as MLServer serves them, by the Open Inference Protocol with JSON."""

from __future__ import annotations

import torch
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

from tests.benchmarks.archives import MODELS


class Echo(MLModel):
    """A tensor ``text`` of strings in and out."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        texts = StringCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("text", texts)])


class Perceptron(MLModel):
    """A tensor ``x`` of ``[rows, 64]`` in; ``class`` and ``logits`` out."""

    async def load(self) -> bool:
        torch.set_num_threads(1)
        self.model = MODELS["mlp"].build()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        with torch.inference_mode():
            logits = self.model(torch.from_numpy(rows))
        outputs = {"class": logits.argmax(1).numpy(), "logits": logits.numpy()}
        encoded = [NumpyCodec.encode_output(name, value) for name, value in outputs.items()]
        return InferenceResponse(model_name=self.name, outputs=encoded)


class StoredPerceptron(MLModel):
    """A perceptron with the weights of a file; ``hidden`` is its width."""

    async def load(self) -> bool:
        torch.set_num_threads(1)
        hidden = self.settings.parameters.extra["hidden"]
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
        )
        self.model.load_state_dict(torch.load(self.settings.parameters.uri, weights_only=True))
        self.model.eval()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        with torch.inference_mode():
            classes = self.model(torch.from_numpy(rows)).argmax(1).numpy()
        outputs = [NumpyCodec.encode_output("class", classes)]
        return InferenceResponse(model_name=self.name, outputs=outputs)
