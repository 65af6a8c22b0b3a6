// The official Node client and tools; prints what it saw as one JSON object.
// Arguments: the server, and the folder in which the client is installed.
const { createRequire } = require("node:module");
const OpenAI = createRequire(process.argv[3] + "/package.json")("openai");

const calls = (message) => message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
  const parameters = { type: "object", properties: { town: { type: "string" }, days: { type: "integer" } } };
  const tools = [{ type: "function", function: { name: "weather", description: "It.", parameters } }];
  const messages = [{ role: "user", content: "Is it wet?" }];
  const chat = { model: "any", messages, tools, reasoning_effort: "low" };

  const choice = (await client.chat.completions.create(chat)).choices[0];
  const seen = { whole: calls(choice.message) };
  seen.finish = [choice.finish_reason, choice.message.content, choice.message.reasoning_content];

  const streamed = [];
  for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
    for (const part of chunk.choices[0].delta.tool_calls || []) {
      const call = (streamed[part.index] ??= [null, ""]);
      call[0] = part.function.name || call[0];
      call[1] += part.function.arguments || "";
    }
  }
  seen.streamed = streamed.map(([name, text]) => [name, JSON.parse(text)]);

  seen.helper = calls((await client.chat.completions.stream(chat).finalChatCompletion()).choices[0].message);

  messages.push(choice.message);
  choice.message.tool_calls.forEach((call, at) => {
    messages.push({ role: "tool", tool_call_id: call.id, content: ["wet", "dry"][at] });
  });
  seen.again = (await client.chat.completions.create(chat)).choices[0].finish_reason;
  console.log(JSON.stringify(seen));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
