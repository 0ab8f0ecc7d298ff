"""Timing against peers, on the same inputs in one run: `dma-attn bench`."""
