import numpy as np
import pytest
import torch

from bench.ablations import packed_config
from h5feed import pack
from h5feed.bench.measure import Expectation, verify, warm_window
from h5feed.bench.training import (
    Synthetic,
    Trained,
    TrainerSteps,
    TrainOptions,
    break_even_epochs,
    seconds_to_pack,
    tiny,
)
from h5feed.train.config import write_config
from images import jpeg_bytes, smooth
from packed import random_images, write_packed

PARAMS = {
    "model": "tiny",
    "outputs": 2,
    "device": "cpu",
    "batch_size": 4,
    "crop": 32,
    "workers": 0,
    "images": None,
}


def test_break_even():
    # 1000 images: 10 s from the folder, 2 s packed; 40 s of packing are earned back in 5 epochs.
    assert break_even_epochs(40.0, 1000, 100.0, 500.0) == pytest.approx(5.0)
    assert break_even_epochs(40.0, 1000, 100.0, 100.0) is None
    assert break_even_epochs(40.0, 1000, 100.0, 50.0) is None


def test_model_is_chosen_by_device():
    assert TrainOptions().chosen("cpu") == "tiny"
    assert TrainOptions().chosen("cuda") == "resnet18"
    assert TrainOptions(model="resnet9").chosen("cuda") == "resnet9"


def test_tiny_takes_images_of_any_usual_size():
    for size in (32, 224):
        assert tiny(7)(torch.zeros(2, 3, size, size)).shape == (2, 7)


def test_trained_subject_trains_on_what_it_hands_out(tmp_path):
    write_packed(tmp_path / "a.h5", random_images(10), labels=np.arange(10) % 2)
    inner = "h5feed.bench.subjects:SwappedIn"
    subject = Trained(PARAMS | {"inner": inner, "file": str(tmp_path / "a.h5")})
    before = [p.clone() for p in subject.trial.step.net.parameters()]
    sizes = [len(images) for images, _ in subject.epoch()]
    assert sizes == [4, 4, 2]
    after = list(subject.trial.step.net.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    subject.close()


def test_synthetic_trains_without_reading(tmp_path):
    subject = Synthetic(PARAMS | {"file": str(tmp_path / "not there")})
    batches = subject.epoch()
    before = [p.clone() for p in subject.trial.step.net.parameters()]
    assert next(batches)[0].data_ptr() == next(batches)[0].data_ptr()
    after = list(subject.trial.step.net.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("labels", [torch.tensor([-1] * 4), torch.rand(4, 3), torch.zeros(4, 8, 8)])
def test_any_labels_can_be_trained_on(labels):
    batch = torch.zeros(4, 3, 32, 32, dtype=torch.uint8), labels
    with_labels = PARAMS | {"file": "", "inner": "bench.fake_subjects:Given", "batches": [batch]}
    subject = Trained(with_labels)
    assert [len(images) for images, _ in subject.epoch()] == [4]
    assert subject.trial.step.count == 1
    subject.close()


def test_seconds_to_pack_scales_a_sample(tmp_path):
    for number in range(6):
        path = tmp_path / f"images/class{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_bytes(smooth(40, 50, seed=number)))
    for store in ("raw", "original"):
        out = tmp_path / f"{store}.h5"
        size = {} if store == "original" else {"size": "32"}
        pack(tmp_path / "images", out, store=store, num_workers=0, **size)
        assert seconds_to_pack(out, tmp_path / "images") > 0


def test_seconds_to_pack_is_unknown_for_a_manifest(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.jpg").write_bytes(jpeg_bytes(smooth(40, 50)))
    (tmp_path / "list.csv").write_text("path,label\na.jpg,0\n")
    out = tmp_path / "out.h5"
    pack(tmp_path / "images", out, manifest=tmp_path / "list.csv", size="32", num_workers=0)
    assert seconds_to_pack(out, tmp_path / "images") is None


def test_the_ceiling_has_its_pixels_as_the_model_wants_them():
    images, _ = next(Synthetic(PARAMS | {"file": ""}).epoch())
    assert images.is_contiguous(memory_format=torch.channels_last)


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
        assert one.trial.step.count == count
        shapes.append((tuple(images.shape), images.dtype, len(labels)))
    assert shapes == [((4, 3, 16, 16), torch.uint8, 4)] * 3


def test_it_is_measured_as_any_loader_is(subject):
    one = subject()
    expected = Expectation(images=12, batch_size=4, height=16, width=16)
    assert verify(one, expected, 0.0).distinct > 0.5
    window = warm_window(one, expected, seconds=0.01, settle=0.0)
    assert window.images >= 4
    assert one.trial.step.count * 4 >= window.images + window.warmup_images


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
