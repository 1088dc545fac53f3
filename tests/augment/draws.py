import numpy as np


class FakeDraws:
    """The contract of Draws, slow and obvious: one seeded generator per (seed, index, stream)."""

    def __init__(self, indices, seed=0):
        self.indices = list(indices)
        self.seed = seed

    def uniform(self, stream, count):
        rows = [
            np.random.default_rng([self.seed, index, stream]).random(count)
            for index in self.indices
        ]
        return np.array(rows).reshape(len(rows), count)

    def batch_uniform(self, stream, count):
        return np.random.default_rng([self.seed, stream, 7]).random(count)


class Given:
    """Draws that give what a test wants: the same uniforms for every stream."""

    def __init__(self, uniforms):
        self.values = np.atleast_2d(uniforms).astype(float)

    def uniform(self, stream, count):
        return self.values[:, :count]

    def batch_uniform(self, stream, count):
        return self.values[0, :count]
