"""`DMACache` in generation: with 16-bit formats it gives the tokens of sdpa on a `DynamicCache`.

Models are tiny, random and in fp32, the attention of the first call is exact (preset "off"), so
that only the cache can make a difference. The laws of `MixedKVCache` itself are in test_cache.
"""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dma_attn import DMAConfig

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import transformers as hf
from transformers import DynamicCache

from dma_attn.integrations.transformers import DMACache, dma_attention_forward, enable_dma
from dma_attn.integrations.transformers_cache import DMALayer

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"vocab_size": 97, "max_position_embeddings": 1024},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
    "initializer_range": 0.1,  # attention that is far from uniform
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **kw: hf.LlamaConfig(**{**SIZES, **kw}),
    "mistral": lambda **kw: hf.MistralConfig(**{**SIZES, "sliding_window": 6, **kw}),
}
SCALED = {"granite": lambda **kw: hf.GraniteConfig(**SIZES, attention_multiplier=0.5, **kw)}
EXACT: dict[str, Any] = {"config": DMAConfig(high="none", low="none"), "v_low": "none"}
NEW = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(autouse=True)
def exact_seed() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def make(name: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(7)
    return hf.AutoModelForCausalLM.from_config({**CONFIGS, **SCALED}[name](**changes)).eval()


def prompt(*lengths: int) -> dict[str, Tensor]:
    """Random token ids and attention mask, (B, max length), padded on the left."""
    width = max(lengths)
    ids = torch.randint(3, 97, (len(lengths), width))
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def both(name: str, run: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """`run(model, cache)` with sdpa on a DynamicCache, and with DMA on an exact DMACache."""
    model = make(name)
    model.set_attn_implementation("sdpa")
    expected = run(model, DynamicCache(config=model.config))
    enable_dma(model, "off")
    return expected, run(model, DMACache(model.config, **EXACT))


def pieces(model: Any, cache: Any, inputs: dict[str, Tensor], ends: tuple[int, ...]) -> Tensor:
    """Logits of a prompt that goes through the model piece by piece; a mask is optional."""
    logits, start = [], 0
    for end in ends:
        part = {"input_ids": inputs["input_ids"][:, start:end]}
        if "attention_mask" in inputs:
            part["attention_mask"] = inputs["attention_mask"][:, :end]
        logits.append(model(**part, past_key_values=cache).logits)
        start = end
    return torch.cat(logits, 1)


def filled(tokens: int, batch: int = 3, **options: Any) -> DMALayer:
    layer = DMALayer(**{**EXACT, **options})
    layer.append(torch.randn(batch, 2, tokens, 16), torch.randn(batch, 2, tokens, 16))
    return layer


def keys_of(layer: Any) -> Tensor:
    return torch.cat(layer.cache.dequantize(), -1)


# Generation in 16 bits

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True},
    "prefill-pieces": {"prefill_chunk_size": 4},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(9,), (5, 9)], ids=["plain", "padded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_modes_give_sdpas_tokens(name: str, mode: str, lengths: tuple[int, ...]) -> None:
    inputs = prompt(*lengths[-1:] if mode == "lookup" else lengths)  # lookup takes one sequence

    def run(model: Any, cache: Any) -> Tensor:
        torch.manual_seed(3)
        tokens = model.generate(**inputs, past_key_values=cache, **{**NEW, **MODES[mode]})
        assert cache.get_seq_length() == 28
        return tokens

    expected, tokens = both(name, run)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_exact_cache_follows_an_assistant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[int] = []
    crop = DMALayer.crop

    def record(self: DMALayer, tokens_to_remove: Any) -> None:
        removed.append(int(tokens_to_remove))
        crop(self, tokens_to_remove)

    monkeypatch.setattr(DMALayer, "crop", record)
    options = {**prompt(12), "assistant_model": make("llama", num_hidden_layers=1), **NEW}
    expected, tokens = both(name, lambda m, cache: m.generate(**options, past_key_values=cache))
    assert torch.equal(tokens, expected)
    assert min(removed) < 0, "no token was taken back"


@pytest.mark.parametrize("second", [7, 20], ids=["few", "many"])
@pytest.mark.parametrize("name", CONFIGS)
def test_case_099_a_second_turn_reuses_the_cache(name: str, second: int) -> None:
    inputs, more = prompt(50, 100), prompt(second - 3, second)

    masks = inputs["attention_mask"], torch.ones(2, 6, dtype=torch.long), more["attention_mask"]

    def run(model: Any, cache: Any) -> Tensor:
        first = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, do_sample=False)
        assert cache.get_seq_length() == 105
        ids, mask = torch.cat((first, more["input_ids"]), 1), torch.cat(masks, 1)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **NEW)

    expected, tokens = both(name, run)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("ends", [(20, 40, 47, 48), (1, 12, 48)], ids=["many", "few"])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", [*CONFIGS, *SCALED])
def test_pieces_give_sdpas_logits(name: str, padded: bool, ends: tuple[int, ...]) -> None:
    inputs = prompt(38 if padded else 48, 48)
    mask = inputs["attention_mask"].bool()
    if not padded:
        del inputs["attention_mask"]
    expected, logits = both(name, lambda model, cache: pieces(model, cache, inputs, ends))
    torch.testing.assert_close(logits[mask], expected[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2])
def test_padding_within_and_at_the_end_of_pieces_stays_unseen(rows: int) -> None:
    inputs = prompt(*[40] * rows)
    mask = inputs["attention_mask"]
    mask[0, 8:12] = mask[0, 17:20] = mask[0, 29] = 0  # at the ends of pieces, too
    ends = (10, 20, 30, 31, 40)
    expected, logits = both("llama", lambda model, cache: pieces(model, cache, inputs, ends))
    torch.testing.assert_close(logits[mask > 0], expected[mask > 0], rtol=1e-4, atol=1e-4)


def test_padding_of_a_4d_mask_stays_unseen_in_later_calls() -> None:
    inputs = prompt(20, 30)
    mask = inputs["attention_mask"].bool()
    square = torch.ones(24, 24, dtype=torch.bool).tril() & mask[:, None, None, :24]
    model = enable_dma(make(), "off")
    expected = pieces(model, DMACache(model.config, **EXACT), inputs, (24, 30))
    cache = DMACache(model.config, **EXACT)
    model(inputs["input_ids"][:, :24], attention_mask=square, past_key_values=cache)
    later = model(inputs["input_ids"][:, 24:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(later, expected[:, 24:], rtol=1e-4, atol=1e-4)


def test_copies_of_a_cache_continue_independently() -> None:
    inputs, model = prompt(40), enable_dma(make(), "off")
    prefix = DMACache(model.config, **EXACT)
    model(inputs["input_ids"][:, :30], past_key_values=prefix)
    for ids in (inputs["input_ids"][:, :35], inputs["input_ids"]):
        tokens = model.generate(ids, past_key_values=copy.deepcopy(prefix), **NEW)
        assert torch.equal(tokens, model.generate(ids, **NEW))
    assert prefix.get_seq_length() == 30


# Generation in few bits


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("config", ["default,high=none,low=int4", "default"])
def test_quantised_logits_are_close(name: str, config: str) -> None:
    inputs = prompt(330, 400)
    ends = (380, *range(381, 401))
    changes = {"sliding_window": 300} if name == "mistral" else {}
    model = enable_dma(make(name, **changes), "off")
    exact = pieces(model, DynamicCache(), inputs, ends)[:, 380:]
    error = {}
    for text in (None, config, f"{config},diag=0,sink=0"):
        cache = DMACache(model.config, text)
        logits = pieces(model, cache, inputs, ends)[:, 380:]
        assert {layer.get_seq_length() for layer in cache.layers} == {400}
        assert torch.cosine_similarity(logits, exact, -1).min() > 0.98
        error[text] = float((logits - exact).norm() / exact.norm())
    assert min(error.values()) > 0.01, "nothing was quantised"
    assert max(error[None], error[config]) < 0.75 * error[text], "no high tokens"


def test_first_call_computes_as_without_a_cache() -> None:
    model, inputs = enable_dma(make(), "default"), prompt(150, 300)
    cache = DMACache(model.config)
    logits = model(**inputs, past_key_values=cache).logits
    assert torch.equal(logits, model(**inputs, use_cache=False).logits)
    assert cache.get_seq_length() == 300


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_default_formats_generate_in_the_models_dtype(dtype: torch.dtype) -> None:
    model = enable_dma(make().to(dtype))
    cache = DMACache(model.config, max_len=512)
    tokens = model.generate(**prompt(150, 300), past_key_values=cache, num_beams=2, **NEW)
    assert tokens.shape == (2, 320)
    assert cache.get_seq_length() == 319
    caches = [layer.cache for layer in cache.layers]
    assert {(c.dtype, c.capacity, c.batch) for c in caches} == {(dtype, 512, 4)}
    assert cache.nbytes() == sum(c.nbytes() for c in caches) > 0


def test_autocast_decides_the_caches_dtype() -> None:
    model, inputs = enable_dma(make(), "off"), prompt(15, 30)
    cache = DMACache(model.config, **EXACT)
    with torch.autocast("cpu", torch.bfloat16):
        logits = pieces(model, cache, inputs, (20, 29, 30))
        expected = pieces(model, DynamicCache(), inputs, (20, 29, 30))
    assert cache.layers[0].cache.dtype == torch.bfloat16
    counts = inputs["attention_mask"].bool()
    assert torch.cosine_similarity(logits.float(), expected.float(), -1)[counts].min() > 0.999


# What generate() does to a cache


@pytest.mark.parametrize(
    ("argument", "left"), [(-5, 35), (0, 40), (30, 30), (99, 40), (-99, 0)], ids=str
)
@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_case_097_crop(kind: Any, argument: int, left: int) -> None:
    layer = filled(40)
    assert layer.is_croppable
    before = keys_of(layer)
    layer.crop(kind(argument))
    assert layer.get_seq_length() == left
    assert torch.equal(keys_of(layer), before[:, :, :left])
    assert layer.get_mask_sizes(3) == (left + 3, 0)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda x: x.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda x: x.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda x: x.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
        (lambda x: x.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ],
    ids=["reorder", "repeat", "select", "select-bool"],
)
def test_rows_of_all_copies_move_together(change: Any, rows: list[int]) -> None:
    layer = filled(300, config=None, v_low="int4")
    before = keys_of(layer)
    cache = DMACache(CONFIGS["llama"]())
    change(cache)  # no tokens, nothing to move
    cache.layers = [layer, copy.deepcopy(layer)]
    change(cache)
    for moved in cache.layers:
        assert torch.equal(keys_of(moved), before[rows])


def test_reset_takes_another_batch() -> None:
    model, inputs = enable_dma(make(), "off"), prompt(9, 12, 12)
    cache = DMACache(model.config, **EXACT)
    assert cache.get_seq_length() == 0 and cache.nbytes() == 0
    model.generate(**prompt(20), past_key_values=cache, **NEW)
    cache.reset()
    assert cache.get_seq_length() == 0
    tokens = model.generate(**inputs, past_key_values=cache, **NEW)
    assert torch.equal(tokens, model.generate(**inputs, **NEW))


# Errors


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_attention_raises(name: str, implementation: str, heads: int) -> None:
    model, inputs = make(name, num_key_value_heads=heads), prompt(5, 9)
    model.set_attn_implementation(implementation)
    cache = DMACache(model.config)
    with pytest.raises(TypeError, match=r"enable_dma\(model\)"):
        model.generate(**inputs, past_key_values=cache, **NEW)
    enable_dma(model).generate(**inputs, past_key_values=cache, **NEW)
    model.set_attn_implementation(implementation)
    with pytest.raises(TypeError, match=r"enable_dma\(model\)"):
        model(inputs["input_ids"][:, :1], past_key_values=cache)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((nn.Linear(1, 1),), {}, TypeError, "model_config: expected a transformers config"),
        ((hf.LlamaConfig(), 4), {}, TypeError, "config: expected a DMAConfig or text, got int"),
        ((hf.LlamaConfig(), "defualt"), {}, ValueError, "defualt"),
        ((hf.LlamaConfig(), "paper,granularity=tile"), {}, ValueError, "granularity"),
        ((hf.LlamaConfig(),), {"v_low": "int3"}, ValueError, "v_low"),
        ((hf.LlamaConfig(),), {"max_len": -1}, ValueError, "max_len"),
        ((hf.LlamaConfig(),), {"rotate_v": 1}, TypeError, "rotate_v"),
    ],
    ids=["model", "type", "preset", "granularity", "format", "max_len", "rotate_v"],
)
def test_wrong_arguments_raise(arguments: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        DMACache(*arguments, **options)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("DeepseekV3Config", "kv_lora_rank"),
        ("Gemma3nTextConfig", "num_kv_shared_layers"),
        ("MllamaTextConfig", "cross_attention_layers"),
        ("Llama4TextConfig", "chunked_attention"),
        ("Qwen3NextConfig", "linear_attention"),
        ("MambaConfig", "linear_attention"),
        ("BartConfig", "cross-attention"),
    ],
)
def test_other_architectures_raise(kind: str, text: str) -> None:
    config = hf.MllamaConfig().get_text_config() if "Mllama" in kind else getattr(hf, kind)()
    with pytest.raises(NotImplementedError, match=f"{kind}.*{text}"):
        DMACache(config)


@pytest.mark.parametrize("kind", [hf.Qwen3Config, hf.Gemma3TextConfig, hf.Gemma3Config])
def test_full_and_sliding_attention_is_accepted(kind: Any) -> None:
    config = kind()
    assert len(DMACache(config).layers) == config.get_text_config().num_hidden_layers


@pytest.mark.parametrize("name", ["offload", "prefetch"])
def test_offloading_raises(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name}.*stays on its device"):
        getattr(filled(3), name)()


class Attention(nn.Module):
    is_causal = True


@pytest.mark.parametrize(
    ("mask", "kwargs", "text", "when"),
    [
        (None, {"is_causal": False}, "is_causal", [5]),
        (torch.ones(1, 1, 2, 7, dtype=torch.bool), {}, "attention_mask", [5]),
        (torch.zeros(1, 1, 7, dtype=torch.int32), {}, "cu_seq_lens_q", [0, 5]),
        (None, {"cu_seq_lens_q": torch.tensor([0, 2])}, "cu_seq_lens_q", [0, 5]),
    ],
    ids=["bidirectional", "4d", "3d", "packed"],
)
def test_unsupported_calls_raise(mask: Any, kwargs: Any, text: str, when: list[int]) -> None:
    for tokens in when:
        layer = filled(tokens, batch=1)
        states = layer.update(torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16))
        with pytest.raises(NotImplementedError, match=text):
            dma_attention_forward(Attention(), torch.randn(1, 4, 2, 16), *states, mask, **kwargs)
        assert layer.get_seq_length() == tokens


def test_tokens_are_appended_only_once() -> None:
    layer = filled(5, batch=1)
    states = layer.update(torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16))
    assert states[0].shape == (1, 2, 7, 16)
    assert layer.get_seq_length() == 5
    q = torch.randn(1, 4, 2, 16)
    dma_attention_forward(Attention(), q, *states, None)
    assert layer.get_seq_length() == 7
    with pytest.raises(RuntimeError, match="only once"):
        dma_attention_forward(Attention(), q, *states, None)
