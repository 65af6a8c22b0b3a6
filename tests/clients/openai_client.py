"""The official Python client, used as its documentation shows; prints what it saw as one JSON object."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And the LORD spake unto Moses"}]
chat = {"model": model, "messages": messages, "temperature": 0, "max_completion_tokens": 24}
prompt = {"model": model, "prompt": "And the LORD spake unto Moses", "temperature": 0, "max_tokens": 24}
seen = {"model": model, "named": client.models.retrieve(model).id}

whole = client.chat.completions.create(**chat)
choice = whole.choices[0]
seen["chat"] = [choice.message.role, choice.message.content, choice.finish_reason, whole.usage.completion_tokens]

text, finish, usage, roles = "", None, None, 0
for chunk in client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}):
    for choice in chunk.choices:
        text += choice.delta.content or ""
        roles += choice.delta.role == "assistant"
        finish = choice.finish_reason or finish
    usage = chunk.usage or usage
seen["chat_stream"] = ["assistant" if roles == 1 else roles, text, finish, usage.completion_tokens]

warm = {**chat, "temperature": 0.8, "top_p": 0.9, "seed": 11, "n": 3, "stop": ["qqq", "zzz"]}
several = client.chat.completions.create(**warm)
seen["several"] = [[choice.index, choice.message.content] for choice in several.choices]
texts = ["", "", ""]
for chunk in client.chat.completions.create(**warm, stream=True):
    for choice in chunk.choices:
        texts[choice.index] += choice.delta.content or ""
seen["several_stream"] = [[index, text] for index, text in enumerate(texts)]

stop = seen["chat"][1].split()[2]
stopped = client.chat.completions.create(**chat, stop=stop).choices[0]
seen["stopped"] = [stop in stopped.message.content, stopped.finish_reason]
with client.chat.completions.stream(**chat, stop=stop) as stream:
    final = stream.get_final_completion()
seen["stopped_helper"] = final.choices[0].message.content == stopped.message.content

seen["completion"] = client.completions.create(**prompt).choices[0].text
seen["completion_stream"] = "".join(
    choice.text for chunk in client.completions.create(**prompt, stream=True) for choice in chunk.choices
)

likely = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3).choices[0].logprobs.content
seen["logprobs"] = ["".join(token.token for token in likely), {len(token.top_logprobs) for token in likely} == {3}]
seen["greedy"] = all(token.token == token.top_logprobs[0].token for token in likely)
legacy = client.completions.create(**prompt, logprobs=2).choices[0].logprobs
seen["completion_logprobs"] = ["".join(legacy.tokens), all(logprob <= 0 for logprob in legacy.token_logprobs)]

more = {"top_k": 1, "min_p": 0.5, "return_token_ids": True}
first = client.chat.completions.create(**{**chat, "temperature": 1}, extra_body=more).choices[0]
seen["likeliest"] = [first.message.content, len(first.token_ids)]

refused = [
    {"temperature": 3},
    {"max_completion_tokens": 5000},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
    {"messages": []},
]
seen["refused"] = []
for wrong in refused:
    try:
        client.chat.completions.create(**{**chat, **wrong})
    except openai.BadRequestError as error:
        seen["refused"].append([error.status_code, error.param, error.code, error.body["message"]])
try:
    client.models.retrieve("other")
except openai.NotFoundError as error:
    seen["refused"].append([error.status_code, error.param, error.code, error.body["message"]])
print(json.dumps(seen))
