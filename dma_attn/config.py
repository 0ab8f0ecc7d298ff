"""`DMAConfig`: everything that decides the numbers of a call, validated once."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch

from .formats import GRANULARITIES, SCALE_RULES, BlockFormat, check_choice, get_format
from .schedule import TILE


@dataclass(frozen=True)
class DMAConfig:
    """Formats and transforms of diagonal-tiled mixed-precision attention.

    Attributes:
        high: Format of the tiles near the diagonal and at the sink ("none" keeps 16 bits).
        low: Format of all other tiles.
        diag: Width of the high band in tokens, a multiple of 128; 128 is the diagonal tile alone,
            0 none, "full" makes every tile high.
        sink: First keys kept high, in tokens, a multiple of 128.
        scale_rule: How block scales are chosen ("auto": `rceil` for MXFP8, `mse` for 4 bits); a
            rule that one of the formats lacks means "auto" for that format. "paper" is the
            authors' encoder; it also folds scale and log2(e) into Q before quantisation.
        granularity: Span of the fp32 scale of NVFP4 and int8: "token", "tile" (128 tokens) or
            "tensor" (a batch row's head). int8 queries always have one scale a token.
        smooth_k: Subtract from K its mean over the valid keys (exact under softmax).
        rotate: Rotate Q and K along the head dim by an orthonormal Hadamard matrix.
        pv: "fp16" rounds P to V's own 16-bit dtype, "fp8" runs P V in E4M3.
        select: Content-selected high tiles per query tile; not built yet, must be 0.

    Raises:
        TypeError, ValueError: a field is not what is described above.
        NotImplementedError: `select` > 0.
    """

    high: str = "mxfp8"
    low: str = "nvfp4"
    diag: int | str = TILE
    sink: int = TILE
    scale_rule: str = "auto"
    granularity: str = "token"
    smooth_k: bool = True
    rotate: bool = True
    pv: str = "fp16"
    select: int = 0

    PRESETS: ClassVar[tuple[str, ...]] = (
        "default",
        "paper",
        "mxfp8",
        "mxfp4",
        "nvfp4",
        "hopper",
        "off",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "high", get_format(self.high, "high").name)
        object.__setattr__(self, "low", get_format(self.low, "low").name)
        check_choice("scale_rule", self.scale_rule, SCALE_RULES)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("pv", self.pv, ("fp16", "fp8"))
        for name in ("smooth_k", "rotate"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {getattr(self, name)!r}")
        if self.diag != "full":
            _check_tokens("diag", self.diag, ' or "full"')
        _check_tokens("sink", self.sink)
        if isinstance(self.select, bool) or not isinstance(self.select, int) or self.select < 0:
            raise ValueError(f"select: expected an int >= 0, got {self.select!r}")
        if self.select:
            raise NotImplementedError(
                f"select: content-selected tiles are not built yet, expected 0, got {self.select}"
            )
        if self.scale_rule == "paper":
            for name in ("high", "low"):
                fmt = get_format(getattr(self, name))
                if fmt.quantised and "paper" not in fmt.rules:
                    raise ValueError(
                        f'{name}: scale_rule="paper" exists for mxfp8, mxfp4 and nvfp4, '
                        f"got {fmt.name!r}"
                    )

    @classmethod
    def preset(cls, name: str) -> DMAConfig:
        """A named configuration, one of `DMAConfig.PRESETS`.

        "default" is mixed MXFP8/NVFP4; "paper" the authors' numerics exactly; "mxfp8", "mxfp4" and
        "nvfp4" one format everywhere; "hopper" int8 everywhere with FP8 P V; "off" no quantisation.
        """
        check_choice("preset", name, cls.PRESETS)
        if name == "default":
            return cls()
        if name == "paper":
            return cls(scale_rule="paper", smooth_k=False, rotate=False)
        if name == "hopper":
            return cls(high="int8", low="int8", granularity="tile", pv="fp8")
        if name == "off":
            return cls(high="none", low="none", smooth_k=False, rotate=False)
        return cls(high=name, low=name)

    @classmethod
    def parse(cls, text: str) -> DMAConfig:
        """Read `"preset,field=value,..."`, for example `"default,high=none,diag=512"`.

        Raises:
            ValueError: unknown preset or field, or a value that the field does not take.
        """
        preset, *changes = (part.strip() for part in text.split(","))
        config = cls.preset(preset)
        values: dict[str, Any] = {}
        for change in changes:
            name, sep, raw = (part.strip() for part in change.partition("="))
            valid = [f.name for f in fields(cls)]
            if not sep or name not in valid:
                raise ValueError(f"config: expected field=value with a field of {valid}, "
                                 f"got {change!r}")
            if name in values:
                raise ValueError(f"config: expected each field once, got {name} twice in {text!r}")
            values[name] = _parse_value(name, raw, getattr(config, name))
        return replace(config, **values)

    def replace(self, **changes: Any) -> DMAConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Field values, ready for JSON; `DMAConfig(**d)` is the way back."""
        return asdict(self)

    def __str__(self) -> str:
        """A label that `parse` reads: the preset it equals, or what differs from "default"."""
        for name in self.PRESETS:
            if self == self.preset(name):
                return name
        base = DMAConfig().to_dict()
        changes = [f"{k}={v}" for k, v in self.to_dict().items() if v != base[k]]
        return ",".join(["default", *changes]).replace("=False", "=false")

    @property
    def high_format(self) -> BlockFormat:
        """The high tiles' format."""
        return get_format(self.high)

    @property
    def low_format(self) -> BlockFormat:
        """The low tiles' format."""
        return get_format(self.low)

    def canonical(self) -> DMAConfig:
        """The same numbers with single-precision calls written one way: all tiles low."""
        if torch.compiler.is_compiling():  # Dynamo warns of caches
            return _canonical.__wrapped__(self)
        return _canonical(self)

    @property
    def folds_scale(self) -> bool:
        """True when scale * log2(e) multiplies Q before quantisation (the authors' order)."""
        return self.scale_rule == "paper"


@functools.cache
def _canonical(config: DMAConfig) -> DMAConfig:  # a call asks several times
    if config.diag == "full":
        return replace(config, low=config.high, diag=0, sink=0)
    if config.high == config.low or (config.diag == 0 and config.sink == 0):
        return replace(config, high=config.low, diag=0, sink=0)
    return config


def _check_tokens(name: str, value: object, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or value % TILE:
        raise ValueError(f"{name}: expected a multiple of {TILE} tokens >= 0{also}, got {value!r}")


def _parse_value(name: str, raw: str, current: object) -> Any:
    if isinstance(current, bool):
        if raw.lower() not in ("true", "false"):
            raise ValueError(f"{name}: expected true or false, got {raw!r}")
        return raw.lower() == "true"
    if isinstance(current, int) and raw != "full":
        try:
            return int(raw)
        except ValueError:
            raise ValueError(f"{name}: expected an integer, got {raw!r}") from None
    return raw
