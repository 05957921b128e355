"""The laboratory: what measures and compares; README.md says how it is laid out."""
