"""Anthropic's Messages API."""

from __future__ import annotations

from serve_app.protocols.anthropic.errors import AnthropicError
from serve_app.protocols.anthropic.messages import CountTokensBody, MessagesBody, TokenCount
from serve_app.protocols.http.endpoints import API, ErrorFormat, json
from serve_app.protocols.openapi.openai import COMPLETION, inference

ANTHROPIC = API(
    "Anthropic",
    "Anthropic's Messages API, for models whose handlers implement OpenAI's.",
    ErrorFormat(AnthropicError, common=(401, 403, 500)),
    (
        inference("/v1/messages", "messages", "Create a message.", MessagesBody, COMPLETION),
        inference(
            "/v1/messages/count_tokens",
            "count_message_tokens",
            "Count the tokens of messages.",
            CountTokensBody,
            json(TokenCount, from_model=True),
        ),
    ),
)
