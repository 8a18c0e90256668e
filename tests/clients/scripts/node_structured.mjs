import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2); // http://127.0.0.1:8000 yardstick-demo
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const Shoe = z.object({ colour: z.enum(["red", "blue"]), size: z.number().int().min(30).max(50), laces: z.boolean() });

const messages = [{ role: "user", content: "Describe: red running shoes" }];
const chat = await client.chat.completions.parse({ model, messages, seed: 1, response_format: zodResponseFormat(Shoe, "shoe") });

const stream = client.responses.stream({ model, input: "Describe: red running shoes", text: { format: zodTextFormat(Shoe, "shoe") } });
const events = new Set();
for await (const event of stream) events.add(event.type);
const response = await stream.finalResponse();

console.log(JSON.stringify({ chat: chat.choices[0].message.parsed, response: response.output_parsed, events: [...events] }));
