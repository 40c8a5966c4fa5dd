"""LangChain's ChatOpenAI against a live server: URL MODEL as arguments. Ends with 0 where everything holds."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1:]
HOW: dict[str, Any] = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
ASK = [HumanMessage("What is the weather in Paris?")]


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    warm: bool


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def chat() -> None:
    llm = ChatOpenAI(temperature=0, max_completion_tokens=12, **HOW)
    whole = llm.invoke(ASK)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] <= 12
    assert "".join(part.content for part in llm.stream(ASK)) == whole.content


def tools() -> None:
    llm = ChatOpenAI(temperature=0, max_completion_tokens=200, **HOW)
    asked = llm.bind_tools([weather], tool_choice="required").invoke(ASK)
    (call, *_) = asked.tool_calls
    assert call["name"] == "weather"
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert llm.bind_tools([weather], tool_choice="none").invoke([*ASK, asked, result]).content


def schema() -> None:
    llm = ChatOpenAI(max_completion_tokens=200, **HOW)
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Weather, method=method).invoke(ASK), Weather)


def embeddings() -> None:
    llm = OpenAIEmbeddings(check_embedding_ctx_length=False, **HOW)
    one, two = llm.embed_documents(["one", "two"])
    assert len(one) == len(two) == len(llm.embed_query("one"))


def logprobs() -> None:
    llm = ChatOpenAI(max_completion_tokens=4, logprobs=True, top_logprobs=2, **HOW)
    assert len(llm.invoke(ASK).response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


for check in (chat, tools, schema, embeddings, logprobs):
    check()
    print(f"LangChain, {check.__name__}: held")
