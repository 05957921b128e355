"""Session options of ONNX Runtime, each against those in use."""
