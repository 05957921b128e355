"""Memory of an export: a large random checkpoint, and a monitored process."""
