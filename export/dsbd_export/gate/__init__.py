"""The parity gate: an engine compared with its checkpoint."""
