"""An engine for the algorithm: its calls, its checks, and the providers that run it."""
