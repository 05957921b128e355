"""The head: logits, the best of them, or all of them when they are asked for."""
