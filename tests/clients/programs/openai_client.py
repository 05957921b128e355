"""OpenAI's own client: completions, chats, responses, streams, samples, log-probabilities."""

import json
import sys

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Hey"}]
found = {"version": openai.__version__}

answer = client.completions.create(model=model, prompt="def f(", max_tokens=8, seed=3)
found["completion"] = answer.choices[0].text
found["usage"] = answer.usage.completion_tokens
chat = {"model": model, "messages": messages, "max_completion_tokens": 8, "seed": 3}
answer = client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=5)
found["chat"] = [choice.message.content for choice in answer.choices]
found["tops"] = [len(token.top_logprobs) for token in answer.choices[0].logprobs.content]
with client.chat.completions.stream(**chat) as stream:
    found["stream"] = "".join(event.delta for event in stream if event.type == "content.delta")
    found["final"] = stream.current_completion_snapshot.choices[0].message.content
place = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"]}
functions = [{"name": "weather", "parameters": place}, {"name": "now"}]
tools = [{"type": "function", "function": function} for function in functions]
choices = ["required", {"type": "function", "function": {"name": "weather"}}, "auto"]
found["calls"], found["streamed_calls"] = [], []
for choice, seed in [(choice, seed) for choice in choices for seed in range(2)]:
    fields = {**chat, "seed": seed, "tools": tools, "tool_choice": choice}
    fields["max_completion_tokens"] = 8 if choice == "auto" else 600
    message = client.chat.completions.create(**fields).choices[0].message
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0].message
    for name, said in (("calls", message), ("streamed_calls", streamed)):
        calls = [(call.function.name, call.function.arguments) for call in said.tool_calls or ()]
        found[name].append((said.content or "", calls))
said = {"model": model, "input": "Hey", "max_output_tokens": 8, "extra_body": {"seed": 3}}
found["response"] = client.responses.create(**said).output_text
events = list(client.responses.create(**said, stream=True))
found["response_events"] = [event.type for event in events]
found["response_stream"] = events[-1].response.output_text
said["max_output_tokens"] = 600
form = {"type": "json_schema", "name": "city", "schema": place, "strict": True}
with client.responses.stream(**said, text={"format": form}) as stream:
    found["response_json"] = stream.get_final_response().output_text
found["model"] = client.models.list().data[0].id
print(json.dumps(found))
