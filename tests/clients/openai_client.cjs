// The official Node client, used as its documentation shows; prints what it saw as one JSON object.
// Arguments: the server, and the folder in which the client is installed.
const { createRequire } = require("node:module");
const OpenAI = createRequire(process.argv[3] + "/package.json")("openai");

async function main() {
  const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
  const model = (await client.models.list()).data[0].id;
  const messages = [
    { role: "system", content: "Be brief." },
    { role: "user", content: "And the LORD spake unto Moses" },
  ];
  const chat = { model, messages, temperature: 0, max_completion_tokens: 24 };
  const prompt = { model, prompt: "And the LORD spake unto Moses", temperature: 0, max_tokens: 24 };
  const seen = { model, named: (await client.models.retrieve(model)).id };

  const whole = await client.chat.completions.create(chat);
  const only = whole.choices[0];
  seen.chat = [only.message.role, only.message.content, only.finish_reason, whole.usage.completion_tokens];

  let [text, finish, usage, roles] = ["", null, null, 0];
  const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      text += choice.delta.content || "";
      roles += choice.delta.role === "assistant";
      finish = choice.finish_reason || finish;
    }
    usage = chunk.usage || usage;
  }
  seen.chat_stream = [roles === 1 ? "assistant" : roles, text, finish, usage.completion_tokens];

  const warm = { ...chat, temperature: 0.8, top_p: 0.9, seed: 11, n: 3, stop: ["qqq", "zzz"] };
  const several = await client.chat.completions.create(warm);
  seen.several = several.choices.map((choice) => [choice.index, choice.message.content]);
  const texts = ["", "", ""];
  for await (const chunk of await client.chat.completions.create({ ...warm, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.delta.content || "";
  }
  seen.several_stream = texts.map((text, index) => [index, text]);

  const stop = seen.chat[1].trim().split(/\s+/)[2];
  const stopped = (await client.chat.completions.create({ ...chat, stop })).choices[0];
  seen.stopped = [stopped.message.content.includes(stop), stopped.finish_reason];
  const final = await client.chat.completions.stream({ ...chat, stop }).finalChatCompletion();
  seen.stopped_helper = final.choices[0].message.content === stopped.message.content;

  seen.completion = (await client.completions.create(prompt)).choices[0].text;
  seen.completion_stream = "";
  for await (const chunk of await client.completions.create({ ...prompt, stream: true })) {
    for (const choice of chunk.choices) seen.completion_stream += choice.text;
  }

  const likely = (await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 3 })).choices[0].logprobs.content;
  seen.logprobs = [likely.map((token) => token.token).join(""), likely.every((token) => token.top_logprobs.length === 3)];
  seen.greedy = likely.every((token) => token.token === token.top_logprobs[0].token);
  const legacy = (await client.completions.create({ ...prompt, logprobs: 2 })).choices[0].logprobs;
  seen.completion_logprobs = [legacy.tokens.join(""), legacy.token_logprobs.every((logprob) => logprob <= 0)];

  const first = await client.chat.completions.create({ ...chat, temperature: 1, top_k: 1, min_p: 0.5, return_token_ids: true });
  seen.likeliest = [first.choices[0].message.content, first.choices[0].token_ids.length];

  const schema = { type: "json_schema", json_schema: { name: "a", schema: {} } };
  const refused = [
    () => client.chat.completions.create({ ...chat, temperature: 3 }),
    () => client.chat.completions.create({ ...chat, max_completion_tokens: 5000 }),
    () => client.chat.completions.create({ ...chat, response_format: schema }),
    () => client.chat.completions.create({ ...chat, messages: [] }),
    () => client.models.retrieve("other"),
  ];
  seen.refused = [];
  for (const wrong of refused) {
    try {
      await wrong();
    } catch (error) {
      if (!(error instanceof OpenAI.BadRequestError || error instanceof OpenAI.NotFoundError)) throw error;
      seen.refused.push([error.status, error.param, error.code, error.error.message]);
    }
  }
  console.log(JSON.stringify(seen));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
