"""The bundle on disk: its manifest, its files, and how both are written and checked."""
