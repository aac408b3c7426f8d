"""OpenAI's client against a server at the argument's address (test_current_clients.py)."""

import asyncio
import sys
from typing import Any

import openai
import pydantic

BASE = f"{sys.argv[1]}/v1"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=150)


client = openai.OpenAI(base_url=BASE, api_key="-", max_retries=0, timeout=60)
assert {"chat", "minilm"} <= {model.id for model in client.models.list()}
options: Any = {"model": "chat", "messages": MESSAGES, "max_completion_tokens": 16, "seed": 1}
whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
text = whole.choices[0].message.content
assert whole.usage is not None and whole.choices[0].logprobs is not None
assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content or ()) > 0
streamed = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
chunks = list(streamed)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert chunks[-1].usage == whole.usage.model_copy(
    update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
)
with client.chat.completions.stream(**options) as events:
    assert "".join(event.delta for event in events if event.type == "content.delta") == text
person = client.chat.completions.parse(
    model="chat", messages=MESSAGES, response_format=Person, max_tokens=200
)
assert isinstance(person.choices[0].message.parsed, Person)
called = client.chat.completions.create(
    model="chat", messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=200
)
[call] = called.choices[0].message.tool_calls or ()
assert call.type == "function" and call.function.name == "weather"
answered = [
    *MESSAGES,
    called.choices[0].message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
]
assert (
    client.chat.completions.create(model="chat", messages=answered, max_tokens=4).choices[0].message.content
)
completion = client.completions.create(model="chat", prompt=["a", "b"], max_tokens=4, n=2, temperature=0)
assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
raw = client.chat.completions.with_raw_response.create(**options, extra_body={"top_a": 0.5})
assert raw.headers["x-torchrelay-ignored"] == "top_a"
for encoding in ("float", "base64"):
    vectors = client.embeddings.create(model="minilm", input=["a", "b"], encoding_format=encoding)  # type: ignore[arg-type]
    assert [len(vector.embedding) for vector in vectors.data] == [384, 384] or encoding == "base64"
try:
    client.chat.completions.create(model="chat", messages=MESSAGES, temperature=9)
    raise AssertionError("a temperature of 9 is an error")
except openai.BadRequestError as error:
    assert "temperature is 9" in str(error), error
try:
    client.chat.completions.create(model="missing", messages=MESSAGES)
    raise AssertionError("there is no such model")
except openai.NotFoundError as error:
    assert "missing" in str(error), error


async def answer_many() -> None:
    async with openai.AsyncOpenAI(base_url=BASE, api_key="-", max_retries=0, timeout=60) as many:
        results = await asyncio.gather(*(many.chat.completions.create(**options) for _ in range(8)))
        assert {result.choices[0].message.content for result in results} == {text}


asyncio.run(answer_many())
print("every call was answered")
