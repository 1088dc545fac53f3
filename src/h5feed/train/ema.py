"""A moving average of the weights, which often scores better than the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Ema"]


class Ema:
    """Exponential moving average of a model's parameters and float buffers.

    Early steps use the smaller decay (1 + step) / (10 + step), so that the average does not
    stay at the random start (as in TensorFlow's ExponentialMovingAverage). torch's own
    AveragedModel is not used: it reads a counter from the device at every step, and it needs a
    second model, compiled a second time.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        live = {name: value.detach() for name, value in named.items() if value.is_floating_point()}
        self._names = list(live)
        self._live = list(live.values())
        self._average = [value.clone() for value in self._live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights in, after optimizer step number `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._average, self._live, 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the averaged weights for as long as the block lasts."""
        trained = [value.clone() for value in self._live]
        torch._foreach_copy_(self._live, self._average)
        try:
            yield
        finally:
            torch._foreach_copy_(self._live, trained)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages, by the names that they have in the model's own state."""
        return dict(zip(self._names, self._average, strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved average; KeyError where it is of another model."""
        torch._foreach_copy_(self._average, [state[name] for name in self._names])
