"""The parts of lab/run gpu: pieces that are run one after another, each in its own process.

The code that starts the pieces needs only the standard library. parity, machine and report run in
the environment that the piece ``install`` creates.
"""
