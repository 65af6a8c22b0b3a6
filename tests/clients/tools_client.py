"""The official Python client and tools; prints what it saw as one JSON object."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
parameters = {"type": "object", "properties": {"town": {"type": "string"}, "days": {"type": "integer"}}}
tools = [{"type": "function", "function": {"name": "weather", "description": "It.", "parameters": parameters}}]
messages = [{"role": "user", "content": "Is it wet?"}]
chat = {"model": "any", "messages": messages, "tools": tools, "reasoning_effort": "low"}


def calls(message):
    return [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]


choice = client.chat.completions.create(**chat).choices[0]
seen = {"whole": calls(choice.message)}
seen["finish"] = [choice.finish_reason, choice.message.content, choice.message.reasoning_content]

streamed = {}
for chunk in client.chat.completions.create(**chat, stream=True):
    for part in chunk.choices[0].delta.tool_calls or []:
        call = streamed.setdefault(part.index, [None, ""])
        call[0] = part.function.name or call[0]
        call[1] += part.function.arguments or ""
seen["streamed"] = [[name, json.loads(arguments)] for _, (name, arguments) in sorted(streamed.items())]

with client.chat.completions.stream(**chat) as stream:
    seen["helper"] = calls(stream.get_final_completion().choices[0].message)

messages.append(choice.message)
for call, result in zip(choice.message.tool_calls, ["wet", "dry"]):
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
seen["again"] = client.chat.completions.create(**chat).choices[0].finish_reason
print(json.dumps(seen))
