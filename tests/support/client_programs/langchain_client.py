"""LangChain's classes for OpenAI's API against a server (test_current_clients.py)."""

import asyncio
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

ADDRESS = {"base_url": f"{sys.argv[1]}/v1", "api_key": "-", "max_retries": 0}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)


class Place(BaseModel):
    city: str = Field(max_length=8)


@tool(args_schema=Place)
def weather(city: str) -> str:
    """Return the weather of a city."""
    return "sunny"


chat = ChatOpenAI(model="chat", max_tokens=16, seed=1, **ADDRESS)
messages = [SystemMessage("Be brief."), HumanMessage("Hello")]
answer = chat.invoke(messages)
assert answer.content and answer.usage_metadata["output_tokens"] > 0, answer
assert "".join(chunk.content for chunk in chat.stream(messages)) == answer.content
assert len(chat.batch([messages] * 4)) == 4
chain = ChatPromptTemplate.from_messages([("human", "Say {word}")]) | chat
assert asyncio.run(chain.ainvoke({"word": "hi"})).content
longer = chat.model_copy(update={"max_tokens": 200})
for method in ("json_schema", "function_calling"):
    assert isinstance(longer.with_structured_output(Person, method=method).invoke("Hello"), Person)
[call] = longer.bind_tools([weather], tool_choice="required").invoke("Hello").tool_calls
assert call["name"] == "weather", call
assert OpenAI(model="chat", max_tokens=4, **ADDRESS).invoke("Hello")
embeddings = OpenAIEmbeddings(model="minilm", check_embedding_ctx_length=False, **ADDRESS)
assert [len(vector) for vector in embeddings.embed_documents(["a", "b"])] == [384, 384]
assert len(embeddings.embed_query("a")) == 384
print("every call was answered")
