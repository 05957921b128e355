"""Checkpoints: their files, configurations, weights and models."""
