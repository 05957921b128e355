"""Audio: files to samples at a model's rate, features of sounds, parts with speech."""
