"""Number formats: the only place in the library that knows a format constant.

A `BlockFormat` says how a row of numbers is stored: the element encoding, how many neighbours
along the head dim share a scale, how that scale is encoded, and which scale rules exist. MX
formats follow the OCP Microscaling specification v1.0; NVFP4 is NVIDIA's two-level format;
`int8`, `int4` and `fp4` (one fp32 scale per token) are this library's own, meant for rotated data.
"""

from __future__ import annotations

from dataclasses import dataclass

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
E8M0_BIAS = 127
E8M0_NAN = 255
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E4M3_MIN_SUBNORMAL = 2.0**-9
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# NVFP4's `mse` rule may put a block maximum on 4 instead of 6; its scale is then 1.5 times larger,
# so the second-level scale leaves that room below E4M3's maximum.
NVFP4_SCALE_TARGET = {"amax": 448.0, "mse": 256.0}
NVFP4_SECOND_TARGET = 4.0
# What NVFP4 by token makes of the largest magnitude of a row at most: E4M3 rounds a block scale up
# by 1/17 (1.0625 to 1.125), subnormal scales are for blocks far below it, and the rest is room for
# fp32 rounding.
NVFP4_OVERSHOOT = 17 / 16
# P in E4M3 is scaled by a power of two first, so that small weights survive; P <= 1.
P_FP8_SCALE = 256.0
# Candidates that the `mse` rule of the one-scale-per-token formats tries, as shares of amax.
TOKEN_MSE_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
# The authors' constants (preset "paper"): exponents of the element maxima and NVFP4's token scale.
PAPER_EMAX = {"e4m3": 7, "e2m1": 3}
PAPER_NVFP4_TOKEN_MAX = 2.0**7
PAPER_NVFP4_MIN_SCALE = 1e-9


@dataclass(frozen=True)
class BlockFormat:
    """One storage format; see the table `FORMATS`.

    Attributes:
        name: Canonical name.
        element: Element encoding: "e4m3", "e5m2", "e2m1", "int8", "int4" or "none".
        bits: Bits an element takes in `BlockScaledTensor.data` (4-bit codes are packed in pairs).
        max: Largest finite element magnitude that the quantiser uses.
        emax: Exponent of `max` (floating-point elements).
        mantissa_bits: Explicit mantissa bits (floating-point elements).
        block: Elements along the head dim that share a scale; None means the whole token.
        scale: Encoding of that scale: "e8m0", "e4m3", "fp32" or "none".
        rules: Scale rules that exist; the first is what `scale_rule="auto"` means.
        granularities: What the format's fp32 scale (NVFP4's second level, or the only one of the
            whole-token formats) may span; the first is the default.
    """

    name: str
    element: str
    bits: int
    max: float
    emax: int
    mantissa_bits: int
    block: int | None
    scale: str
    rules: tuple[str, ...]
    granularities: tuple[str, ...] = ("token",)

    @property
    def quantised(self) -> bool:
        """False for `none`, the input's own 16- or 32-bit values."""
        return self.element != "none"

    @property
    def has_global_scale(self) -> bool:
        """True when an fp32 scale multiplies the block scales (NVFP4)."""
        return self.scale == "e4m3"

    def row_bytes(self, head_dim: int) -> int:
        """Payload bytes of one token of one head."""
        return head_dim * self.bits // 8

    def n_blocks(self, head_dim: int) -> int:
        """Scales along the head dim; a last partial block has one of its own."""
        return 1 if self.block is None else -(-head_dim // self.block)

    def resolve_rule(self, rule: str) -> str:
        """The rule this format uses in a pair or config: one it lacks means its default."""
        return rule if rule in self.rules else self.rules[0]

    def resolve_granularity(self, granularity: str) -> str:
        """The granularity this format uses in a pair or config; one it lacks means its default."""
        return granularity if granularity in self.granularities else self.granularities[0]


_MXFP8_RULES = ("rceil", "floor", "even", "mse")
_MXFP4_RULES = ("mse", "floor", "rceil", "even", "paper")
_ALL = ("token", "tile", "tensor")

FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("mxfp8", "e4m3", 8, 448.0, 8, 3, 32, "e8m0", (*_MXFP8_RULES, "paper")),
        BlockFormat("mxfp8_e5m2", "e5m2", 8, 57344.0, 15, 2, 32, "e8m0", _MXFP8_RULES),
        BlockFormat("mxfp4", "e2m1", 4, 6.0, 2, 1, 32, "e8m0", _MXFP4_RULES),
        BlockFormat("nvfp4", "e2m1", 4, 6.0, 2, 1, 16, "e4m3", ("mse", "amax", "paper"), _ALL),
        BlockFormat("int8", "int8", 8, 127.0, 6, 0, None, "fp32", ("amax",), ("token", "tile")),
        BlockFormat("int4", "int4", 4, 7.0, 2, 0, None, "fp32", ("mse", "amax")),
        BlockFormat("fp4", "e2m1", 4, 6.0, 2, 1, None, "fp32", ("mse", "amax")),
        BlockFormat("none", "none", 16, 0.0, 0, 0, None, "none", ("auto",)),
    )
}
ALIASES = {"mxfp8_e4m3": "mxfp8"}
SCALE_RULES = ("auto", "floor", "rceil", "even", "mse", "amax", "paper")
GRANULARITIES = _ALL


def get_format(name: str, argument: str = "format") -> BlockFormat:
    """Look a format up by name or alias; errors name `argument`.

    Raises:
        TypeError: `name` is not a string.
        ValueError: unknown name; the message lists the valid ones.
    """
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected a name, got {type(name).__name__}")
    fmt = FORMATS.get(ALIASES.get(name, name))
    if fmt is None:
        raise ValueError(f"{argument}: expected one of {[*FORMATS, *ALIASES]}, got {name!r}")
    return fmt


def check_choice(argument: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ValueError naming `argument`, the valid names and what came."""
    if not (isinstance(value, str) and value in valid):
        raise ValueError(f"{argument}: expected one of {list(valid)}, got {value!r}")
