"""Transcripts of speech whose text is known, beside other tools: time, word errors, equality."""
