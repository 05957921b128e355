"""One forward of an engine over a forest: what it takes, what it returns, what an engine is.

The seam between the algorithm and the engines; numpy alone, below every other package.

    forward.py     Forward, ForwardResult: the record of a call and of its answer; joined and split
    logits.py      Logits: all of a row, or the largest of a row
    rows.py        rows of numbers: the largest of each, the log of its sum
    features.py    Features: hidden states that a feature draft reads
    spec.py        EngineSpec: what is known of an engine beforehand
    engine.py      Engine: what it has to have
"""
