"""OpenAI's own client: completions, chats, streams, samples, log-probabilities."""

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
found["model"] = client.models.list().data[0].id
print(json.dumps(found))
