"""Triton kernels; importing this package's modules imports triton."""
