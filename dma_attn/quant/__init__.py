"""Quantisation: block-scaled tensors, the PyTorch specification and the fused Triton kernel."""
