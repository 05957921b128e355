"""One forward of an engine over a forest: its inputs, its results, and the interface of engines.

The seam between the algorithm and the engines. It needs only numpy, and is below every other
package except dsbd_errors.

    forward.py     Forward, ForwardResult: the inputs and results of a call; joined and split
    logits.py      Logits: all logits of each row, or the largest ones
    rows.py        rows of numbers: largest entries, log of the sum of exponentials
    features.py    Features: hidden states that a feature draft reads
    spec.py        EngineSpec: properties of an engine, known before any forward
    engine.py      Engine: the interface of engines
"""
