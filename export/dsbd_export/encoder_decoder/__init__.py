"""Encoder-decoders: what their files say, the graph of the encoder, cases with a source each."""
