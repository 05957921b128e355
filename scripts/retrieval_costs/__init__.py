"""The parts of scripts/measure_retrieval."""
