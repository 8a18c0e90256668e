"""OpenAI's Responses API over the generation of chat completions: items, events and the store."""
