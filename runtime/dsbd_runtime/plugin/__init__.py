"""Providers that are plug-ins of ONNX Runtime, and engines on their devices."""
