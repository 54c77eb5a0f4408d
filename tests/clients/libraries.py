"""Client libraries as their users call them. Runs in an environment of `make setup-clients`:
libraries.py NAME ASKED prints what came of each kind of call as JSON.

ASKED, a JSON object: the gateway's `url`; `keys`, an API key for each kind of call; `bias`, a logit
bias that ends the answers of a random model as soon as they may end. Each key has one call in some
seconds. The key `limited` makes three: the second is refused, and so is the first try of the third,
for which the library may retry.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from pydantic import BaseModel

TOKENS, TOOL_TOKENS = 8, 200
QUESTION = "What about the weather?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather of a city over some days."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3, 4, 5, 6, 7]


FUNCTION = {"name": "weather", "parameters": Weather.model_json_schema()}
TOOL: Any = {"type": "function", "function": FUNCTION}


@dataclass(frozen=True)
class Asked:
    """One call. `retries`: as many as the library makes by default, else none."""

    url: str
    key: str
    bias: dict[str, int]
    model: str = "tiny"
    temperature: float = 0.0
    retries: bool = False

    @property
    def base(self) -> str:
        return f"{self.url}/v1"

    @property
    def attempts(self) -> dict[str, Any]:
        """The argument of clients that are made like OpenAI's."""
        return {} if self.retries else {"max_retries": 0}

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": TOKENS, "temperature": self.temperature}

    @property
    def forced(self) -> dict[str, Any]:
        """Of a tool call."""
        return {"max_tokens": TOOL_TOKENS, "logit_bias": self.bias}


class Library(Protocol):
    """How its users call it."""

    def plain(self, asked: Asked) -> str:
        """The text of a whole answer."""

    def stream(self, asked: Asked) -> list[str]:
        """The texts of its pieces."""

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        """The arguments of each tool call of an answer."""


class OpenAI:
    """The official client."""

    def _client(self, asked: Asked) -> Any:
        import openai

        return openai.OpenAI(base_url=asked.base, api_key=asked.key, **asked.attempts)

    def plain(self, asked: Asked) -> str:
        answer = self._client(asked).chat.completions.create(
            model=asked.model, messages=MESSAGES, **asked.sampling
        )
        return str(answer.choices[0].message.content)

    def stream(self, asked: Asked) -> list[str]:
        chunks = self._client(asked).chat.completions.create(
            model=asked.model, messages=MESSAGES, stream=True, **asked.sampling
        )
        return _deltas(chunks)

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        answer = self._client(asked).chat.completions.create(
            model=asked.model,
            messages=MESSAGES,
            tools=[TOOL],
            tool_choice="required",
            **asked.forced,
        )
        return _arguments(answer)


class Anthropic:
    """The official client: the Messages API."""

    def _client(self, asked: Asked) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=asked.url, api_key=asked.key, **asked.attempts)

    def _arguments(self, asked: Asked) -> dict[str, Any]:
        """The client's own do not have the temperature."""
        return {
            "model": asked.model,
            "messages": MESSAGES,
            "max_tokens": TOKENS,
            "extra_body": {"temperature": asked.temperature},
        }

    def plain(self, asked: Asked) -> str:
        answer = self._client(asked).messages.create(**self._arguments(asked))
        return "".join(block.text for block in answer.content)

    def stream(self, asked: Asked) -> list[str]:
        with self._client(asked).messages.stream(**self._arguments(asked)) as stream:
            return list(stream.text_stream)

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        answer = self._client(asked).messages.create(
            model=asked.model,
            messages=MESSAGES,
            max_tokens=2000,  # the endpoint has no bias
            tools=[{"name": "weather", "input_schema": Weather.model_json_schema()}],
            tool_choice={"type": "tool", "name": "weather"},
        )
        return [block.input for block in answer.content if block.type == "tool_use"]


class LangChain:
    """`ChatOpenAI`, and its `bind_tools`, streamed."""

    def _model(self, asked: Asked, **arguments: Any) -> Any:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(
            model=asked.model,
            base_url=asked.base,
            api_key=asked.key,
            **asked.attempts,
            **arguments,
        )

    def plain(self, asked: Asked) -> str:
        return str(self._model(asked, **asked.sampling).invoke(QUESTION).content)

    def stream(self, asked: Asked) -> list[str]:
        chunks = self._model(asked, **asked.sampling).stream(QUESTION)
        return [chunk.content for chunk in chunks if chunk.content]

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        model = self._model(asked, **asked.forced).bind_tools([Weather], tool_choice="Weather")
        first, *others = model.stream(QUESTION)
        return [call["args"] for call in sum(others, first).tool_calls]


class LiteLLM:
    """As a client of a server that speaks OpenAI's API."""

    def _complete(self, asked: Asked, **arguments: Any) -> Any:
        import litellm

        return litellm.completion(
            model=f"openai/{asked.model}",
            api_base=asked.base,
            api_key=asked.key,
            messages=MESSAGES,
            **asked.attempts,
            **arguments,
        )

    def plain(self, asked: Asked) -> str:
        return str(self._complete(asked, **asked.sampling).choices[0].message.content)

    def stream(self, asked: Asked) -> list[str]:
        return _deltas(self._complete(asked, stream=True, **asked.sampling))

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        return _arguments(
            self._complete(asked, tools=[TOOL], tool_choice="required", **asked.forced)
        )


class LlamaIndex:
    """`OpenAILike`."""

    def _model(self, asked: Asked, **arguments: Any) -> Any:
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            model=asked.model,
            api_base=asked.base,
            api_key=asked.key,
            is_chat_model=True,
            is_function_calling_model=True,
            **asked.attempts,
            **arguments,
        )

    def _messages(self) -> Any:
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(role="user", content=QUESTION)]

    def _sampled(self, asked: Asked) -> Any:
        """Its own field of the temperature has a check that would keep a wrong one back."""
        return self._model(
            asked, max_tokens=TOKENS, additional_kwargs={"temperature": asked.temperature}
        )

    def plain(self, asked: Asked) -> str:
        return str(self._sampled(asked).chat(self._messages()).message.content)

    def stream(self, asked: Asked) -> list[str]:
        pieces = self._sampled(asked).stream_chat(self._messages())
        return [piece.delta for piece in pieces if piece.delta]

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        from llama_index.core.tools import FunctionTool

        model = self._model(
            asked, max_tokens=TOOL_TOKENS, additional_kwargs={"logit_bias": asked.bias}
        )
        tool = FunctionTool.from_defaults(Weather, fn_schema=Weather)
        answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
        return [call.tool_kwargs for call in model.get_tool_calls_from_response(answer)]


class PydanticAI:
    """An agent; its typed output is a tool."""

    def _agent(self, asked: Asked, **arguments: Any) -> Any:
        import openai
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        client = openai.AsyncOpenAI(base_url=asked.base, api_key=asked.key, **asked.attempts)
        model = OpenAIChatModel(asked.model, provider=OpenAIProvider(openai_client=client))
        return Agent(model, **arguments)

    def plain(self, asked: Asked) -> str:
        return str(self._agent(asked, model_settings=asked.sampling).run_sync(QUESTION).output)

    def stream(self, asked: Asked) -> list[str]:
        async def pieces() -> list[str]:
            agent = self._agent(asked, model_settings=asked.sampling)
            async with agent.run_stream(QUESTION) as answer:
                return [text async for text in answer.stream_text(delta=True, debounce_by=None)]

        return asyncio.run(pieces())

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        agent = self._agent(asked, output_type=Weather, model_settings=asked.forced)
        return [agent.run_sync(QUESTION).output.model_dump()]


class OpenAIAgents:
    """Its default model, which speaks the Responses API."""

    def _agent(self, asked: Asked, tools: list[Any], **settings: Any) -> Any:
        import agents
        import openai

        agents.set_tracing_disabled(True)
        agents.set_default_openai_client(
            openai.AsyncOpenAI(base_url=asked.base, api_key=asked.key, **asked.attempts)
        )
        return agents.Agent(
            name="forecaster",
            model=asked.model,
            tools=tools,
            tool_use_behavior="stop_on_first_tool",
            model_settings=agents.ModelSettings(**settings),
        )

    def plain(self, asked: Asked) -> str:
        import agents

        # an answer that its token limit ends is an error to the library
        agent = self._agent(asked, [], extra_body={"stop": ["n"]}, **asked.sampling)
        return str(agents.Runner.run_sync(agent, QUESTION).final_output)

    def stream(self, asked: Asked) -> list[str]:
        import agents

        async def pieces() -> list[str]:
            run = agents.Runner.run_streamed(self._agent(asked, [], **asked.sampling), QUESTION)
            return [
                event.data.delta
                async for event in run.stream_events()
                if event.type == "raw_response_event"
                and event.data.type == "response.output_text.delta"
            ]

        return asyncio.run(pieces())

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        import agents

        called = []

        @agents.function_tool
        def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3, 4, 5, 6, 7]) -> str:
            """The weather of a city over some days."""
            called.append({"city": city, "days": days})
            return "sunny"

        agent = self._agent(
            asked,
            [weather],
            tool_choice="required",
            max_tokens=TOOL_TOKENS,
            extra_body={"logit_bias": asked.bias},
        )
        answer = agents.Runner.run_sync(agent, QUESTION)
        assert "sunny" in str(answer.final_output), answer.final_output
        return called


class Instructor:
    """Its default mode, a tool; without a response model it is OpenAI's client."""

    def _create(self, asked: Asked, **arguments: Any) -> Any:
        import instructor
        import openai

        client = openai.OpenAI(base_url=asked.base, api_key=asked.key, **asked.attempts)
        return instructor.from_openai(client).chat.completions.create(
            model=asked.model, messages=MESSAGES, **arguments
        )

    def plain(self, asked: Asked) -> str:
        answer = self._create(asked, response_model=None, **asked.sampling)
        return str(answer.choices[0].message.content)

    def stream(self, asked: Asked) -> list[str]:
        return _deltas(self._create(asked, response_model=None, stream=True, **asked.sampling))

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        answer = self._create(asked, response_model=Weather, max_retries=0, **asked.forced)
        return [answer.model_dump()]


class DSPy:
    """`dspy.LM`, called directly, and in a module that is streamed."""

    def _model(self, asked: Asked, **arguments: Any) -> Any:
        import dspy

        return dspy.LM(
            f"openai/{asked.model}",
            api_base=asked.base,
            api_key=asked.key,
            cache=False,
            **({} if asked.retries else {"num_retries": 0}),
            **arguments,
        )

    def plain(self, asked: Asked) -> str:
        (answer,) = self._model(asked, **asked.sampling)(QUESTION)
        return str(answer)

    def stream(self, asked: Asked) -> list[str]:
        import dspy

        model = self._model(asked, **asked.sampling)

        class Ask(dspy.Module):
            def forward(self) -> Any:
                return dspy.Prediction(text=model(QUESTION)[0])

        async def pieces() -> list[Any]:
            return [piece async for piece in dspy.streamify(Ask())()]

        *chunks, _prediction = asyncio.run(pieces())
        return _deltas(chunks)

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        (answer,) = self._model(asked, **asked.forced)(
            QUESTION, tools=[TOOL], tool_choice="required"
        )
        return [json.loads(call.function.arguments) for call in answer["tool_calls"]]


class AISuite:
    """With OpenAI's client as its provider."""

    def _create(self, asked: Asked, **arguments: Any) -> Any:
        import aisuite

        settings = {"base_url": asked.base, "api_key": asked.key, **asked.attempts}
        client = aisuite.Client({"openai": settings})
        return client.chat.completions.create(
            model=f"openai:{asked.model}", messages=MESSAGES, **arguments
        )

    def plain(self, asked: Asked) -> str:
        return str(self._create(asked, **asked.sampling).choices[0].message.content)

    def stream(self, asked: Asked) -> list[str]:
        return _deltas(self._create(asked, stream=True, **asked.sampling))

    def tools(self, asked: Asked) -> list[dict[str, Any]]:
        return _arguments(self._create(asked, tools=[TOOL], tool_choice="required", **asked.forced))


def _deltas(chunks: Any) -> list[str]:
    texts = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    return [text for text in texts if text]


def _arguments(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(call.function.arguments) for call in answer.choices[0].message.tool_calls]


LIBRARIES: dict[str, Library] = {
    "openai": OpenAI(),
    "anthropic": Anthropic(),
    "langchain": LangChain(),
    "litellm": LiteLLM(),
    "llama-index": LlamaIndex(),
    "pydantic-ai": PydanticAI(),
    "openai-agents": OpenAIAgents(),
    "instructor": Instructor(),
    "dspy": DSPy(),
    "aisuite": AISuite(),
}


def attempt(call: Callable[[Asked], Any], asked: Asked) -> dict[str, Any]:
    """What it gives, or the exception's class as its users import it."""
    try:
        return {"answer": call(asked)}
    except Exception as error:  # noqa: BLE001 - whatever the library makes of it
        kind = type(error)
        return {
            "error": f"{kind.__module__.partition('.')[0]}.{kind.__name__}",
            "status": getattr(error, "status_code", None),
            "text": str(error),
        }


def main(name: str, given: str) -> None:
    fields = json.loads(given)
    library, keys = LIBRARIES[name], fields["keys"]

    def asked(kind: str, **changed: Any) -> Asked:
        return replace(Asked(fields["url"], keys[kind], fields["bias"]), **changed)

    plain = library.plain
    results = {
        "plain": attempt(plain, asked("plain")),
        "stream": attempt(library.stream, asked("stream")),
        "tools": attempt(library.tools, asked("tools")),
        "400": attempt(plain, asked("400", temperature=-1.0)),
        "401": attempt(plain, asked("401")),
        "404": attempt(plain, asked("404", model="missing")),
        "first": attempt(plain, asked("limited")),
        "429": attempt(plain, asked("limited")),
        "retries": attempt(plain, asked("limited", retries=True)),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
