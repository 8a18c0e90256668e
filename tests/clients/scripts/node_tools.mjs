import OpenAI from "openai";

const [url, model] = process.argv.slice(2); // http://127.0.0.1:8000/v1
const client = new OpenAI({ baseURL: url, apiKey: "none" });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const described = { name: "get_weather", description: "The weather in a city.", parameters };
const getWeather = ({ city }) => `It is 22 degrees in ${city}.`;
const question = { role: "user", content: "What is the weather in Zürich?" };

const runner = client.chat.completions.runTools({
  model,
  messages: [question],
  max_tokens: 300,
  stream: true,
  tools: [{ type: "function", function: { ...described, function: getWeather, parse: JSON.parse } }],
});
let streamed = "";
let calls = 0;
runner.on("content", (text) => (streamed += text)).on("functionToolCall", () => (calls += 1));
const chat = { answer: await runner.finalContent(), streamed, calls };

const tools = [{ type: "function", strict: false, ...described }];
const input = [question];
const events = new Set();
let response;
for (let turn = 0; turn < 3; turn += 1) {
  const stream = client.responses.stream({ model, input, tools, max_output_tokens: 300 });
  for await (const event of stream) events.add(event.type);
  response = await stream.finalResponse();
  const made = response.output.filter((item) => item.type === "function_call");
  if (!made.length) break;
  input.push(...response.output);
  for (const call of made) {
    input.push({ type: "function_call_output", call_id: call.call_id, output: getWeather(JSON.parse(call.arguments)) });
  }
}
console.log(JSON.stringify({ chat, response: response.output.flatMap((item) => item.content ?? []).map((part) => part.text).join(""), kinds: input.map((item) => item.type ?? item.role), events: [...events] }));
