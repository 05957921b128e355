"""Sounds and pictures as pieces of a prompt: their sizes, rows and positions."""
