"""The layers of the package: imports point down, optional packages load only when they are used.

The import tests run in subprocesses, since this process has already imported the package.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dma_attn"

LAYER = {
    "formats": 0,
    "device": 0,
    "config": 1,
    "schedule": 1,
    "quant": 2,
    "attention": 3,
    "cache": 4,
    "integrations": 5,
    "evaluation": 6,
    "bench": 6,
    "report": 7,
    "cli": 8,
    "cli_bench": 7,
    "cli_eval": 7,
}
SIDE = "testing"  # input makers and error budgets: may import anything, imported by benches only
KERNELS = "attention.kernels"
BELOW_KERNELS = {
    "attention",
    "attention.types",
    "attention.prepare",
    KERNELS,
    f"{KERNELS}.tiles",
    f"{KERNELS}.swizzle",
    f"{KERNELS}.blackwell",
    f"{KERNELS}.tuning",
    f"{KERNELS}.combine",
    f"{KERNELS}.unpack",
    f"{KERNELS}.decode",
    f"{KERNELS}.decode_operands",
    f"{KERNELS}.decode_registers",
    f"{KERNELS}.codes_ptx",
    f"{KERNELS}.hopper",
    f"{KERNELS}.hopper_blocks",
    f"{KERNELS}.hopper_step",
}
LAZY = ("triton", "transformers", "typer", "rich", "matplotlib", "jinja2")



def module_name(path: Path) -> str:
    """`quant.api` for dma_attn/quant/api.py, `quant` and an empty name for `__init__` files."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_modules(name: str, path: Path) -> set[str]:
    """Package modules ("" is the package itself) that the file names, at any depth of its code."""
    package = ["dma_attn", *name.split(".")] if name else ["dma_attn"]
    if path.name != "__init__.py":
        package.pop()
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            head, _, rest = target.partition(".")
            if head != "dma_attn":
                continue
            while rest and rest not in MODULES:  # the last part was an object of the module
                rest = rest.rpartition(".")[0]
            found.add(rest)
    return found - {name}


def layer(name: str) -> float:
    """Layer of a module; the package itself re-exports layers 0 to 4 and stands above them."""
    return LAYER[name.partition(".")[0]] if name else 4.5


def fault(name: str, target: str) -> str | None:
    """Why module `name` may not import module `target`, or None if it may."""
    if name == SIDE:
        return None
    if target == SIDE:
        return None if name.startswith("bench") else "is imported by tests and benches only"
    if layer(target) > layer(name):
        return "stands in a higher layer"
    in_attention = target.partition(".")[0] == "attention"
    if name.startswith(f"{KERNELS}.") and in_attention and target not in BELOW_KERNELS:
        return "stands beside or above the kernels"
    if name == "cache" and in_attention:
        return "is attention: kernels take the cache's tensors, the cache knows no kernel"
    return None


@pytest.mark.parametrize("name", [n for n in MODULES if n != SIDE], ids=lambda n: n or "dma_attn")
def test_module_has_a_layer_and_imports_point_down(name: str) -> None:
    top = name.partition(".")[0]
    assert not top or top in LAYER, f"give dma_attn.{top} a layer in this test"
    faults = {
        target: reason
        for target in imported_modules(name, MODULES[name])
        if (reason := fault(name, target))
    }
    assert not faults


def test_layer_rules_catch_a_wrong_import() -> None:
    assert fault("quant.api", "attention.api")
    assert fault("attention.kernels.hopper", "attention.kernels.portable")
    assert fault("attention.kernels.portable", "attention.api")
    assert fault("formats", "")
    assert fault("cache", "attention.ops")
    assert fault("attention.api", SIDE)
    assert not fault("attention.kernels.portable", "attention.kernels.tiles")
    assert not fault("attention.kernels.portable", "attention.prepare")
    assert not fault("attention.kernels.portable", "quant.kernels")
    assert not fault("cli", "")


def test_import_walk_resolves_relative_and_nested_imports(tmp_path: Path) -> None:
    source = tmp_path / "reference.py"
    source.write_text(
        "from ..config import DMAConfig\nfrom . import tensor\nimport torch\n"
        "def f():\n    from dma_attn.formats import FORMATS\n    import dma_attn\n"
    )
    found = imported_modules("quant.reference", source)
    assert found == {"config", "quant.tensor", "formats", ""}


def run(code: str, *flags: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ATTEND = """
import torch, dma_attn
q, k, v = torch.randn(3, 1, 2, 40, 32, generator=torch.Generator().manual_seed(0)).unbind(0)
out = dma_attn.dma_attention(q, k, v, is_causal=True)
if not (out.shape == q.shape and out.isfinite().all() and torch.equal(out[:, :, 0], v[:, :, 0])):
    raise SystemExit("wrong attention output")
if dma_attn.quantize(k, "nvfp4").dequantize().shape != k.shape:
    raise SystemExit("wrong quantised shape")
"""

HIDE_TRITON = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""


def test_import_is_quick_and_loads_no_optional_package() -> None:
    code = f"""
import sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import dma_attn
seconds = time.perf_counter() - start
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
assert not loaded & set({LAZY!r}), sorted(loaded)
assert "triton" not in sys.modules and "transformers" not in sys.modules
print(seconds)
"""
    # the first run may still have to compile the bytecode
    assert min(float(run(code)) for _ in range(2)) < 1.5


EXPLICIT_TRITON = """
try:
    dma_attn.dma_attention(q, k, v, impl="triton")
except (RuntimeError, ValueError, NotImplementedError) as error:
    if "triton" not in str(error).lower():
        raise SystemExit(f"the message does not name triton: {error}")
else:
    raise SystemExit("an explicit impl='triton' fell back silently")
"""


def test_case_111_works_without_triton_and_without_a_driver() -> None:
    run(HIDE_TRITON + ATTEND + EXPLICIT_TRITON, CUDA_VISIBLE_DEVICES="")


def test_case_17_works_and_checks_its_arguments_under_python_o() -> None:
    code = """
q = torch.zeros(1, 3, 4, 32)
bad = {
    "heads": lambda: dma_attn.dma_attention(q, q[:, :2], q[:, :2]),
    "window": lambda: dma_attn.dma_attention(q, q, q, is_causal=True, window_size=0),
    "layout": lambda: dma_attn.dma_attention(q, q, q, tensor_layout="BSHD"),
    "format": lambda: dma_attn.quantize(q, "mxfp7"),
    "config": lambda: dma_attn.DMAConfig(diag=100),
}
for name, call in bad.items():
    try:
        call()
    except ValueError as error:
        if not str(error):
            raise SystemExit(f"{name}: no message")
    else:
        raise SystemExit(f"{name}: accepted")
"""
    run(ATTEND + code, "-O", CUDA_VISIBLE_DEVICES="")
