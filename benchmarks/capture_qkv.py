"""Queries, keys and values of a real model, for `dma-attn bench error`.

    python benchmarks/capture_qkv.py MODEL OUT.safetensors --tokens 2048 --layers 10

Runs the built-in English text through a transformers model once, on the CPU, and saves what the
attention of evenly spread layers gets, after the rotary embedding, as bf16: `q.<layer>`
(1, H, S, D), `k.<layer>` and `v.<layer>` (1, H_kv, S, D).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dma_attn.evaluation.ablation import spread
from dma_attn.evaluation.capture import AttentionCall, visit_attention
from dma_attn.evaluation.models import load_model
from dma_attn.evaluation.text import read_text, token_ids, windows


def main() -> int:
    """Capture and write; returns the exit code."""
    options = parse_arguments()
    loaded = load_model(options.model, notify=print)
    ids = windows(token_ids(loaded.tokenizer, read_text()), options.tokens, 1)[0]
    wanted = spread(loaded.model.config.num_hidden_layers, options.layers)
    tensors: dict[str, torch.Tensor] = {}

    def keep(call: AttentionCall) -> None:
        if call.layer in wanted:
            check_plain(call)
            for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
                tensors[f"{name}.{call.layer}"] = x.bfloat16().clone(
                    memory_format=torch.contiguous_format
                )

    visit_attention(loaded.model, ids, keep)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.out)
    print(f"{options.out} written: layers {', '.join(map(str, wanted))}, {options.tokens} tokens")
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python benchmarks/capture_qkv.py MODEL qkv.safetensors --layers 10",
    )
    parser.add_argument("model", metavar="MODEL", help="a local folder or .gguf file")
    parser.add_argument("out", metavar="OUT", type=Path, help="the safetensors file to write")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=10, help="layers at most")
    return parser.parse_args()


def check_plain(call: AttentionCall) -> None:
    """The file says neither scale nor window: they must be the usual ones."""
    if abs(call.scale * call.q.shape[-1] ** 0.5 - 1) > 1e-6:
        raise NotImplementedError(f"layer {call.layer}: expected scale D ** -0.5, got {call.scale}")
    if call.window and call.window < call.q.shape[2]:
        raise NotImplementedError(
            f"layer {call.layer}: expected attention to all tokens, got a window of {call.window}"
        )


if __name__ == "__main__":
    sys.exit(main())
