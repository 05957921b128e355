"""Strategies measured side by side: runs, timed requests, summaries and plots."""
