"""Attention: the public calls, the PyTorch reference and the kernels."""
