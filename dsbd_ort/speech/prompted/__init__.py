"""Transcription by models that answer a prompt with a sound."""
