"""The model that `torchrelay serve model.py` serves."""

from pydantic import BaseModel


class Request(BaseModel):
    text: str


class Response(BaseModel):
    words: int


class Model:
    def setup(self, context):
        """Load weights here, from files in context.model_dir and onto context.device."""

    def predict(self, request: Request) -> Response:
        return Response(words=len(request.text.split()))
