"""Text and tokens: tokenizer, streams of text, chat messages and their templates."""
