"""Optional libraries: imported where they are used, missed in one sentence."""

import importlib
from typing import Any

__all__ = ["require"]


def require(module: str, extra: str) -> Any:
    """Import and return `module`, or raise an ImportError that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as ex:
        top = module.partition(".")[0]
        raise ImportError(
            f'{top} is not installed, and this needs it: pip install "h5feed[{extra}]"'
        ) from ex
