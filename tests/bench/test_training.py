import numpy as np
import pytest
import torch

from h5feed import pack
from h5feed.bench.trained import Synthetic, Trained, tiny
from h5feed.bench.training import TrainOptions, break_even_epochs, seconds_to_pack
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
    before = [p.clone() for p in subject.step.model.parameters()]
    sizes = [len(images) for images, _ in subject.epoch()]
    assert sizes == [4, 4, 2]
    after = list(subject.step.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    subject.close()


def test_synthetic_trains_without_reading(tmp_path):
    subject = Synthetic(PARAMS | {"file": str(tmp_path / "not there")})
    batches = subject.epoch()
    before = [p.clone() for p in subject.step.model.parameters()]
    assert next(batches)[0].data_ptr() == next(batches)[0].data_ptr()
    after = list(subject.step.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("labels", [torch.tensor([-1] * 4), torch.rand(4, 3), torch.zeros(4, 8, 8)])
def test_any_labels_can_be_trained_on(labels):
    subject = Synthetic(PARAMS | {"file": ""})
    subject.step(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), labels)


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
