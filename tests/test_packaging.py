"""Wheel and sdist: what is inside, and that the wheel works in an environment of its own."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

import dma_attn

ROOT = Path(__file__).resolve().parent.parent


class Archives(NamedTuple):
    wheel: Path
    sdist: Path


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that sees neither the checkout nor this process's Python settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON_INTERPRET"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """The sdist of this checkout, and the wheel built from that sdist."""
    pytest.importorskip("hatchling", reason="building needs the dev extra")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Archives(wheel, sdist)


def test_wheel_contents(archives: Archives) -> None:
    with zipfile.ZipFile(archives.wheel) as wheel:
        names = set(wheel.namelist())
        info = f"dma_attn-{dma_attn.__version__}.dist-info"
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert {"dma_attn/py.typed", "dma_attn/report/template.html"} <= names
    assert {name.partition("/")[0] for name in names} == {"dma_attn", info}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dma_attn").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "dma-attn = dma_attn.cli:main" in entry_points
    assert (metadata["Name"], metadata["Version"]) == ("dma-attn", dma_attn.__version__)
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"hf", "report", "cli", "dev"} <= set(metadata.get_all("Provides-Extra"))


def test_sdist_contents(archives: Archives) -> None:
    with tarfile.open(archives.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = {"LICENSE", "README.md", "pyproject.toml", "constraints.txt", "dma_attn/py.typed"}
    assert wanted <= names
    unwanted = (".git/", ".venv/", ".ci/", "dma-report/", "dist/")
    assert not [name for name in names if name.startswith(unwanted) or "__pycache__" in name]


SMOKE = """
import importlib.metadata, pathlib, sys
import torch, dma_attn
assert pathlib.Path(dma_attn.__file__).is_relative_to(sys.prefix), dma_attn.__file__
assert importlib.metadata.version("dma-attn") == dma_attn.__version__
x = torch.tensor([[0.5, -6.0, 1.0, 2.0] + [6.0] * 28])
assert dma_attn.quantize(x, "mxfp4").data[0, :2].tolist() == [0xF1, 0x42]
q = torch.zeros(1, 1, 4, 32)
out = dma_attn.dma_attention(q, q, torch.arange(4.0)[:, None].expand(1, 1, 4, 32), is_causal=True)
assert out[0, 0, :, 0].tolist() == [0.0, 0.5, 1.0, 1.5]
print(dma_attn.__version__)
"""


def test_installed_wheel_works(archives: Archives, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", archives.wheel, cwd=tmp_path)
    # The dependencies come from this environment. Only paths of a `.pth` file are added, not what
    # the `.pth` files in them name: an editable install of the checkout stays out of sight.
    (site_packages,) = home.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "shared.pth").write_text("\n".join(shared))

    assert run(python, "-c", SMOKE, cwd=tmp_path).strip() == dma_attn.__version__
    usage = run(home / "bin" / "dma-attn", "--help", cwd=tmp_path)
    assert all(command in usage for command in ("info", "demo", "generate"))
