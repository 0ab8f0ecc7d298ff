"""What an evaluation compares: the model as it is, with DMA attention, over a mixed KV cache.

    native                              the model's own attention and cache
    default,diag=512                    DMA attention in this configuration
    cache, cache:default,low=nvfp4,v_low=nvfp4    16-bit attention over a cache of these formats
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..cache.mixed import MixedKVCache
from ..config import DMAConfig
from .attention import using_config

NATIVE = "native"
_CACHE = "cache"
_V_FIELDS = ("v_high", "v_low", "rotate_v")


@dataclass(frozen=True)
class Subject:
    """One of them.

    Attributes:
        label: As it was given.
        config: Of attention, None for the model's own.
        cached: Whether decode goes over a mixed cache; its K's config and V's options.
    """

    label: str
    config: DMAConfig | None = None
    cached: bool = False
    k_config: DMAConfig | None = None
    v_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Read a label.

        Raises:
            ValueError: it is none.
        """
        if text == NATIVE:
            return cls(text)
        kind, sep, rest = text.partition(":")
        if kind != _CACHE:
            return cls(text, DMAConfig.parse(text))
        if not sep:
            return cls(text, DMAConfig.preset("off"), True)
        k_fields: list[str] = []
        v_options: dict[str, Any] = {}
        for part in rest.split(","):
            name, _, value = (x.strip() for x in part.partition("="))
            if name in v_options:
                raise ValueError(f"config: expected each field once, got {name} twice in {text!r}")
            if name == "pv":
                raise ValueError(f"pv: a cache has none, got {text!r}")
            if name in _V_FIELDS:
                v_options[name] = value
            else:
                k_fields.append(part)
        if "rotate_v" in v_options:
            if v_options["rotate_v"] not in ("true", "false"):
                raise ValueError("rotate_v: expected true or false, got "
                                 f"{v_options['rotate_v']!r}")
            v_options["rotate_v"] = v_options["rotate_v"] == "true"
        config = DMAConfig.parse(",".join(k_fields))
        MixedKVCache(1, 1, 64, 0, config=config, device="meta", **v_options)  # or raises
        return cls(text, DMAConfig.preset("off"), True, config, v_options)

    @contextmanager
    def using(self, model: Any) -> Iterator[None]:
        """The model with this attention, then with its own again."""
        with using_config(model, self.config):
            yield

    def make_cache(self, model: Any, tokens: int) -> Any:
        """An empty transformers cache for so many tokens."""
        from transformers import DynamicCache

        from ..integrations.transformers import DMACache

        if not self.cached:
            return DynamicCache(config=model.config)
        return DMACache(model.config, self.k_config, **self.v_options, max_len=tokens)
