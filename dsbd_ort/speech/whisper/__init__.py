"""Transcription in Whisper's way: windows with times, tried at several temperatures."""
