"""A trained network, back from a checkpoint."""

import os
from pathlib import Path

from torch import nn

from h5feed.train.checkpoint import load_checkpoint
from h5feed.train.models import Network, build_model

__all__ = ["load_trained"]


def load_trained(path: str | os.PathLike[str]) -> nn.Module:
    """Return the network of best.pt or last.pt, on the CPU and in eval mode.

    It takes pictures as the file has them (uint8 or float 0 to 255, (B, 3, H, W)) and normalizes
    them itself. Its weights are the averaged ones where the run kept an average. Raises
    UsageError when `path` is no checkpoint.
    """
    state = load_checkpoint(Path(path))
    facts = state["progress"]
    model = build_model(facts["model"], facts["num_outputs"])
    for name in facts["dropped_biases"]:
        model.get_submodule(name).register_parameter("bias", None)
    # Copies: torch refuses to load a saved buffer into its own memory under other strides.
    mean, std = (state["net"][name].flatten().clone() for name in ("mean", "std"))
    net = Network(model, mean, std)
    net.load_state_dict({**state["net"], **state.get("ema", {})})
    return net.eval()
