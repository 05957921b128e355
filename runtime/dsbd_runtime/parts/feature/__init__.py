"""Features: hidden states of the target that its draft reads."""
