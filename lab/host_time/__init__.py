"""Cost of the decoding loop itself, on models whose calls cost next to nothing and on engines."""
