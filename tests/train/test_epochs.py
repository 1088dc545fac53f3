import pytest

from h5feed.train.tricks import EpochLoaders, image_size


def sizes(start, full, epochs):
    return [image_size(start, full, epochs, epoch) for epoch in range(epochs)]


def test_sizes_grow_and_reach_the_full_one_for_the_last_quarter():
    assert sizes(128, 224, 8) == [128, 160, 160, 192, 192, 224, 224, 224]
    assert sizes(16, 32, 4) == [16, 24, 32, 32]
    assert sizes(48, 64, 4) == [48, 64, 64, 64]


@pytest.mark.parametrize(("start", "full"), [(0, 224), (224, 224)])
def test_off_or_equal_means_full_images(start, full):
    assert set(sizes(start, full, 5)) == {full}


def test_the_last_epoch_is_always_full():
    assert [sizes(128, 224, epochs)[-1] for epochs in (1, 2, 3)] == [224] * 3


class Recorded:
    def __init__(self, size):
        self.size, self.calls, self.state = size, [], None

    def __len__(self):
        return 3

    def set_epoch(self, epoch):
        self.calls.append(epoch)

    def state_dict(self):
        return {"at": len(self.calls)}

    def load_state_dict(self, state):
        self.state = state


def test_a_loader_is_made_anew_only_when_the_size_changes():
    made = []

    def make(size):
        made.append(Recorded(size))
        return made[-1]

    loaders = EpochLoaders(make, lambda epoch: 8 if epoch < 2 else 16)
    first = loaders.at(0)
    assert loaders.at(1) is first
    assert loaders.at(1) is first
    assert first.calls == [0, 1]
    assert loaders.at(2).size == 16
    assert [loader.size for loader in made] == [8, 16]
    assert loaders.state_dict() == {"epoch": 2, "loader": {"at": 1}}


def test_a_loaded_state_is_not_set_back_by_the_loop():
    loaders = EpochLoaders(Recorded, lambda epoch: 8 if epoch < 2 else 16)
    loaders.load_state_dict({"epoch": 2, "loader": {"at": 5}})
    loader = loaders.at(2)
    assert (loader.size, loader.calls, loader.state) == (16, [2], {"at": 5})
