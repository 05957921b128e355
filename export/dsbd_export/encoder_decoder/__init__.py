"""Encoder-decoders: the graph of the encoder, the forest graph of the decoder, parity with sources.

checkpoint.py  what the config says: limits, layers, the token that every target begins with
agreement.py   target and draft: both read a source, or neither
languages.py   tokens that say the language of a source or of a target
speech.py     what Whisper's files say of its sound, and of its tokens that are no text
marian_tokenizer.py   the tokenizers of OPUS-MT, from two sentencepiece files
attention.py   how both attend in a graph: masks, biases by distance, positions of a forest
graph.py       the modules that are captured
shared_encoder.py   drafts whose encoder is the target's
shared_weights.py   an embedding that both graphs have, stored once
alignment.py   how heads attend to the sound: the graph for times of words
reference.py   cases of the parity gate, each with a source
"""
