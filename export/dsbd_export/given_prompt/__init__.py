"""Language models whose prompts have rows of an encoder: sound or pictures."""
