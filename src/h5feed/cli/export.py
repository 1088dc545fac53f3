"""train-h5 export: a trained network for other programs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from h5feed.cli._common import run_command
from h5feed.text import say
from h5feed.train.config import at_least
from h5feed.train.export import export

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class _ExportCommand:
    """Write a trained network for other programs, and say what it takes."""

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]
    """A run's best.pt or last.pt. Averaged weights are taken where the run kept an average."""
    to: Path
    """weights.pt: the model's plain state_dict, to be given normalized images. model.onnx (extra
    onnx) or model.pt2 (torch.export): the whole program, which takes uint8 images as they are, any
    number of them, and normalizes them itself."""
    size: int = 0
    """Side in pixels of the images that .onnx and .pt2 take; 0 takes the run's. A
    model that works on any size can be given another."""
    json: bool = False
    """Print what was written, its mean and std among it, as JSON."""

    def __post_init__(self) -> None:
        at_least(self, 0, "size")


def main(args: Sequence[str] | None = None) -> int:
    """Run train-h5 export; return its exit status."""
    return run_command(_ExportCommand, _export, prog="train-h5 export", args=args)


def _export(command: _ExportCommand) -> None:
    exported = export(command.checkpoint, command.to, size=command.size)
    if command.json:
        say(json.dumps(asdict(exported), default=str))
    else:
        say(
            f"{exported.path}: {exported.model}, {exported.num_outputs} outputs; takes "
            f"{exported.input}"
        )


if __name__ == "__main__":
    sys.exit(main())
