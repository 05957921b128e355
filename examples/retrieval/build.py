"""Build everything: ids, model, trie and bundle, in one folder.

python examples/retrieval/build.py build/retrieval --minutes 25
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from documents import Document, documents
from item_ids import hierarchical_ids, vectors_of
from training import Examples, TrainingOptions, id_token, save, train, train_tokenizer

from dsbd_export.config import ExportConfig
from dsbd_export.pipeline import export_bundle
from dsbd_ort import TokenTrie

HELD_OUT = 0.1  # share of the documents whose queries are only used for evaluation
QUICK = {"width": 32, "layers": 1, "steps": 60, "batch": 32, "vocabulary": 800}


def main() -> None:
    """Build with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for all files; evaluate.py reads it")
    parser.add_argument("--minutes", type=float, default=25.0, help="minutes of training")
    parser.add_argument("--branching", type=int, default=32, help="clusters per level of an id")
    parser.add_argument("--width", type=int, default=192, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--quick", action="store_true", help="300 documents, seconds of training")
    arguments = parser.parse_args()
    selected = documents(300 if arguments.quick else None)
    branching = 8 if arguments.quick else arguments.branching
    if arguments.quick:
        options = TrainingOptions(**QUICK)
    else:
        options = TrainingOptions(
            minutes=arguments.minutes, width=arguments.width, layers=arguments.layers
        )
    build(arguments.folder, selected, branching, options)


def build(folder: Path, selected: list[Document], branching: int, options: TrainingOptions) -> None:
    """Write checkpoint, items.trie, documents.jsonl and the bundle into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = hierarchical_ids(vectors_of([each.words for each in selected]), branching)
    print(f"{len(selected)} documents, ids of {min(map(len, ids))} to {max(map(len, ids))} numbers")
    is_held_out = np.random.default_rng(options.seed).random(len(selected)) < HELD_OUT
    tokenizer = train_tokenizer(selected, ids, options.vocabulary)
    model = train(tokenizer, Examples(tokenizer, selected, ids, is_held_out, options.seed), options)
    save(model, tokenizer, folder / "checkpoint")
    sequences = [[tokenizer.token_to_id(id_token(*p)) for p in enumerate(each)] for each in ids]
    names = [document.name for document in selected]
    TokenTrie.from_sequences(sequences, items=names).save(folder / "items.trie")
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for document, held_out in zip(selected, is_held_out.tolist(), strict=True):
            line = {"name": document.name, "words": document.words, "query": document.query}
            file.write(json.dumps({**line, "is_held_out": held_out}) + "\n")
    # After so much training the model's logits are large: rounding alone changes them by 3e-4.
    config = ExportConfig(
        target=str(folder / "checkpoint"), output=folder / "bundle", logits="topk:64", atol=1e-3
    )
    export_bundle(config, report=print)


if __name__ == "__main__":
    main()
