"""Transcription of speech with known text, compared with other tools: time, errors, equality."""
