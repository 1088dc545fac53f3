import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import make_images, on_device, planar, run
from h5feed.augment import Grayscale, Normalize, ToDtype
from h5feed.errors import UsageError

v2 = pytest.importorskip("torchvision.transforms.v2")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def as_tensor(out, dtype):
    """A batch slot's memory as what it holds."""
    return torch.from_numpy(out.view(np.int16) if out.dtype == np.uint16 else out).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_floats_are_torchvisions_on_the_cpu_and_on_a_device(dtype, normalize):
    images = make_images(3, 20, 30)
    ours = [ToDtype(dtype, scale=True)] + [Normalize(MEAN, STD)] * normalize
    theirs = [v2.ToDtype(torch.float32, scale=True)] + [v2.Normalize(MEAN, STD)] * normalize
    pipeline, params, out = run(ours, images, FakeDraws(range(3)))
    want = torch.stack([v2.Compose(theirs)(planar(image)) for image in images])
    assert pipeline.out_dtype == dtype
    made = as_tensor(out, dtype)
    close = {"atol": 2e-6 if dtype == torch.float32 else 0, "rtol": 1e-6}
    rounded = want.permute(0, 2, 3, 1).to(dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(made, rounded, **close)
    else:  # one rounding: the nearest number of the type, but for ties of the last float32 bit
        torch.testing.assert_close(made, rounded, rtol=torch.finfo(dtype).eps, atol=1e-4)
        assert (made == rounded).float().mean() > 0.99
    other = on_device(pipeline, params, images)
    assert other.dtype == dtype
    torch.testing.assert_close(other, made, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_range_maps_black_and_white_to_its_ends(dtype):
    images = np.zeros((1, 4, 4, 3), np.uint8)
    images[0, 0] = 255
    pipeline, params, out = run(
        [ToDtype(dtype, scale=True), Normalize([0.5], [0.5])], images, FakeDraws([0])
    )
    made = as_tensor(out, dtype).float()
    assert made[0, 0].unique().tolist() == pytest.approx([1], abs=1e-6)
    assert made[0, 1:].unique().tolist() == pytest.approx([-1], abs=1e-6)
    assert torch.equal(on_device(pipeline, params, images).float().round(), made.round())


def test_two_normalizations_are_one_after_the_other():
    images = make_images(2, 8, 8)
    ops = [ToDtype(torch.float32, scale=True), Normalize(MEAN, STD), Normalize([0.5], [2])]
    once = run(ops[:2], images, FakeDraws(range(2)))[2]
    twice = run(ops, images, FakeDraws(range(2)))[2]
    np.testing.assert_allclose(twice, (once - 0.5) / 2, atol=1e-6)


def test_one_channel_is_normalized_by_one_number():
    images = make_images(2, 8, 8)
    gray = run([Grayscale()], images, FakeDraws(range(2)))[2]
    floats = run(
        [Grayscale(), ToDtype(torch.float32, scale=True), Normalize([0.5], [0.2])],
        images,
        FakeDraws([0, 1]),
    )[2]
    np.testing.assert_allclose(floats, (gray / 255 - 0.5) / 0.2, atol=1e-5)
    with pytest.raises(UsageError, match=r"mean=\(0.485, .*\) must have one number for each"):
        run(
            [Grayscale(), ToDtype(torch.float32, scale=True), Normalize(MEAN, STD)],
            images,
            FakeDraws([0, 1]),
        )
