"""One request for both: as arguments of the host in C++, and as options of Python."""

from typing import Any

from dsbd_ort import TokenTrie

Options = dict[str, Any]
FIXED = {"width_policy": "fixed"}  # the only one that the host has


def arguments_of(options: Options) -> list[str]:
    """Return options as the host's arguments: {"num_beams": 2} is --num-beams 2."""
    arguments = []
    for name, value in options.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        arguments += ["--" + name.replace("_", "-"), text]
    return arguments


def of_python(options: Options) -> Options:
    """Return the same request for Python, which has other width policies and returns one beam."""
    policy = FIXED if options.get("strategy", "dsbd") == "dsbd" else {}
    others = {name: value for name, value in options.items() if name != "trie"}
    if "trie" in options:
        others["constraint"] = TokenTrie.from_file(options["trie"])
    return {**others, **policy, "num_return_sequences": options.get("num_beams", 1)}
