"""Speech: audio files, log-mel features, transcripts and their formats; needs numpy, not torch."""
