"""The parts of lab/run gpu: pieces that are run one after another, each in its own process.

What starts the pieces needs the standard library alone; parity, machine and report run in the
environment that the piece ``install`` has made.
"""
