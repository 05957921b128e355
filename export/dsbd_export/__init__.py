"""From a checkpoint to a bundle: the only package that may import torch and transformers."""
