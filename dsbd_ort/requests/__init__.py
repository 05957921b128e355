"""Requests: prompts and options as the engines read them, and results as text."""
