"""Training of the demo pair: corpus, models, distillation and the figures that the README quotes."""
