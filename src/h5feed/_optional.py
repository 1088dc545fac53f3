"""Optional libraries: imported where they are used, missed in one sentence."""

import importlib
from typing import Any

__all__ = ["require"]


def require(module: str, extra: str) -> Any:
    """Import and return `module`, or raise an ImportError that says what to install."""
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except RuntimeError as ex:  # torchvision from PyPI beside a torch for CPUs, for one
        raise ImportError(
            f"{top} is installed and cannot be imported ({ex}): install the build of it that was "
            "made for this torch"
        ) from ex
    except ImportError as ex:
        raise ImportError(
            f'{top} is not installed, and this needs it: pip install "h5feed[{extra}]"'
        ) from ex
