"""Read the formats: one row in each of them, its codes, scales and what comes back.

    python examples/formats.py
"""

import torch

from dma_attn import quantize

torch.manual_seed(0)
x = torch.randn(1, 32)
x[0, 5] = 20.0  # an outlier takes the resolution of all that share its scale
print("values   ", " ".join(f"{value:6.2f}" for value in x[0, :8]))
for name in ("mxfp8", "mxfp4", "nvfp4", "int8", "int4"):
    copy = quantize(x, name)
    back = copy.dequantize(torch.float32)
    error = float((back - x).norm() / x.norm())
    print(f"{name:9}", " ".join(f"{value:6.2f}" for value in back[0, :8]),
          f"  {copy.data.numel()} bytes of codes, scales {copy.scales.flatten().tolist()},",
          f"rel-L2 {error:.4f}")
