"""How much memory an export takes: a large random checkpoint, and a process that is watched."""
