"""LiteLLM against a server at the argument's address (test_current_clients.py)."""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched

import litellm

ADDRESS = {"api_base": f"{sys.argv[1]}/v1", "api_key": "-", "num_retries": 0}
MESSAGES = [{"role": "user", "content": "Hello"}]

chat = {"model": "openai/chat", "messages": MESSAGES, "max_tokens": 16, "seed": 1, **ADDRESS}
answer = litellm.completion(**chat)
text = answer.choices[0].message.content
assert text and answer.usage.completion_tokens > 0
streamed = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == text
assert asyncio.run(litellm.acompletion(**chat)).choices[0].message.content == text
assert (
    litellm.text_completion(model="text-completion-openai/chat", prompt="Hello", max_tokens=4, **ADDRESS)
    .choices[0]
    .text
)
vectors = litellm.embedding(model="openai/minilm", input=["a", "b"], **ADDRESS)
assert [len(vector["embedding"]) for vector in vectors.data] == [384, 384]
try:
    litellm.completion(**{**chat, "model": "openai/missing"})
    raise AssertionError("there is no such model")
except litellm.NotFoundError:
    pass
print("every call was answered")
