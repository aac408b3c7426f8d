"""What handlers of language models say when an explanation is asked of them: their engines keep no gradients."""

from __future__ import annotations

from typing import Any

from handlers.errors import PredictionException


def refuse_explanations(handler: str, context: Any) -> None:
    """Raises PredictionException (501), with who can, for a batch of explanations."""
    if context is not None and context.get_request_header(0, "explain") == "True":
        raise PredictionException(
            f"The handler {handler} explains nothing. Register the same folder with handler=huggingface: its task "
            "text-generation says what each token of a text had to do with what is written after it.",
            501,
        )
