"""Drafting: who proposes layers of the forest, how many, and what engine calls cost."""
