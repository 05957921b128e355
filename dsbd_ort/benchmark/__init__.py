"""Measuring strategies side by side: what runs, what was measured, what it says."""
