"""Speech: audio files, log-mel features, transcripts and their formats; numpy alone, no torch."""
