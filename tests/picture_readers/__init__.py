"""Encoder-decoders that read pictures: TrOCR, manga-ocr and Donut."""
