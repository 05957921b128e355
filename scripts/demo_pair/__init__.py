"""Training of the demo pair: corpus, models, distillation, and the figures in docs/benchmark.md."""
