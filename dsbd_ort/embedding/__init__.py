"""The C library libdsbd: a bundle for programs that are not written in Python."""
