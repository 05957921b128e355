"""langchain-openai: invoke, stream, batch of a chat model, and a completion model."""

import json
import sys
from importlib.metadata import version

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAI

url, model = sys.argv[1:]
server = {"model": model, "base_url": url, "api_key": "none", "max_retries": 0, "seed": 3}
chat = ChatOpenAI(**server, max_tokens=8)
messages = [("system", "Be brief."), ("human", "Hey")]
found = {"version": version("langchain-openai")}
found["chat"] = chat.invoke(messages).content
found["stream"] = "".join(part.content for part in chat.stream(messages))
found["batch"] = [answer.content for answer in chat.batch([messages, messages])]
scored = ChatOpenAI(**server, max_tokens=8, logprobs=True, top_logprobs=3).invoke(messages)
found["tops"] = [len(t["top_logprobs"]) for t in scored.response_metadata["logprobs"]["content"]]
found["text"] = OpenAI(**server, max_tokens=8).invoke("def f(")
found["text_stream"] = "".join(OpenAI(**server, max_tokens=8).stream("def f("))
own = {"seed": None, "extra_body": {"seed": 3}}  # the SDK's method has no seed
said = ChatOpenAI(**{**server, **own}, max_tokens=8, use_responses_api=True)
found["response"] = said.invoke(messages).text
found["response_stream"] = "".join(str(part.text) for part in said.stream(messages))
try:
    ChatOpenAI(**server, max_tokens=8000).invoke(messages)
except ContextOverflowError:
    found["too_long"] = True
print(json.dumps(found))
