"""Translators in the shapes of OPUS-MT and NLLB-600M, beside CTranslate2 and transformers."""
