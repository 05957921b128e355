"""Programs that speak or transcribe, each run by the Python of the tool's environment."""
