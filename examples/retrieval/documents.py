"""Documents and queries: the functions of Python's standard library and their docstrings."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}
_LEAST_WORDS = 4  # minimum words of a query
_MOST_WORDS = 80  # maximum words of a document
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


@dataclass(frozen=True)
class Document:
    """A function.

    Attributes:
        name: its module and qualified name, such as "json.load"; a search returns it.
        words: words of its name, arguments and body, without the docstring.
        query: the first sentence of its docstring.
    """

    name: str
    words: tuple[str, ...]
    query: str


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case; names such as readLine or read_line are split."""
    return [word.lower() for word in _WORD.findall(text)]


def documents(most: int | None = None) -> list[Document]:
    """Return the functions with a docstring, sorted by name; each query occurs once.

    most: maximum number of functions, spread over all; None: all.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    by_query: dict[str, Document] = {}
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if _LEFT_OUT & set(relative.parts):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        for document in _functions_of(file, module):
            by_query.setdefault(document.query, document)
    by_name = {document.name: document for document in by_query.values()}
    functions = [by_name[name] for name in sorted(by_name)]
    step = 1 if most is None else max(len(functions) // most, 1)
    return functions[::step][:most]


def _functions_of(file: Path, module: str) -> Iterator[Document]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # some files of the library are invalid on purpose
        return
    scopes: list[tuple[str, ast.AST]] = [(module, tree)]
    while scopes:
        prefix, scope = scopes.pop()
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}.{node.name}", node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                query = _first_sentence(ast.get_docstring(node) or "")
                if len(words_of(query)) >= _LEAST_WORDS:
                    name = f"{prefix}.{node.name}"
                    yield Document(name, tuple(_words_of_code(name, node)), query)


def _first_sentence(docstring: str) -> str:
    first = docstring.strip().split("\n\n")[0]
    return re.split(r"(?<=[a-z)])\.\s", " ".join(first.split()) + " ")[0].strip(" .")[:200]


def _words_of_code(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the words of a function without its docstring, each once, in order."""
    names = [name, *(argument.arg for argument in node.args.args)]
    for child in (part for statement in node.body[1:] for part in ast.walk(statement)):
        if isinstance(child, ast.Name):
            names.append(child.id)
        elif isinstance(child, ast.Attribute):
            names.append(child.attr)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            names.append(child.value[:100])
    words = [word for each in names for word in words_of(each) if len(word) > 1]
    return list(dict.fromkeys(words))[:_MOST_WORDS]
