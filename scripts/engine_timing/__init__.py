"""Engine calls timed side by side, and their tables in a document."""
