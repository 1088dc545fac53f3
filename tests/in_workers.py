"""What test workers run: importable, so that workers started by spawn can unpickle it."""

import os
import random
import signal
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from h5feed.augment import ImageOp
from h5feed.feed.dataset import H5Dataset


class OpensLate(Dataset):
    """Opens its file at the first item: with workers, after they have started."""

    def __init__(self, path, **options):
        self.path, self.options, self.opened = path, options, None

    def __len__(self):
        return len(H5Dataset(self.path))

    def __getitem__(self, index):
        if self.opened is None:
            self.opened = H5Dataset(self.path, **self.options)
        return self.opened[index]


def invert(image):
    """A transform that writes into its image."""
    return image.bitwise_not_()


def draw(image):
    """Random numbers of the three generators a transform may use."""
    return torch.tensor([torch.rand(1).item(), np.random.rand(), random.random()])


def thread_counts(image):
    return torch.tensor([cv2.getNumThreads(), torch.get_num_threads()])


def note_start(worker):
    random.seed(100 + worker)


@dataclass(frozen=True)
class Invert(ImageOp):
    """An op of one's own."""

    def on_cpu(self, row, image):
        np.subtract(255, image, out=image)


@dataclass(frozen=True)
class Fails(ImageOp):
    """An op with a mistake."""

    def on_cpu(self, row, image):
        raise KeyError("mine")


@dataclass(frozen=True)
class Kills(ImageOp):
    """An op that ends its process, as a file does that was cut short."""

    def on_cpu(self, row, image):
        os.kill(os.getpid(), signal.SIGBUS)
