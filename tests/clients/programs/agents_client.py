"""OpenAI's Agents SDK over /v1/responses: texts, streams, a tool and its result, a typed answer."""

import asyncio
import json
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
model = OpenAIResponsesModel(model=name, openai_client=client)
called: list[list[Any]] = []


def settings(**options: Any) -> ModelSettings:
    """Return settings with a seed; the SDK raises for answers that are cut."""
    fields = {"seed": 3, "stop": ["\n"], **options.pop("fields", {})}
    return ModelSettings(max_tokens=600, extra_body=fields, **options)


@function_tool
def weather(city: Literal["Rome", "Bonn"], days: Literal[1, 2, 3]) -> str:
    """Tell the weather."""
    called.append([city, days])
    return "warm"


class City(BaseModel):
    """A typed answer."""

    name: Literal["Rome", "Bonn"]


async def main() -> None:
    """Run every agent once, and print what came of it."""
    word = settings(fields={"structured_outputs": {"regex": "[a-z]{4,8}"}, "stop": None})
    brief = Agent(name="brief", instructions="Be brief.", model=model, model_settings=word)
    found: dict[str, Any] = {"text": (await Runner.run(brief, "Hey")).final_output}
    running, found["deltas"], found["events"] = Runner.run_streamed(brief, "Hey"), "", []
    async for event in running.stream_events():
        if event.type == "raw_response_event":
            found["events"].append(event.data.type)
            if event.data.type == "response.output_text.delta":
                found["deltas"] += event.data.delta
    found["stream"] = running.final_output
    chosen = settings(tool_choice="required")  # of the first turn; then the SDK leaves it out
    asks = Agent(name="asks", model=model, tools=[weather], model_settings=chosen)
    answer = await Runner.run(asks, "Hey", max_turns=3)
    found["items"], found["called"] = [item.type for item in answer.new_items], called
    typed = Agent(name="typed", model=model, output_type=City, model_settings=settings())
    found["typed"] = (await Runner.run(typed, "Hey")).final_output.name
    print(json.dumps(found))


asyncio.run(main())
