"""One call of each client library as its users make it, with a tool or a typed answer. Runs in the
environment of `make setup-clients`: libraries.py NAME URL BIAS prints what came back as JSON.

BIAS, a JSON object of token ids: a random model ends its JSON as soon as it may.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

MODEL, KEY, TOKENS = "tiny", "none", 200
QUESTION = "What about the weather?"


class Weather(BaseModel):
    """The weather of a city over some days."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3, 4, 5, 6, 7]


def _langchain(url: str, bias: dict[str, int]) -> Any:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key=KEY, max_tokens=TOKENS, logit_bias=bias
    )
    return model.bind_tools([Weather], tool_choice="Weather")


def langchain(url: str, bias: dict[str, int]) -> Any:
    """`bind_tools`."""
    return [each["args"] for each in _langchain(url, bias).invoke(QUESTION).tool_calls]


def langchain_streamed(url: str, bias: dict[str, int]) -> Any:
    """The same, streamed."""
    first, *others = _langchain(url, bias).stream(QUESTION)
    return [each["args"] for each in sum(others, first).tool_calls]


def instructor(url: str, bias: dict[str, int]) -> Any:
    """Its default mode."""
    import instructor as library
    import openai

    client = library.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY))
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Weather,
        max_tokens=TOKENS,
        logit_bias=bias,
        max_retries=0,
    )
    return [answer.model_dump()]


def pydantic_ai(url: str, bias: dict[str, int]) -> Any:
    """Its default output, a tool."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    agent = Agent(
        model, output_type=Weather, model_settings={"max_tokens": TOKENS, "logit_bias": bias}
    )
    return [agent.run_sync(QUESTION).output.model_dump()]


def openai_agents(url: str, bias: dict[str, int]) -> Any:
    """Its default model, which speaks the responses API."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY))
    called = []

    @agents.function_tool
    def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3, 4, 5, 6, 7]) -> str:
        """The weather of a city over some days."""
        called.append({"city": city, "days": days})
        return "sunny"

    agent = agents.Agent(
        name="forecaster",
        instructions="Use the tool.",
        model=MODEL,
        tools=[weather],
        tool_use_behavior="stop_on_first_tool",
        model_settings=agents.ModelSettings(
            tool_choice="required", max_tokens=TOKENS, extra_body={"logit_bias": bias}
        ),
    )
    answer = agents.Runner.run_sync(agent, QUESTION)
    assert "sunny" in str(answer.final_output), answer.final_output
    return called


def litellm(url: str, bias: dict[str, int]) -> Any:
    """As a client of a server that speaks OpenAI's API."""
    import litellm as library

    answer = library.completion(
        model=f"openai/{MODEL}",
        api_base=f"{url}/v1",
        api_key=KEY,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[
            {
                "type": "function",
                "function": {"name": "weather", "parameters": Weather.model_json_schema()},
            }
        ],
        tool_choice="required",
        max_tokens=TOKENS,
        logit_bias=bias,
    )
    return [json.loads(each.function.arguments) for each in answer.choices[0].message.tool_calls]


CALLS: dict[str, Callable[[str, dict[str, int]], Any]] = {
    each.__name__: each
    for each in (langchain, langchain_streamed, instructor, pydantic_ai, openai_agents, litellm)
}

if __name__ == "__main__":
    name, url, bias = sys.argv[1:]
    print(json.dumps(CALLS[name](url, json.loads(bias))))
