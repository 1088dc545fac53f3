"""Subjects that train: each batch of a loader goes through a model before the next is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from h5feed.train.models import build_model

__all__ = ["Synthetic", "Trained", "tiny"]


def tiny(num_outputs: int) -> nn.Module:
    """Return a model for CPUs: patches of 8 × 8, two strided convolutions.

    Two cores train it at about as many images a second as one GPU a ResNet-50: so the loaders
    matter as much as they would there.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 8, stride=8),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_outputs),
    )


class _Step:
    """A training step: forward, loss, backward, SGD. Channels last; bfloat16 on a GPU."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        name, outputs = params["model"], params["outputs"]
        self.device = torch.device(params["device"])
        model = tiny(outputs) if name == "tiny" else build_model(name, outputs)
        self.model = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.outputs = outputs
        self._memory = torch.empty(0, device=self.device)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Train on one batch: (B, 3, H, W) uint8 or float in 0…1, labels (B,)."""
        with self._precision():
            outputs = self.model(self._floats(images))
        # Labels of any kind cost the same: unlabeled images and masks count as class 0.
        wanted = labels if labels.ndim == 1 and not labels.is_floating_point() else None
        target = torch.zeros(len(images), dtype=torch.int64, device=self.device)
        if wanted is not None:
            target = wanted.to(self.device, torch.int64).clamp(0, self.outputs - 1)
        loss = nn.functional.cross_entropy(outputs.float(), target)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _floats(self, images: Tensor) -> Tensor:
        """Return the batch as channels_last floats in 0…1, bytes in memory used again.

        Fresh memory would cost a CPU as much as the rest of the step: 10,000 page faults, 20 of
        35 ms, in one process and not in the next; a GPU's allocator gives the same again.
        """
        if images.dtype != torch.uint8:
            return images.contiguous(memory_format=torch.channels_last)
        if self._memory.shape != images.shape:
            self._memory = torch.empty(
                images.shape, device=self.device, memory_format=torch.channels_last
            )
        return self._memory.copy_(images).div_(255)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return nullcontext()
        return torch.autocast("cuda", torch.bfloat16)


def _inner(params: Mapping[str, Any]) -> Any:
    module, _, attribute = params["inner"].partition(":")
    return getattr(importlib.import_module(module), attribute)(params)


class Trained:
    """A loader's subject with a training step behind it."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.inner = _inner(params)
        self.step = _Step(params)
        self.dtype, self.layout = self.inner.dtype, self.inner.layout
        self.note, self.files = self.inner.note, self.inner.files

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield each batch once the model was trained on it."""
        for images, labels in self.inner.epoch():
            self.step(images, labels)
            yield images, labels

    def synchronize(self) -> None:
        """Wait for the device."""
        self.inner.synchronize()

    def close(self) -> None:
        """Close the loader."""
        self.inner.close()


class Synthetic:
    """The ceiling: the same batch again and again, already on the device."""

    dtype = "uint8"
    layout = "NCHW"
    note = "one batch, already on the device"

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.step = _Step(params)
        self.files = [params["file"]]
        shape = (params["batch_size"], 3, params["crop"], params["crop"])
        device = self.step.device
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        # As the model wants it: a ceiling that rearranged its pixels first would be none.
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, params["outputs"], shape[:1], device=device)

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Train on the batch, endlessly."""
        while True:
            self.step(self.images, self.labels)
            yield self.images, self.labels

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)

    def close(self) -> None:
        """There is nothing to close."""
