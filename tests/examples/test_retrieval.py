"""The example of retrieval in its quick form: what it builds is searched, alone and over HTTP."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsbd_ort import Pipeline, TokenTrie
from dsbd_ort.engine import Service
from tests.openai_server.running_server import MODEL, running_server

FOLDER = Path(__file__).parents[2] / "examples" / "retrieval"
MODULES = ("bm25", "client", "documents", "evaluate", "item_ids")


@pytest.fixture(scope="module")
def example():
    """The modules of the example, imported as its scripts import each other."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval") / "quick"
    command = [sys.executable, str(FOLDER / "build.py"), str(folder), "--quick"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


def test_documents_are_functions_with_a_query(example):
    found = example["documents"].documents(200)
    assert len(found) == 200 == len({each.name for each in found})
    everything = {each.name: each for each in example["documents"].documents()}
    load = everything["json.load"]
    assert load.query.startswith("Deserialize ``fp``") and "fp" in load.words
    assert len(everything) > 3000
    assert example["documents"].words_of("readLine read_line IOError 3") == [
        *["read", "line", "read", "line", "io", "error", "3"]
    ]


@pytest.mark.parametrize("branching", [2, 8])
def test_ids_name_one_document_each_and_none_begins_another(example, branching):
    words = [[f"w{i % 7}", f"w{i % 11}", "all"] for i in range(200)] + [["same"]] * 30
    ids = example["item_ids"].hierarchical_ids(example["item_ids"].vectors_of(words), branching)
    assert len(set(ids)) == 230
    assert all(0 <= number < branching for each in ids for number in each)
    beginnings = {each[:length] for each in ids for length in range(len(each))}
    assert not beginnings & set(ids)
    near = [i for i in range(200) if words[i] == words[0]]
    alike = np.mean([ids[i][0] == ids[0][0] for i in near])
    assert alike == 1.0  # equal documents are in one cluster


def test_bm25_ranks_by_rare_shared_words(example):
    texts = [["read", "file"], ["read", "json", "file"], ["json", "json", "write", "all"], ["x"]]
    index = example["bm25"].BM25(texts)
    assert index.ranked(["read", "json"], 2).tolist() == [1, 2]
    assert index.ranked(["write"], 1).tolist() == [2]
    # (k1 + 1) tf / (tf + k1 (1 - b + b l / mean l)) * log(1 + (n - df + .5) / (df + .5))
    assert index.ranked(["nothing"], 4).tolist() == [0, 1, 2, 3]


def test_recall_and_its_interval(example):
    ranks = example["evaluate"].Ranks("a", np.array([0.0, 5.0, 50.0, np.inf]), 1.0)
    assert [ranks.recall(depth) for depth in (1, 10, 100)] == [0.25, 0.5, 0.75]
    low, high = ranks.interval(10)
    assert 0.0 <= low < 0.5 < high <= 1.0


@pytest.mark.slow
def test_the_table_has_every_search(built):
    command = [sys.executable, str(FOLDER / "evaluate.py"), str(built), "--widths", "1", "16"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = {
        cells[0]: cells[1:]
        for line in done.stdout.splitlines()
        if line.startswith("| ")
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    assert list(rows) == [
        "search",
        *[f"{w}, {how}" for w in ("1 beam", "16 beams") for how in ("with the trie", "without")],
        "BM25",
        "chance",
    ]
    for name, cells in rows.items():
        if "with the trie" in name:
            assert cells[-1] == "100.0%"
        if name not in ("search", "chance"):
            recalls = [float(cell.split()[0]) for cell in cells[:3]]
            assert recalls == sorted(recalls) and 0.0 <= recalls[0] and recalls[2] <= 1.0
    assert float(rows["BM25"][2].split()[0]) > 0.2  # at 100 of 300 documents


@pytest.mark.slow
def test_the_client_gets_what_the_pipeline_finds(built, example):
    trie = TokenTrie.load(built / "items.trie")
    lines = [json.loads(line) for line in (built / "documents.jsonl").read_text().splitlines()]
    query = lines[0]["query"]
    with Pipeline.from_bundle(built / "bundle", num_threads=1) as pipe:
        wanted = pipe.generate(
            query + "<id>",
            strategy="beam-search",
            num_beams=16,
            num_return_sequences=10,
            constraint=trie,
        )
        with (
            Service(pipe) as service,
            running_server(service, tries={"items": trie}) as server,
        ):
            found = example["client"].search(server.url, MODEL, query, num_beams=16, most=10)
    assert [name for _, name in found] == [n for s in wanted.sequences for n in s.items]
    assert [score for score, _ in found] == pytest.approx([s.score for s in wanted.sequences])
    assert {name for _, name in found} <= {line["name"] for line in lines}
