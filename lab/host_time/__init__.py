"""Cost of the decoding loop itself, with real engines and with models that cost almost nothing."""
