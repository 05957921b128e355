"""Many prompts from a JSONL file: answered in order, resumable, by one process or several."""
