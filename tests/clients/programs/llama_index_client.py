"""llama-index's OpenAILike: chat, streamed chat, completion, streamed completion."""

import json
import sys
from importlib.metadata import version

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
server = {
    "model": model,
    "api_base": url,
    "api_key": "none",
    "max_tokens": 8,
    "max_retries": 0,
    "additional_kwargs": {"seed": 3},
}
messages = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="Hey"),
]
found = {"version": version("llama-index-llms-openai-like")}
chat = OpenAILike(**server, is_chat_model=True)
found["chat"] = chat.chat(messages).message.content
found["stream"] = "".join(part.delta or "" for part in chat.stream_chat(messages))
text = OpenAILike(**server, is_chat_model=False)
found["text"] = text.complete("def f(").text
found["text_stream"] = "".join(part.delta or "" for part in text.stream_complete("def f("))
print(json.dumps(found))
