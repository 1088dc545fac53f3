import pytest
import torch

from bench.ablations import packed_config
from h5feed.bench.ablate_subject import TrainerSteps
from h5feed.bench.measure import Expectation, verify, warm_window
from h5feed.train.config import write_config

torch.set_num_threads(1)


@pytest.fixture
def subject(tmp_path):
    made = []

    def make(final_steps=3, **options):
        config = packed_config(tmp_path, log_every=1, **options)
        path = tmp_path / f"{len(made)}.json"
        write_config(config, path)
        made.append(TrainerSteps({"config": path, "final_steps": final_steps}))
        return made[-1]

    yield make
    for one in reversed(made):  # each puts back the backend switches that it found
        one.close()


def test_each_batch_comes_after_the_step_made_with_it(subject):
    one = subject()
    shapes = []
    for count, (images, labels) in enumerate(one.epoch(), 1):
        assert one._trial.step.count == count
        shapes.append((tuple(images.shape), images.dtype, len(labels)))
    assert shapes == [((4, 3, 16, 16), torch.uint8, 4)] * 3


def test_it_is_measured_as_any_loader_is(subject):
    one = subject()
    expected = Expectation(images=12, batch_size=4, height=16, width=16)
    assert verify(one, expected, 0.0).distinct > 0.5
    window = warm_window(one, expected, seconds=0.01, settle=0.0)
    assert window.images >= 4
    assert one._trial.step.count * 4 >= window.images + window.warmup_images


def test_epochs_differ(subject):
    one = subject()
    first, second = ([labels.tolist() for _, labels in one.epoch()] for _ in range(2))
    assert first != second


def test_the_final_loss_is_of_the_same_steps_however_many_were_made(subject):
    short, long = subject(final_steps=5), subject(final_steps=5)
    next(iter(short.epoch()))
    for _ in range(3):
        list(long.epoch())
    assert long._steps == 9
    assert len(long._losses) == 5
    assert short.extra()["device_bytes"] is None
    assert len(short._losses) == 5
    assert short._losses[0] == long._losses[0]


def test_synthetic_rows_have_no_final_loss(subject):
    one = subject(final_steps=0, loader="synthetic")
    list(one.epoch())
    assert one.extra()["final_loss"] is None


def test_rows_train_on_the_same_images_from_the_same_weights(subject):
    losses = [subject(final_steps=3, implementation=kind) for kind in ("for-loop", "foreach")]
    for one in losses:
        list(one.epoch())
    plain, other = (torch.stack(one._losses) for one in losses)
    assert torch.allclose(plain, other, rtol=1e-4)
    assert plain[0] == other[0]
