"""llama.cpp's tokenizer: arguments are a GGUF file and a JSON file of texts; prints their ids."""

import json
import sys
import urllib.request

import xllamacpp

model, texts = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx, params.n_parallel, params.port, params.warmup = 64, 1, 0, False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)


def tokenized(text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True, "parse_special": True})
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize",
        body.encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


with open(texts, encoding="utf-8") as file:
    print(json.dumps([tokenized(text) for text in json.load(file)]))
