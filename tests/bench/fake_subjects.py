"""Subjects whose speed and honesty are known beforehand; `python FILE NAME` serves one."""

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np


class Fake:
    """Delivers fresh random pictures as fast as it can."""

    dtype = "uint8"
    layout = "NHWC"
    note = "made for a test"
    files = ()

    def __init__(self, params):
        self.params = {"pictures": 640, "batch": 64, "size": 32} | dict(params)
        self.random = np.random.default_rng(0)
        if params.get("fail") == "open":
            raise ValueError("cannot be opened")

    def batch(self):
        size = self.params["size"]
        shape = (self.params["batch"], size, size, 3)
        return self.random.integers(0, 256, shape, dtype=np.uint8)

    def labels(self, number):
        return np.arange(self.params["batch"]) % 10

    def epoch(self):
        for number in range(self.params["pictures"] // self.params["batch"]):
            yield self.batch(), self.labels(number)

    def synchronize(self):
        pass

    def close(self):
        pass


class Slow(Fake):
    """Delivers a batch every `seconds` seconds."""

    def __init__(self, params):
        super().__init__(params)
        self.times = []

    def batch(self):
        until = time.perf_counter() + self.params["seconds"]
        pictures = super().batch()
        time.sleep(max(until - time.perf_counter(), 0))
        self.times.append(time.perf_counter())
        return pictures

    def rate(self):
        """Pictures per second by its own clock: on a busy machine a sleep takes longer."""
        return self.params["batch"] / float(np.mean(np.diff(self.times)))


class Burning(Slow):
    """Needs the processor for `seconds` seconds a batch."""

    def batch(self):
        until = time.process_time() + self.params["seconds"]
        pictures = Fake.batch(self)
        while time.process_time() < until:
            pass
        return pictures


class Repeating(Fake):
    """Makes one batch and hands it out again and again."""

    def __init__(self, params):
        super().__init__(params)
        self.made = super().batch()

    def batch(self):
        return self.made


class HonestUntilTimed(Fake):
    """Behaves through its first three epochs, then repeats."""

    epochs = 0

    def epoch(self):
        self.epochs += 1
        return super().epoch()

    def batch(self):
        if self.epochs <= 3:
            self.made = super().batch()
        return self.made


class Short(Fake):
    """Leaves out two batches of each epoch."""

    def epoch(self):
        yield from list(super().epoch())[:-2]


class OneClass(Fake):
    """Says that all pictures are of one class."""

    def labels(self, number):
        return np.zeros(self.params["batch"], np.int64)


class Floats(Fake):
    """Delivers another dtype than it says."""

    def batch(self):
        return super().batch().astype(np.float32)


def load_measuring():
    """The measuring code by its path, as the rivals' adapters load it: no h5feed, no torch."""
    folder = Path(__file__).parents[2] / "src/h5feed/bench"
    spec = importlib.util.spec_from_file_location(
        "h5feed_bench", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules["h5feed_bench"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module("h5feed_bench.host")


if __name__ == "__main__":
    sys.modules["torch"] = None
    load_measuring().serve(globals()[sys.argv[1]])
