"""Dynamic-width speculative beam decoding: beam quality at speculative-decoding speed."""
