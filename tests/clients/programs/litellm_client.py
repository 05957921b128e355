"""LiteLLM with its provider for OpenAI-compatible servers: chat, stream, text completion."""

import json
import sys
from importlib.metadata import version

import litellm

url, model = sys.argv[1:]
litellm.telemetry = False
litellm.drop_params = False
server = {"api_base": url, "api_key": "none", "num_retries": 0}
chat = {
    "model": f"openai/{model}",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hey"}]},
    ],
    "max_tokens": 8,
    "seed": 3,
    **server,
}
found = {"version": version("litellm")}
answer = litellm.completion(**chat, temperature=0.7, top_p=0.9, n=2, logprobs=True, top_logprobs=3)
found["chat"] = [choice.message.content for choice in answer.choices]
found["usage"] = answer.usage.completion_tokens
found["tops"] = [len(t.top_logprobs) for t in answer.choices[0].logprobs.content]
parts = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
found["stream"] = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
plain = litellm.completion(**chat)
found["plain"] = plain.choices[0].message.content
found["text"] = (
    litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="def f(", max_tokens=8, seed=3, **server
    )
    .choices[0]
    .text
)
try:
    litellm.completion(**{**chat, "max_tokens": 8000})
except litellm.ContextWindowExceededError:
    found["too_long"] = True
print(json.dumps(found))
