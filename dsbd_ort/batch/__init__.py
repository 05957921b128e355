"""Batches: many prompts of a JSONL file, answered in order by one or more processes; resumable."""
