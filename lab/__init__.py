"""The laboratory: measurements and comparisons. README.md has its layout."""
