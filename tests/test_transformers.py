"""The transformers adapter: masks, caches, packing and configs on tiny random models.

Models are small on purpose, in fp32, and compared with transformers' own "sdpa" in exact arithmetic
(preset "off"), or with themselves where formats are at work. Prompts of more than
`DECODE_MAX_QUERIES` tokens make a cached call quantise; 300 tokens reach tiles of both classes.
"""

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dma_attn import DMAConfig

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import transformers as hf
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import dma_attn.integrations.transformers as adapter
from dma_attn.integrations.transformers import (
    DECODE_MAX_QUERIES,
    dma_attention_forward,
    dma_mask,
    enable_dma,
    register,
)
from dma_attn.integrations.transformers_masks import is_full, key_mask, last_key, once_a_pass

CAUSAL_SAFE = DMAConfig(smooth_k=False)  # K's mean sees future keys; without it causality is exact
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.1,  # sharper attention than the usual 0.02, so that masks matter
}
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 97,
    "init_std": 0.1,
    "forced_eos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=6),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "gemma2": lambda: hf.Gemma2Config(**SIZES),
    "llama4": lambda: hf.Llama4TextConfig(
        **SIZES,
        attention_chunk_size=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size_mlp=64,
        no_rope_layers=[1, 0],
    ),
    "bert": lambda: hf.BertConfig(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "modernbert": lambda: hf.ModernBertConfig(
        **{k: v for k, v in SIZES.items() if k != "head_dim"},
        local_attention=8,
        global_attn_every_n_layers=2,
    ),
    "bart": lambda: hf.BartConfig(**ENCODER_DECODER),
    "bloom": lambda: hf.BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=97),
}
CLASSES: dict[str, Any] = {
    "bert": hf.BertModel,
    "modernbert": hf.ModernBertModel,
    "bart": hf.BartForConditionalGeneration,
}


@pytest.fixture(autouse=True)
def exact_seed() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make(name: str) -> Any:
    """A tiny random model in evaluation mode."""
    torch.manual_seed(7)
    config = CONFIGS[name]()
    maker = CLASSES.get(name)
    return (maker(config) if maker else hf.AutoModelForCausalLM.from_config(config)).eval()


def left_padded(*lengths: int) -> tuple[Tensor, Tensor]:
    """Random token ids and attention mask, (B, max length)."""
    width = max(lengths)
    ids = torch.randint(3, 97, (len(lengths), width))
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def both(model: Any, call: Any, config: DMAConfig | str = "off") -> tuple[Any, Any]:
    """`call(model)` with transformers' sdpa and with DMA."""
    model.set_attn_implementation("sdpa")
    expected = call(model)
    return expected, call(enable_dma(model, config))


def relative(out: Tensor, ref: Tensor) -> float:
    return float((out - ref).norm() / ref.norm())


class Layer(nn.Module):
    """A stand-in for an attention module of a model."""

    def __init__(self, config: DMAConfig | str = "off", is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.dma_config = DMAConfig.parse(config) if isinstance(config, str) else config
        self.eval()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """One call of the attention function; kwargs may name the layer."""
    layer = kwargs.pop("layer", None) or Layer()
    out, weights = dma_attention_forward(layer, q, k, v, mask, **kwargs)
    assert weights is None and out.is_contiguous()
    assert out.shape == (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    return out


def counting(size: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q = 0 and v[j] = j: the output is the mean of the visible key indices."""
    q = torch.zeros(batch, 1, size, 16)
    v = torch.arange(float(size))[:, None].expand(batch, 1, size, 16)
    return q, torch.randn(batch, 1, size, 16), v


def spy_on(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """Record the keywords of every call that the adapter makes to a function of the core."""
    calls: list[dict[str, Any]] = []
    real = getattr(adapter, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append({**kwargs, "args": args})
        return real(*args, **kwargs)

    monkeypatch.setattr(adapter, name, record)
    return calls


# Generation: exact arithmetic gives sdpa's tokens

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 3},
    "no-cache": {"use_cache": False},
    "lookup": {"prompt_lookup_num_tokens": 3},  # verifies several tokens at once
}
ONE_ROW = ("lookup", True)  # prompt lookup takes one sequence, so no padded batch


@pytest.mark.parametrize(
    ("mode", "padded"),
    [(mode, padded) for mode in MODES for padded in (False, True) if (mode, padded) != ONE_ROW],
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_off_generates_sdpas_tokens(name: str, mode: str, padded: bool) -> None:
    ids, mask = left_padded(5, 9) if padded else left_padded(9)

    def generate(model: Any) -> Tensor:
        options = {"max_new_tokens": 8, "do_sample": False, **MODES[mode]}
        return model.generate(ids, attention_mask=mask, **options)

    expected, tokens = both(make(name), generate)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "llama4"])
@pytest.mark.parametrize("lengths", [(5, 21), (21,)], ids=["padded", "plain"])
def test_off_gives_sdpas_logits(name: str, lengths: tuple[int, ...]) -> None:
    ids, mask = left_padded(*lengths)
    expected, logits = both(make(name), lambda m: m(ids, attention_mask=mask).logits)
    valid = mask.bool()
    torch.testing.assert_close(logits[valid], expected[valid], rtol=1e-4, atol=1e-4)
    assert logits.isfinite().all()


def test_padding_is_lost_without_the_mask_function(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = left_padded(5, 9)
    model = enable_dma(make("llama"), "off")
    right = model(ids, attention_mask=mask).logits[0, -1]
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "dma")
    wrong = model(ids, attention_mask=mask).logits[0, -1]
    assert not torch.allclose(wrong, right, atol=1e-2), "the padded tests above would see nothing"


@pytest.mark.parametrize("cache_kind", ["static", "dynamic", "none"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_right_padding_keeps_the_positions_of_the_queries(name: str, cache_kind: str) -> None:
    model = enable_dma(make(name), "off")
    ids = torch.randint(3, 97, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, 11:] = 0
    mask[1, 15:] = 0  # no row reaches the end
    cache = StaticCache(model.config, max_cache_len=32) if cache_kind == "static" else None
    options = {"use_cache": cache_kind != "none", "past_key_values": cache}
    logits = model(ids, attention_mask=mask, **options).logits
    for row, length in enumerate((11, 15)):
        alone = model(ids[row : row + 1, :length], use_cache=False).logits
        torch.testing.assert_close(logits[row : row + 1, :length], alone, rtol=1e-4, atol=1e-4)


def test_a_row_that_ends_with_padding_does_not_move_its_queries() -> None:
    _, k, v = counting(30, batch=2)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, 25:] = False
    out = attend(torch.zeros(2, 1, 20, 16), k, v, mask)[:, :, 0, 0]
    last = torch.arange(10, 30).clamp(max=torch.tensor([[24], [29]]))  # last key of query 10 + i
    torch.testing.assert_close(out, last / 2)


@pytest.mark.parametrize("chunks", [(20, 20, 7), (1, 46), (46, 1)])
def test_chunked_prefill_equals_one_pass(chunks: tuple[int, ...]) -> None:
    model = enable_dma(make("mistral"), "off")
    ids, mask = left_padded(30, 47)
    whole = model(ids, attention_mask=mask).logits
    cache, parts, end = None, [], 0
    for size in chunks:
        out = model(
            ids[:, end : end + size], attention_mask=mask[:, : end + size], past_key_values=cache
        )
        cache, end = out.past_key_values, end + size
        parts.append(out.logits)
    valid = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[valid], whole[valid], rtol=1e-4, atol=1e-4)


# Cases of CASES.md


@pytest.mark.parametrize("config", ["off", "default"])
def test_case_004_overflowing_additive_masks_leave_no_nan(config: str) -> None:
    low = torch.finfo(torch.bfloat16).min
    causal = torch.full((8, 8), low, dtype=torch.bfloat16).triu(1)
    pad = torch.zeros(8, 8, dtype=torch.bfloat16)
    pad[:, :3] = low
    mask = (causal + pad)[None, None]  # a mix of finfo.min and -inf
    assert mask.isinf().any()
    q, k, v = (torch.randn(1, 2, 8, 32, dtype=torch.bfloat16) for _ in range(3))
    layer = Layer(config)
    out = attend(q, k, v, mask, layer=layer)
    alone = attend(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], layer=layer)
    assert out.isfinite().all()
    assert not out[:, :3].any()
    assert relative(out[:, 3:].float(), alone.float()) < 1e-2


@pytest.mark.parametrize("config", [DMAConfig.preset("off"), CAUSAL_SAFE], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_case_007_a_2d_mask_keeps_causality(config: DMAConfig, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 2, 8, 32) for _ in range(3))
    mask = torch.ones(2, 8, dtype=dtype)
    mask[0, :3] = 0
    first = attend(q, k, v, mask, layer=Layer(config))
    for x in (q, k, v):
        x[:, :, 7] += 1
    second = attend(q, k, v, mask, layer=Layer(config))
    assert torch.equal(first[:, :7], second[:, :7])
    assert not torch.equal(first[:, 7], second[:, 7])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("masked", [True, False])
def test_case_008_the_last_token_changes_no_earlier_logit(name: str, masked: bool) -> None:
    model = enable_dma(make(name), CAUSAL_SAFE)
    ids = torch.randint(3, 97, (1, 16))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 97
    mask = torch.ones_like(ids) if masked else None
    first, second = (model(x, attention_mask=mask).logits for x in (ids, changed))
    assert torch.equal(first[:, :15], second[:, :15])
    assert not torch.equal(first[:, 15], second[:, 15])


def test_case_008_registration_covers_attention_and_mask() -> None:
    for _ in range(2):
        register()
        assert AttentionInterface()["dma"] is dma_attention_forward
        assert AttentionMaskInterface()["dma"] is dma_mask


@pytest.mark.parametrize("config", ["default", "mxfp8", "default,high=none"])
def test_case_008_a_padded_batch_equals_single_runs(config: str) -> None:
    """Padding shifts the tile grid, so the bound is the quantisation noise itself."""
    lengths = (170, 300)
    model = make("llama")
    ids, mask = left_padded(*lengths)
    exact, padded = both(model, lambda m: m(ids, attention_mask=mask).logits, config)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, -length:]).logits
        noise = relative(alone, exact[row : row + 1, -length:])
        gap = relative(padded[row : row + 1, -length:], alone)
        assert 0 < noise < 0.3
        assert gap < 1.5 * noise, (row, gap, noise)
    assert padded.isfinite().all()


def test_case_011_left_padded_generation_equals_single_runs() -> None:
    model = enable_dma(make("llama"), "default")
    ids, mask = left_padded(3, 9)
    options = {"max_new_tokens": 8, "do_sample": False}
    batch = model.generate(ids, attention_mask=mask, **options)
    alone = [model.generate(ids[:1, 6:], **options), model.generate(ids[1:], **options)]
    assert torch.equal(batch[0, 6:], alone[0][0])
    assert torch.equal(batch[1], alone[1][0])

    single = model(ids[:1, 6:]).logits
    batched = model(ids, attention_mask=mask).logits[:1, 6:]
    with_pads = model(ids[:1], attention_mask=mask[:1]).logits[:, 6:]
    assert relative(batched, single) <= 1.05 * relative(with_pads, single) + 1e-6


@pytest.mark.parametrize("queries", [1, 20], ids=["decode", "prefill"])
def test_case_012_empty_slots_of_a_static_cache_are_not_attended(queries: int) -> None:
    k, v = torch.zeros(1, 1, 128, 32), torch.zeros(1, 1, 128, 32)
    k[:, :, :20], v[:, :, :20] = torch.randn(1, 1, 20, 32), 1.0
    mask = dma_mask(1, queries, 128, q_offset=torch.tensor(20 - queries))
    assert mask is not None and mask.sum() == 20
    out = attend(torch.zeros(1, 1, queries, 32), k, v, mask, layer=Layer("default"))
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("config", ["off", "default"])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_case_012_a_poisoned_static_cache_gives_the_dynamic_ones_logits(
    name: str, padded: bool, config: str
) -> None:
    model = enable_dma(make(name), config)
    ids, mask = left_padded(13, 24) if padded else left_padded(24)
    cache = StaticCache(model.config, max_cache_len=40)
    cache.early_initialization(
        batch_size=len(ids), num_heads=2, head_dim=16, dtype=torch.float32, device="cpu"
    )
    for layer in cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    growing = None
    for start, stop in ((0, 20), (20, 21), (21, 24)):  # prefill, decode, a few tokens at once
        now, seen = ids[:, start:stop], mask[:, :stop]
        static = model(now, attention_mask=seen, past_key_values=cache).logits
        dynamic = model(now, attention_mask=seen, past_key_values=growing, use_cache=True)
        growing = dynamic.past_key_values
        valid = seen[:, start:stop].bool()
        assert static[valid].isfinite().all()
        torch.testing.assert_close(static[valid], dynamic.logits[valid], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 2.0),
        ("s_aux", torch.full((1,), math.log(3))),
        ("sinks", torch.zeros(1)),
        ("position_bias", torch.zeros(1, 1, 3, 3)),
        ("head_mask", torch.ones(1)),
        ("block_indices", torch.zeros(1)),
        ("seq_idx", torch.zeros(1, 3)),
        ("an_unheard_of_keyword", 0),
        ("output_attentions", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_case_081_084_085_arguments_that_change_the_result_raise(name: str, value: Any) -> None:
    q, k, v = counting(3)
    with pytest.raises(NotImplementedError, match=name):
        attend(q, k, v, **{name: value})
    attend(q, k, v, **{name: None})


def test_case_081_a_model_with_soft_capping_raises() -> None:
    model = enable_dma(make("gemma2"))
    with pytest.raises(NotImplementedError, match="softcap"):
        model(torch.randint(3, 97, (1, 8)))


def test_case_084_085_a_model_with_a_softmax_sink_raises() -> None:
    config = hf.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    model = enable_dma(hf.AutoModelForCausalLM.from_config(config).eval())
    with pytest.raises(NotImplementedError, match="s_aux"):
        model(torch.randint(3, 97, (1, 8)))


def test_case_082_sliding_window_counts_the_query_itself() -> None:
    q, k, v = counting(8)
    out = attend(q, k, v, sliding_window=4)[0, :, 0, 0]
    assert out[7] == pytest.approx(5.5) and out[3] == pytest.approx(1.5)

    q = torch.randn_like(q)
    causal = attend(q, k, v)
    for window in (8, 9, 1000):
        assert torch.equal(attend(q, k, v, sliding_window=window), causal)
    shorter = attend(q, k, v, sliding_window=7)
    assert torch.equal(shorter[:, :7], causal[:, :7])
    assert not torch.allclose(shorter[:, 7], causal[:, 7])


# Masks


def test_plain_rules_become_a_key_mask_and_others_a_dense_one() -> None:
    window = sliding_window_causal_mask_function(4)
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[0, :2] = False
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6}
    assert dma_mask(**sizes) is None
    assert dma_mask(**sizes, mask_function=window) is None
    assert dma_mask(**sizes, mask_function=bidirectional_mask_function) is None
    for rule in (window, bidirectional_mask_function):
        mask = dma_mask(**sizes, mask_function=rule, attention_mask=padding)
        assert torch.equal(mask, padding)

    for rule in (
        chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
        sliding_window_bidirectional_mask_function(2),
        and_masks(window, lambda b, h, q, k: k != 1),
        lambda b, h, q, k: k <= q,
    ):
        mask = dma_mask(**sizes, mask_function=rule, attention_mask=padding)
        assert mask.shape == (2, 1, 6, 6) and mask.dtype == torch.bool
        assert not mask[0, ..., :2].any()
    always = dma_mask(**sizes, allow_is_causal_skip=False)
    assert torch.equal(always[0, 0], torch.ones(6, 6).tril().bool())


def test_cross_attention_sees_keys_beyond_the_number_of_queries() -> None:
    assert dma_mask(1, 3, 10, mask_function=bidirectional_mask_function) is None
    padding = torch.arange(10)[None] < 8
    mask = dma_mask(
        1, 3, 10, mask_function=bidirectional_mask_function, attention_mask=padding
    )
    assert torch.equal(mask, padding)


def test_masks_read_nothing_on_the_host() -> None:
    """Tensors of the meta device hold no data: reading one on the host raises."""
    mask = torch.ones(2, 20, dtype=torch.bool, device="meta")
    offset = torch.tensor(19, device="meta")
    out = dma_mask(2, 1, 32, q_offset=offset, attention_mask=mask, device="meta")
    assert out is not None and out.shape == (2, 32)
    assert last_key(key_mask(out, 2, 32)).shape == (2,)
    assert dma_mask(2, 20, 20, attention_mask=mask, device="meta").shape == (2, 20)


def test_a_prompts_mask_without_padding_is_marked() -> None:
    """`generate` always passes one, and the Hopper kernel takes none."""
    ones = torch.ones(2, 20, dtype=torch.bool)
    padded = ones.clone()
    padded[1, :3] = False
    assert is_full(dma_mask(2, 20, 20, attention_mask=ones))
    assert is_full(dma_mask(2, 5, 20, q_offset=15, attention_mask=ones))
    assert not is_full(dma_mask(2, 20, 20, attention_mask=padded)) and not is_full(None)
    assert not is_full(dma_mask(2, 5, 20, q_offset=15, attention_mask=padded))
    # one query, a static cache's slots, its offset on the device: not read
    assert not is_full(dma_mask(2, 1, 20, q_offset=19, attention_mask=ones))
    assert not is_full(dma_mask(2, 5, 32, q_offset=15, attention_mask=ones))
    assert not is_full(dma_mask(2, 5, 20, q_offset=torch.tensor(15), attention_mask=ones))


@pytest.mark.parametrize("use_cache", [False, True])
def test_repeated_positions_under_a_mask_are_one_sequence(use_cache: bool) -> None:
    """Only without a mask do position ids that restart mean packed sequences."""
    ids = torch.randint(3, 97, (1, 40))
    positions = torch.arange(20).repeat(2)[None]
    expected, logits = both(make("llama"), lambda m: m(
        ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=use_cache
    ).logits)
    assert relative(logits, expected) < 1e-5


def test_generate_attends_to_its_prompt_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor | None] = []
    original = adapter.dma_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs["key_padding_mask"] if args[0].shape[1] > 1 else None)
        return original(*args, **kwargs)

    monkeypatch.setattr(adapter, "dma_attention", watched)
    model = enable_dma(make("llama"))
    ids, _ = left_padded(2, 30)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False,
                   pad_token_id=0)
    assert seen and all(mask is None for mask in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 40], ids=["decode", "prefill"])
def test_nothing_waits_for_the_gpu(queries: int) -> None:
    q, k, v = (torch.randn(2, 2, n, 64, device="cuda").half() for n in (queries, 256, 256))
    padding = torch.ones(2, 100, dtype=torch.bool, device="cuda")
    padding[0, :30] = False
    offset = torch.tensor(100 - queries, device="cuda")
    layer = Layer("default")

    def call() -> None:
        mask = dma_mask(2, queries, 256, offset, attention_mask=padding, device="cuda")
        attend(q, k, v, mask, layer=layer, sliding_window=50)

    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_off_gives_sdpas_logits_on_the_gpu(name: str) -> None:
    ids, mask = (x.cuda() for x in left_padded(30, 200))
    model = make(name).to("cuda", torch.bfloat16)
    expected, logits = both(model, lambda m: m(ids, attention_mask=mask).logits.float())
    assert relative(logits[mask.bool()], expected[mask.bool()]) < 3e-2


@pytest.mark.parametrize("kind", ["bool", "additive", "heads"])
def test_custom_4d_masks_follow_sdpa(kind: str) -> None:
    ids = torch.randint(3, 97, (2, 20))
    seen = torch.rand(2, 1, 20, 20) < 0.6
    seen = seen.tril() | torch.eye(20, dtype=torch.bool)
    if kind == "heads":
        seen = seen.expand(2, 4, 20, 20)
    mask = seen
    if kind == "additive":
        mask = torch.zeros(2, 1, 20, 20).masked_fill(~seen, torch.finfo(torch.float32).min)
        mask = torch.where(seen, torch.randn(2, 1, 20, 20), mask)
    expected, logits = both(make("llama"), lambda m: m(ids, attention_mask=mask).logits)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_custom_4d_masks_run_in_the_layers_own_formats() -> None:
    ids = torch.randint(3, 97, (1, 300))
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()
    exact, default = both(make("llama"), lambda m: m(ids, attention_mask=mask).logits, "default")
    fp4 = enable_dma(make("llama"), "nvfp4")(ids, attention_mask=mask).logits
    assert 0 < relative(default, exact) < relative(fp4, exact)


def test_a_4d_mask_over_a_static_cache_keeps_the_tile_classes() -> None:
    """Positions count back from the last key that a query sees, not from the last slot."""
    layer = Layer("default,diag=128,sink=0")
    q, k, v = (torch.randn(1, 2, 300, 32) for _ in range(3))
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()
    longer = nn.functional.pad(mask, (0, 84))
    spare = [nn.functional.pad(x, (0, 0, 0, 84)) for x in (k, v)]
    assert torch.equal(
        attend(q, k, v, mask, layer=layer), attend(q, *spare, longer, layer=layer)
    )


def test_masks_that_do_not_fit_raise() -> None:
    q, k, v = counting(4)
    with pytest.raises(ValueError, match="attention_mask"):
        attend(q, k, v, torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match="attention_mask"):
        attend(q, k, v, torch.zeros(1, 4))
    with pytest.raises(ValueError, match="attention_mask"):
        attend(q, k, v, torch.zeros(1, 1, 3, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="sliding_window"):
        attend(q, k, v, sliding_window=2, is_causal=False)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_bidirectional_encoders_follow_sdpa(name: str) -> None:
    ids, mask = left_padded(9, 30)
    ids, mask = ids.flip(1), mask.flip(1)
    call = lambda m: m(ids, attention_mask=mask).last_hidden_state  # noqa: E731  # used twice
    expected, out = both(make(name), call)
    valid = mask.bool()
    torch.testing.assert_close(out[valid], expected[valid], rtol=1e-4, atol=1e-4)


def test_encoder_decoder_follows_sdpa() -> None:
    ids, mask = left_padded(9, 30)
    expected, tokens = both(
        make("bart"),
        lambda m: m.generate(
            ids.flip(1), attention_mask=mask.flip(1), max_new_tokens=8, do_sample=False
        ),
    )
    assert torch.equal(tokens, expected)


def test_a_causal_model_can_run_bidirectionally() -> None:
    ids, mask = left_padded(9, 30)
    expected, out = both(
        make("llama"), lambda m: m(ids, attention_mask=mask, is_causal=False).logits
    )
    valid = mask.bool()
    torch.testing.assert_close(out[valid], expected[valid], rtol=1e-4, atol=1e-4)


# Packed sequences

LENGTHS = (150, 1, 37)


def packed(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return model(ids, position_ids=positions, **kwargs).logits


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("given", ["cu_seq_lens", "totals", "mask-function", "position-ids"])
def test_packed_sequences_equal_separate_runs(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable_dma(make(name), "default")
    ids = torch.randint(3, 97, (1, sum(LENGTHS)))
    alone = torch.cat([model(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    calls = spy_on(monkeypatch, "dma_attention_varlen")
    kwargs: dict[str, Any] = {"use_cache": given == "position-ids"}
    if given in ("cu_seq_lens", "totals"):
        cu = torch.tensor([0, *LENGTHS]).cumsum(0)
        kwargs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    if given == "cu_seq_lens":
        kwargs |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    out = packed(model, ids, **kwargs)
    assert len(calls) == 2
    torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-4)


def test_packed_rows_of_a_batch_stay_apart() -> None:
    model = enable_dma(make("llama"), "default")
    ids = torch.randint(3, 97, (2, sum(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    other = torch.arange(ids.shape[1])[None]
    both_rows = model(ids, position_ids=torch.cat([positions, other]), use_cache=False).logits
    torch.testing.assert_close(both_rows[:1], packed(model, ids[:1]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both_rows[1:], model(ids[1:]).logits, rtol=1e-4, atol=1e-4)


def test_position_ids_are_read_once_a_pass_and_anew_in_the_next() -> None:
    model = enable_dma(make("llama"), "off")
    ids = torch.randint(3, 97, (1, 30))
    positions = torch.arange(30)[None]
    model(ids, position_ids=positions)
    positions[:, 10:] -= 10  # the same tensor, changed in place
    out = model(ids, position_ids=positions).logits
    torch.testing.assert_close(out[:, 10:], model(ids[:, 10:]).logits, rtol=1e-4, atol=1e-4)


def test_what_is_kept_of_a_mask_for_a_pass() -> None:
    """By layer, and by what was asked: a cache's new keys are not the end of a prompt."""
    mask, layers = torch.ones(2, 5), [torch.nn.Identity() for _ in range(3)]
    asked: list[Any] = []

    def ask(layer: int, what: Any) -> Any:
        def compute() -> tuple[Any, int]:
            asked.append(what)
            return what, layer

        return once_a_pass(mask, layers[layer], what, compute)

    assert [ask(0, "a"), ask(1, (2, 5)), ask(1, "a"), ask(2, (2, 5))] == [
        ("a", 0), ((2, 5), 1), ("a", 0), ((2, 5), 1)]
    assert asked == ["a", (2, 5)]
    assert ask(1, "a") == ("a", 1) and ask(0, "a") == ("a", 1), "the next pass"


def test_packing_that_does_not_fit_raises() -> None:
    q, k, v = counting(4)
    cu = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="cu_seq_lens_k"):
        attend(q, k, v, cu_seq_lens_q=cu)
    for mask in (torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 1, 4, 4, dtype=torch.bool)):
        with pytest.raises(ValueError, match="cu_seq_lens_q"):
            attend(q, k, v, mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu)


# Configs


def test_prefill_uses_each_layers_config_and_decode_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = enable_dma(make("llama"), "default,diag=256", layer_configs={1: "nvfp4"})
    calls = spy_on(monkeypatch, "dma_attention")
    ids = torch.randint(3, 97, (1, 40))
    cache = model(ids[:, :20]).past_key_values
    expected = [DMAConfig(diag=256), DMAConfig.preset("nvfp4")]
    assert [call["config"] for call in calls] == expected
    calls.clear()
    cache = model(ids[:, 20 : 20 + DECODE_MAX_QUERIES], past_key_values=cache).past_key_values
    assert [call["config"] for call in calls] == [DMAConfig.preset("off")] * 2
    calls.clear()
    model(torch.randint(3, 97, (1, DECODE_MAX_QUERIES + 1)), past_key_values=cache)
    assert [call["config"] for call in calls] == expected


def test_layer_configs_change_the_output() -> None:
    ids = torch.randint(3, 97, (1, 200))
    outs = [
        enable_dma(make("llama"), "off", layer_configs=single)(ids).logits
        for single in (None, {0: "nvfp4"}, {1: DMAConfig.preset("nvfp4")}, {0: "off", 1: "off"})
    ]
    assert torch.equal(outs[0], outs[3])
    assert 0 < relative(outs[1], outs[0]) < 0.5 and 0 < relative(outs[2], outs[0]) < 0.5
    assert not torch.equal(outs[1], outs[2])


def test_without_enable_dma_the_default_config_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    model = make("llama")
    model.set_attn_implementation("dma")
    calls = spy_on(monkeypatch, "dma_attention")
    model(torch.randint(3, 97, (1, 20)))
    assert [call["config"] for call in calls] == [DMAConfig()] * 2


def test_enable_dma_refuses_what_it_cannot_switch() -> None:
    with pytest.raises(NotImplementedError, match="AttentionInterface"):
        enable_dma(make("bloom"))
    with pytest.raises(TypeError, match="model"):
        enable_dma(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="config"):
        enable_dma(make("llama"), 3)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ValueError, match="layer_configs"):
        enable_dma(make("llama"), layer_configs={5: "off"})
    with pytest.raises(ValueError, match="preset"):
        enable_dma(make("llama"), "no-such-preset")


def test_dropout_raises_in_training_only() -> None:
    q, k, v = counting(4)
    layer = Layer()
    attend(q, k, v, dropout=0.1, layer=layer)
    layer.train()
    attend(q, k, v, dropout=0.0, layer=layer)
    with pytest.raises(NotImplementedError, match="dropout"):
        attend(q, k, v, dropout=0.1, layer=layer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_strided_16_bit_inputs_and_another_value_dim(dtype: torch.dtype) -> None:
    q = torch.randn(2, 30, 6, 32, dtype=dtype).transpose(1, 2)
    k = torch.randn(2, 30, 2, 32, dtype=dtype).transpose(1, 2)
    v = torch.randn(2, 30, 2, 48, dtype=dtype).transpose(1, 2)
    out = attend(q, k, v, scaling=0.3)
    expected = nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, scale=0.3, enable_gqa=True
    )
    assert out.dtype == dtype
    assert relative(out.float(), expected.transpose(1, 2)) < 1e-2


def test_autocast_casts_all_three_inputs() -> None:
    q, k, v = (torch.randn(1, 2, 20, 32) for _ in range(3))
    with pytest.raises(TypeError, match="dtype"):
        attend(q, k, v.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # fp32 norms of q and k do this
        out = attend(q, k, v.bfloat16())
    assert torch.equal(out, attend(q.bfloat16(), k.bfloat16(), v.bfloat16()))
