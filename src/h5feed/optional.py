"""Optional libraries: imported where they are used, missed in one sentence."""

import importlib
from typing import Any

__all__ = ["require"]


def require(module: str, extra: str) -> Any:
    """Import and return `module`, or raise an ImportError that says what to install."""
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as ex:
        if not f"{module}.".startswith(f"{ex.name}."):
            raise ImportError(
                f'{top} is installed and lacks something ({ex}): pip install "h5feed[{extra}]"'
            ) from ex
        raise ImportError(
            f'{top} is not installed, and this needs it: pip install "h5feed[{extra}]"'
        ) from ex
    except (ImportError, OSError, RuntimeError) as ex:  # torchvision for CUDA, torch for CPUs
        raise ImportError(
            f"{top} is installed and cannot be imported ({ex}): install the builds of it, and of "
            "what it imports, that were made for this torch"
        ) from ex
