"""Encoder-decoders: their files, the graph of the encoder, and parity cases with sources."""
