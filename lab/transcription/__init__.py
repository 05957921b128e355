"""Transcripts of known speech, compared with other tools: time, word errors, equality."""
