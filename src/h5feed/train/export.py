"""A trained network, back from a checkpoint, and out to other programs."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from h5feed.disk import replaced
from h5feed.errors import H5FeedError, UsageError
from h5feed.optional import require
from h5feed.train.checkpoint import disk_error, load_checkpoint
from h5feed.train.models import Network, build_model

__all__ = ["Exported", "export", "load_trained"]

_FORMATS = (".pt", ".onnx", ".pt2")


def load_trained(path: str | os.PathLike[str]) -> nn.Module:
    """Return the network of best.pt or last.pt, on the CPU and in eval mode.

    It takes images as the file has them (uint8 or float 0 to 255, (B, 3, H, W)) and normalizes
    them itself. Its weights are the averaged ones where the run kept an average. Raises
    UsageError when `path` is not a checkpoint.

    >>> from h5feed.train import TrainConfig, train
    >>> from h5feed.train.config import DebugConfig, ModelConfig
    >>> config = TrainConfig(
    ...     train=Path("photos.h5"),
    ...     epochs=1,
    ...     batch_size=6,
    ...     model=ModelConfig(model="resnet9-small"),
    ...     debug=DebugConfig(curves=False, tensorboard=False),
    ... )
    >>> summary = train(config)
    >>> net = load_trained("run/last.pt")
    >>> net(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)).shape
    torch.Size([1, 2])
    >>> export(Path("run/last.pt"), Path("weights.pt")).num_outputs
    2
    """
    return _network(load_checkpoint(Path(path), "the path"))


def _network(state: dict[str, Any]) -> Network:
    facts = state["progress"]
    model = build_model(facts["model"], facts["num_outputs"])
    for name in facts["dropped_biases"]:
        model.get_submodule(name).register_parameter("bias", None)
    # Copies: torch refuses to load a saved buffer into its own memory under other strides.
    mean, std = (state["net"][name].flatten().clone() for name in ("mean", "std"))
    net = Network(model, mean, std)
    net.load_state_dict({**state["net"], **state.get("ema", {})})
    return net.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written, and what it takes.

    See `load_trained` for how one comes about.

    >>> exported = Exported(
    ...     path=Path("weights.pt"),
    ...     model="resnet9",
    ...     num_outputs=10,
    ...     size=32,
    ...     mean=(124.0, 116.0, 104.0),
    ...     std=(58.0, 57.0, 57.0),
    ...     input="RGB images",
    ... )
    >>> exported.num_outputs
    10
    """

    path: Path
    model: str
    """As in --model."""
    num_outputs: int
    """Classes, or targets per image."""
    size: int
    """Side in pixels of the images that the network was trained on."""
    mean: tuple[float, ...]
    """Of the pixels per channel (RGB), on the scale 0 to 255."""
    std: tuple[float, ...]
    """Likewise."""
    input: str
    """What the network takes, in words."""


def export(checkpoint: Path, to: Path, *, size: int = 0) -> Exported:
    """Write the network of best.pt or last.pt for other programs; the ending of `to` says how.

    .pt: the model's state_dict under its own names, without the normalization, which its caller
    has to do. .onnx and .pt2 (ONNX, torch.export): the whole program, which takes uint8 (B, 3, S,
    S), any B, normalizes, and returns what the model returns; `size` is S, by default the run's.
    The averaged weights are taken where the run kept an average.

    Raises UsageError for another ending or a file that is not a checkpoint, ImportError if ONNX's
    libraries are missing, and H5FeedError if torch cannot trace the model or `to` cannot be
    written.

    >>> export(Path("run/best.pt"), Path("net.tflite"))
    Traceback (most recent call last):
        ...
    h5feed.errors.UsageError: --to net.tflite has an ending that nothing is known for: ...
    """
    if to.suffix not in _FORMATS:
        raise UsageError(
            f"--to {to} has an ending that nothing is known for: take {', '.join(_FORMATS)}"
        )
    if size and to.suffix == ".pt":
        raise UsageError(f"--size {size} does nothing for a state_dict: leave it out of --to {to}")
    if to.exists() and to.samefile(checkpoint):
        raise UsageError(f"--to {to} is the checkpoint itself: name another file")
    if to.suffix == ".onnx":
        require("onnxscript", "onnx")
    state = load_checkpoint(checkpoint, "the checkpoint")
    net, facts = _network(state), state["progress"]
    size = size or facts["size"]
    mean, std = net.mean.flatten().tolist(), net.std.flatten().tolist()
    takes = f"uint8 RGB images, (batch, 3, {size}, {size}); it normalizes them itself"
    if to.suffix == ".pt":
        takes = (
            f"RGB images (batch, 3, {size}, {size}) as (pixels - mean) / std, with pixels from 0 "
            f"to 255, mean {_rounded(mean)} and std {_rounded(std)}"
        )
    exported = Exported(
        path=to,
        model=facts["model"],
        num_outputs=facts["num_outputs"],
        size=size,
        mean=tuple(mean),
        std=tuple(std),
        input=takes,
    )
    try:
        with replaced(to) as file:
            if to.suffix == ".pt":
                torch.save(net.model.state_dict(), file)
            else:
                with warnings.catch_warnings():  # torch's, about parts of itself
                    warnings.simplefilter("ignore", FutureWarning)
                    _save_program(net, exported, file, onnx=to.suffix == ".onnx")
    except H5FeedError:
        raise
    except Exception as ex:  # torch.export raises errors of many kinds
        if (cause := disk_error(ex)) is not None:
            raise H5FeedError(
                f"--to {to} could not be written: {cause.strerror}. Make room, or name another file"
            ) from ex
        first = str(ex).strip().partition("\n")[0]
        raise H5FeedError(
            f"{checkpoint} could not be exported to {to}: torch cannot trace {facts['model']} "
            f"({type(ex).__name__}: {first}). --to weights.pt writes its weights alone"
        ) from ex
    return exported


def _save_program(net: Network, exported: Exported, file: Any, *, onnx: bool) -> None:
    """Trace `net` for any number of images, and write the program."""
    # Two images: torch.export takes a dimension of 1 for one that never changes.
    example = torch.zeros(2, 3, exported.size, exported.size, dtype=torch.uint8)
    batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(net, (example,), dynamic_shapes=batch)
    if not onnx:
        torch.export.save(program, file, extra_files={"h5feed.txt": exported.input})
        return
    made = torch.onnx.export(
        program, input_names=["images"], output_names=["outputs"], dynamo=True, verbose=False
    )
    assert made is not None
    made.model.metadata_props["input"] = exported.input
    file.write(made.model_proto.SerializeToString())


def _rounded(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
