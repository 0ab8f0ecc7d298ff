"""Silence for the imports of others."""

from __future__ import annotations

import logging


def quiet_imports() -> None:
    """Silence what transformers' import of torchao logs, where torchao is installed.

    torchao lists compiled parts built for other machines and uses a deprecated torch call; neither
    matters here.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
