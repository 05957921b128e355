"""Feature drafts (EAGLE-3): one transformer layer over hidden states of the target."""
