import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, make_images, on_device, run
from h5feed.augment import (
    CenterCrop,
    ColorJitter,
    CutMix,
    GaussianBlur,
    MixUp,
    Normalize,
    Pipeline,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    ToDtype,
)
from h5feed.errors import UsageError

RANDOM = [
    RandomResizedCrop(24),
    RandomCrop(40, padding=4),
    RandomHorizontalFlip(),
    RandomVerticalFlip(),
    RandomAffine(30, (0.1, 0.1)),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    RandomGrayscale(0.5),
    GaussianBlur(3),
    RandomErasing(0.7, value=3),
]
LONG = [
    RandomResizedCrop(24),
    RandomHorizontalFlip(),
    RandomAffine(20, interpolation="bilinear"),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    GaussianBlur(3),
    Resize((20, 22)),
    ToDtype(torch.float16, scale=True),
    Normalize([0.5] * 3, [0.2] * 3),
    RandomErasing(1, value="random"),
]
N = 24


def by_op(op):
    return type(op).__name__


@pytest.mark.parametrize("op", RANDOM, ids=by_op)
def test_pixels_depend_on_seed_and_sample_not_on_batch_or_chunk(op):
    images = make_images(N, 40, 40)
    _, _, whole = run([op], images, FakeDraws(range(N)))
    assert (whole == run([op], images, FakeDraws(range(N)))[2]).all()
    order = np.random.default_rng(0).permutation(N)
    for some in np.split(order, [1, 6, 13]):
        _, _, part = run([op], images[some], FakeDraws(some))
        assert (part == whole[some]).all()
    assert (run([op], images, FakeDraws(range(N), seed=1))[2] != whole).any()


@pytest.mark.parametrize("chunk", [1, 5, N])
def test_threads_and_chunks_make_the_same_pixels(chunk):
    images = make_images(N, 40, 40)
    pipeline, params, whole = run(LONG, images, FakeDraws(range(N)))
    out = np.zeros_like(whole)

    def work(k):
        pipeline.run_cpu(params, k, list(images[k : k + chunk]), out[k : k + chunk])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(0, N, chunk)))
    assert (out.view(np.uint16) == whole.view(np.uint16)).all()


def test_a_long_pipeline_agrees_on_a_device():
    images = make_images(N, 40, 40)
    pipeline, params, out = run(LONG, images, FakeDraws(range(N)))
    made = on_device(pipeline, params, images).numpy().astype(float)
    off = np.abs(made - out) * 0.2 * 255
    # ops in a row, each within 1 level: a strong jitter may stretch that
    assert off.mean() < 0.5
    assert (off > 2.1).mean() < 1e-3


def test_parts_of_parameters_are_the_parameters_of_parts():
    images = make_images(N, 40, 40)
    pipeline, params, whole = run(LONG, images, FakeDraws(range(N)))
    part = params[7:12]
    assert len(part) == 5
    out = np.zeros_like(whole[:5])
    pipeline.run_cpu(part, 0, list(images[7:12]), out)
    assert (out.view(np.uint16) == whole[7:12].view(np.uint16)).all()


def test_the_images_given_are_never_written_to():
    images = make_images(N, 40, 40)
    for op in [*RANDOM, Resize((20, 20), antialias=True)]:
        before = images.copy()
        before.setflags(write=False)  # torch warns of such memory, and the test fails if it does
        out = run([op], before, FakeDraws(range(N)))[2]
        assert (before == images).all()
        out[...] = 0
        assert (before == images).all()


def test_two_views_are_two_draws_and_the_first_is_that_of_one_view():
    images = make_images(N, 40, 40)
    ops = [RandomResizedCrop(24), ColorJitter(0.4)]
    one = run(ops, images, FakeDraws(range(N)))[2]
    pipeline, params, first = run(ops, images, FakeDraws(range(N)), views=2)
    second = np.zeros_like(first)
    pipeline.run_cpu(params, 0, list(images), second, view=1)
    assert (first == one).all()
    assert all((a != b).any() for a, b in zip(first, second, strict=True))
    assert_close(on_device(pipeline, params, images, view=1), second)


def test_source_rows_cover_what_all_views_read_and_a_part_will_do():
    images = make_images(N, 60, 80)
    ops = [RandomResizedCrop(24, scale=(0.05, 0.3)), RandomHorizontalFlip()]
    pipeline, params, first = run(ops, images, FakeDraws(range(N)), views=2)
    second = np.zeros_like(first)
    pipeline.run_cpu(params, 0, list(images), second, view=1)
    boxes = pipeline.source_rows(params)
    assert (boxes[:, 2] * boxes[:, 3]).mean() < 0.6 * 60 * 80
    parts = [image[y : y + h, x : x + w] for image, (y, x, h, w) in zip(images, boxes, strict=True)]
    for view, want in enumerate((first, second)):
        out = np.zeros_like(want)
        make = pipeline.kernel(params, 0, N, view=view)
        for i, (top, left, _, _) in enumerate(boxes.tolist()):
            make(i, parts[i], out[i], top, left)
        assert (out == want).all()


GEOMETRY = [
    [RandomResizedCrop((24, 30)), RandomHorizontalFlip(), RandomVerticalFlip()],
    [Resize(50), CenterCrop(60), RandomCrop(44, 3)],
    [
        RandomCrop(40, 6),
        ColorJitter(0.3),
        RandomErasing(1),
        Resize((20, 20)),
        ToDtype(torch.float32, scale=True),
    ],
]


@pytest.mark.parametrize("ops", GEOMETRY, ids=[0, 1, 2])
def test_masks_follow_their_images(ops):
    """A mask of left, right and corner lies where the image's same regions lie."""
    images = np.zeros((N, 40, 40, 3), np.uint8)
    images[:, :, 20:] = 200
    images[:, :10, :10] = 100
    plain = [op for op in ops if not isinstance(op, (ColorJitter, RandomErasing, ToDtype))]
    pipeline, params, _ = run(ops, images, FakeDraws(range(N)))
    masks = np.zeros((N, *pipeline.out_shape[:2], 1), np.uint8)
    pipeline.run_mask(params, 0, list(images[..., :1]), masks)
    assert set(np.unique(masks)) == {0, 100, 200}

    class Same(FakeDraws):
        def uniform(self, stream, count):  # the op's place in the longer list
            return super().uniform(ops.index(plain[stream]), count)

    out = run(plain, images, Same(range(N)), antialias=False)[2]
    assert (np.abs(out[..., :1].astype(int) - masks) > 60).mean() < 0.06


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (RandomCrop, {"size": 40, "padding": 8, "fill": 7}),
        (RandomCrop, {"size": 60, "pad_if_needed": True}),
        (CenterCrop, {"size": 60}),
        (RandomAffine, {"degrees": 45, "translate": (0.3, 0.3), "fill": 9}),
    ],
)
def test_padding_of_masks_is_mask_fill(kind, arguments):
    ones = np.ones((N, 40, 40, 1), np.uint8)

    def masks(ops):
        pipeline, params, _ = run(ops, make_images(N, 40, 40), FakeDraws(range(N)))
        out = np.empty((N, *pipeline.out_shape[:2], 1), np.uint8)
        pipeline.run_mask(params, 0, list(ones), out)
        return out

    plain = masks([kind(**arguments)])
    assert set(np.unique(plain)) == {0, 1}
    filled = masks([kind(**arguments, mask_fill=255)])
    assert np.array_equal(filled, np.where(plain == 0, 255, 1))
    # a later op without padding of its own brings no other
    flipped = masks([kind(**arguments, mask_fill=255), RandomHorizontalFlip(1), CenterCrop(20)])
    assert set(np.unique(flipped)) <= {1, 255}
    assert (flipped == 255).any() or kind is not RandomAffine


@pytest.mark.parametrize("fill", [-1, 256, 0.5, "255", None])
def test_a_mask_fill_that_no_mask_holds_is_refused(fill):
    for kind in (RandomCrop, CenterCrop, RandomAffine):
        text = rf"^{kind.__name__}: mask_fill={fill!r} must be a whole number within 0\.\.255$"
        with pytest.raises(UsageError, match=text):
            kind(8, mask_fill=fill)


def test_masks_are_torchvisions_nearest():
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    masks = np.random.default_rng(0).integers(0, 9, (N, 40, 40, 1), dtype=np.uint8)
    pipeline, params, _ = run(
        [RandomResizedCrop((24, 60))], make_images(N, 40, 40), FakeDraws(range(N))
    )
    out = np.zeros((N, 24, 60, 1), np.uint8)
    pipeline.run_mask(params, 0, list(masks), out)
    nearest = functional.InterpolationMode.NEAREST
    for mask, made, row in zip(masks, out, params.views[0][0].tolist(), strict=True):
        tensor = torch.from_numpy(mask).permute(2, 0, 1)
        want = functional.resized_crop(tensor, *row[:4], [24, 60], nearest)
        # where a position is a whole number to the last bit, cv2 may take the pixel before it
        assert (want.permute(1, 2, 0).numpy() != made).mean() < 0.05


def test_images_of_several_sizes_between_two_ops_are_for_the_cpu():
    images = make_images(2, 40, 40)
    source = np.array([[40, 60], [60, 40]])
    ops = [Resize(40), RandomAffine(10), CenterCrop(30)]
    pipeline, params, out = run(ops, images, FakeDraws([0, 1]), source=source)
    assert out.shape == (2, 30, 30, 3)
    with pytest.raises(UsageError, match=r'augment_on="device" .* meets images of several sizes'):
        pipeline.run_device(params, torch.from_numpy(images))


def test_wrong_settings_are_one_clear_error():
    with pytest.raises(UsageError, match=r"augment=ToDtype\(.*\) is one op: give a list of ops"):
        Pipeline(ToDtype(torch.float32, scale=True))
    with pytest.raises(UsageError, match="antialias='no' must be True, False or \"auto\""):
        Pipeline([], antialias="no")
    with pytest.raises(UsageError, match="views=0 must be at least 1"):
        Pipeline([], views=0)


def test_what_a_loader_must_know():
    pipeline = Pipeline(
        [RandomResizedCrop((24, 30)), ToDtype(torch.bfloat16, scale=True), CutMix()]
    )
    assert pipeline.bind(None) == (24, 30)
    assert pipeline.out_shape == (24, 30, 3)
    assert pipeline.out_dtype == torch.bfloat16
    assert pipeline.row_dtype == np.uint16
    assert pipeline.uses_batch
    assert not Pipeline([]).uses_batch
    assert Pipeline([MixUp()]).row_dtype == np.uint8


THREADS = """
import os, numpy as np, torch
from augment.draws import FakeDraws
from augment.judge import make_images, run
from h5feed.augment import RandomResizedCrop
torch.set_num_threads(4)
before = len(os.listdir("/proc/self/task"))
run([RandomResizedCrop(100)], make_images(8, 300, 300), FakeDraws(range(8)), antialias=True)
print(before, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_antialiasing_stays_on_the_calling_thread(request):
    """torch would copy a crop with a team of threads; in each loader thread one more team."""
    path = [str(request.config.rootpath / folder) for folder in ("src", "tests")]
    code = f"import sys; sys.path[:0] = {path!r}\n{THREADS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
