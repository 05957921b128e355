"""Transcription as Whisper's: windows with times, tried at several temperatures."""
