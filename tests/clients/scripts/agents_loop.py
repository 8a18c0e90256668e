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


agent = Agent(
    name="Guide",
    instructions="Be brief.",
    tools=[get_weather],
    model=OpenAIResponsesModel(model=model, openai_client=AsyncOpenAI(base_url=url, api_key="none")),
    model_settings=ModelSettings(max_tokens=300, temperature=0.5),
)
result = Runner.run_sync(agent, "What is the weather in Zürich?")
kinds = [item.type for item in result.new_items]
print(json.dumps({"answer": result.final_output, "kinds": kinds, "requests": result.context_wrapper.usage.requests}))
