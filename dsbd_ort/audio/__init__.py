"""Audio: files to samples at a model's rate, features of sounds, detection of speech."""
