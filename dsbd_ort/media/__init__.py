"""Media: sounds and pictures in messages as prompts, or as the source of an answer."""
