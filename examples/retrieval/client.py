"""Ask a server for functions that fit a sentence; README.md says how to start the server.

python examples/retrieval/client.py "Read JSON from a file"
"""

from __future__ import annotations

import argparse
import json
import urllib.request

QUERY_ENDS = "<id>"


def search(
    url: str, model: str, query: str, *, num_beams: int, most: int
) -> list[tuple[float, str]]:
    """Return scores and names of the documents that fit a query, best first."""
    body = {
        "model": model,
        "prompt": query + QUERY_ENDS,
        "constraint": {"trie": "items"},
        "strategy": "beam-search",
        "num_beams": num_beams,
        "num_return_sequences": min(most, num_beams),
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        choices = json.load(response)["choices"]
    return [
        (choice["dsbd"]["score"], item) for choice in choices for item in choice["dsbd"]["items"]
    ]


def main() -> None:
    """Print the documents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("query")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="stdlib")
    parser.add_argument("--num-beams", type=int, default=64)
    parser.add_argument("--most", type=int, default=10)
    arguments = parser.parse_args()
    results = search(
        arguments.url,
        arguments.model,
        arguments.query,
        num_beams=arguments.num_beams,
        most=arguments.most,
    )
    for score, name in results:
        print(f"{score:8.3f}  {name}")


if __name__ == "__main__":
    main()
