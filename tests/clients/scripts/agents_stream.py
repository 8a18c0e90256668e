import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

url, model = sys.argv[1:]  # http://127.0.0.1:8000/v1
set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It is 22 degrees in {city}."


async def main() -> None:
    agent = Agent(
        name="Guide",
        tools=[get_weather],
        model=OpenAIResponsesModel(model=model, openai_client=AsyncOpenAI(base_url=url, api_key="none")),
        model_settings=ModelSettings(max_tokens=300, store=True),
    )
    streamed, kinds = "", []
    result = Runner.run_streamed(agent, "What is the weather in Zürich?", auto_previous_response_id=True)
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            streamed += event.data.delta
        elif event.type == "run_item_stream_event":
            kinds.append(event.item.type)
    print(json.dumps({"answer": result.final_output, "streamed": streamed, "kinds": kinds}))


asyncio.run(main())
