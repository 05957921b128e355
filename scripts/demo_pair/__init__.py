"""Training of the demo pair: corpus, models, distillation, figures (docs/performance.md)."""
