"""Programs that speak or transcribe, each run by the Python of its tool's environment."""
