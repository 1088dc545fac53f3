"""Subjects whose speed and honesty are known beforehand; `python FILE NAME` serves one."""

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np


class Clock:
    """Stands in for the module `time`: it goes on only when a subject says so.

    On a busy machine a real batch takes as long as it likes, and no test could say what is right.
    """

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    sleep = staticmethod(time.sleep)


class Fake:
    """Delivers fresh random images; on a `clock`, each batch takes `seconds` of it."""

    dtype = "uint8"
    layout = "NHWC"
    note = "made for a test"
    files = ()

    def __init__(self, params):
        self.params = {"images": 640, "batch": 64, "size": 32} | dict(params)
        self.random = np.random.default_rng(0)
        self.clock = self.params.get("clock", Clock())
        if params.get("fail") == "open":
            raise ValueError("cannot be opened")

    def batch(self):
        size = self.params["size"]
        self.clock.now += self.params.get("seconds", 0.125)
        shape = (self.params["batch"], size, size, 3)
        return self.random.integers(0, 256, shape, dtype=np.uint8)

    def labels(self, number):
        return np.arange(self.params["batch"]) % 10

    def epoch(self):
        for number in range(self.params["images"] // self.params["batch"]):
            yield self.batch(), self.labels(number)

    def synchronize(self):
        pass

    def close(self):
        pass


class Given(Fake):
    """Hands out `batches`."""

    def epoch(self):
        return iter(self.params["batches"])


class Clocked(Fake):
    """Brings its own clock to the process that serves it."""

    def __init__(self, params):
        super().__init__(params)
        sys.modules["h5feed_bench.measure"].time = self.clock


class Slow(Fake):
    """Delivers a batch every `seconds` real seconds, or later, and keeps the times."""

    def __init__(self, params):
        super().__init__(params)
        self.times = []

    def batch(self):
        images = super().batch()
        time.sleep(self.params["seconds"])
        self.times.append(time.perf_counter())
        return images

    def rate(self, images):
        """Images per second of the last `images`, by its own times."""
        batches = images // self.params["batch"]
        return images / (self.times[-1] - self.times[-1 - batches])


class Burning(Fake):
    """Needs the processor for `burn` seconds a batch, and keeps how much it has had."""

    def __init__(self, params):
        super().__init__(params)
        self.spent = []

    def batch(self):
        until = time.process_time() + self.params["burn"]
        images = super().batch()
        while time.process_time() < until:
            pass
        self.spent.append(time.process_time())
        return images


class Repeating(Fake):
    """Makes one batch and hands it out again and again."""

    made = None

    def batch(self):
        fresh = super().batch()
        self.made = fresh if self.made is None else self.made
        return self.made


class HonestUntilTimed(Fake):
    """Behaves through its first three epochs, then repeats."""

    epochs = 0

    def epoch(self):
        self.epochs += 1
        return super().epoch()

    def batch(self):
        fresh = super().batch()
        self.made = fresh if self.epochs <= 3 else self.made
        return self.made


class Wasteful(Fake):
    """Makes a second epoch behind each one, and hands out nothing of it."""

    def epoch(self):
        yield from super().epoch()
        for _ in super().epoch():
            pass


class Short(Fake):
    """Leaves out two batches of each epoch."""

    def epoch(self):
        yield from list(super().epoch())[:-2]


class OneClass(Fake):
    """Says that all images are of one class."""

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
    return importlib.import_module("h5feed_bench.process")


if __name__ == "__main__":
    sys.modules["torch"] = None
    load_measuring().serve(globals()[sys.argv[1]])
