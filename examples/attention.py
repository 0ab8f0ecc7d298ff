"""Drop-in attention: one call, what it costs in accuracy, and which path it takes.

    python examples/attention.py
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from dma_attn import DMAConfig, dma_attention, explain, precision_metrics

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q = torch.randn(1, 8, 1024, 64, dtype=torch.bfloat16, device=device)  # (B, H_q, S, D)
k = torch.randn(1, 2, 1024, 64, dtype=torch.bfloat16, device=device)  # 2 KV heads for 8 of Q
v = torch.randn_like(k)

exact = scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True,
                                     enable_gqa=True)
for config in (DMAConfig(), DMAConfig(diag=512), DMAConfig(high="none"), DMAConfig.preset("paper")):
    out = dma_attention(q, k, v, is_causal=True, config=config)
    print(f"{config!s:24} rel-L2 {precision_metrics(out.float(), exact).rel_l2:.4f}")
print(explain(q, k, v, is_causal=True))
