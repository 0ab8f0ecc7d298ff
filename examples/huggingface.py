"""A Hugging Face model with DMA attention and a mixed-precision KV cache.

    python examples/huggingface.py [MODEL]
"""

import sys

from dma_attn.evaluation.models import BUILT_IN, load_model
from dma_attn.integrations.transformers import DMACache, enable_dma

loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else BUILT_IN)  # a Hub id works as well
model, tokenizer = loaded.model, loaded.tokenizer
enable_dma(model, "default,diag=512")
ids = tokenizer("The three laws of thermodynamics say that", return_tensors="pt").input_ids
cache = DMACache(model.config, max_len=ids.shape[1] + 24)
out = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
print(tokenizer.decode(out[0], skip_special_tokens=True))
print(f"KV cache: {cache.nbytes()} bytes")
