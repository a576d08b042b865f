"""Lowering: traced torch operators written as standard ONNX operators."""
