"""The error for explanations by handlers of language models, whose engines keep no gradients."""

from __future__ import annotations

from typing import Any

from handlers.errors import PredictionException


def refuse_explanations(handler: str, context: Any) -> None:
    """Raise PredictionException (501), which names the handler that can, for a batch of explanations."""
    if context is not None and context.get_request_header(0, "explain") == "True":
        raise PredictionException(
            f"The handler {handler} explains nothing. Register the same folder with handler=huggingface: its "
            "task text-generation attributes a continuation to each token of its text.",
            501,
        )
