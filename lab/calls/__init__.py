"""Engine calls of bundles side by side."""
