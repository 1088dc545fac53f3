import random

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from h5feed import pack
from h5feed.bench import ceilings, compare, measure, subjects
from h5feed.bench.compare import CompareOptions, write_small
from h5feed.bench.subjects import PillowCrop, TensorCrop, draw_box
from h5feed.feed.files import PackedFiles
from images import jpeg_bytes, smooth

COUNT, BATCH, CROP = 20, 4, 16


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("subjects")
    for number in range(COUNT):
        path = root / f"images/class{number % 3}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg_bytes(smooth(40, 50, seed=number)))
    for store in ("raw", "yuv420", "jpeg"):
        pack(root / "images", root / f"{store}.h5", store=store, size="32", num_workers=0)
    pack(root / "images", root / "original.h5", store="original", num_workers=0)
    return root


def params(root, store):
    return {
        "file": str(root / f"{store}.h5"),
        "images": str(root / "images"),
        "workers": 1,
        "batch_size": BATCH,
        "crop": CROP,
        "device": "cpu",
    }


EXPECTED = measure.Expectation(
    images=COUNT, batch_size=BATCH, height=CROP, width=CROP, label_counts=(6, 7, 7)
)

LOADERS = [subjects.SwappedIn, subjects.ReadyMade, subjects.LoaderOnCpu]


@pytest.mark.parametrize("store", ["raw", "yuv420", "jpeg", "original"])
@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_deliver_what_they_are_asked_for(root, kind, store):
    subject = kind(params(root, store))
    check = measure.verify(subject, EXPECTED, 0.01)
    assert check.images >= COUNT
    assert check.epochs >= 1
    subject.close()


@pytest.mark.parametrize("kind", [subjects.Folder, subjects.UsualH5py, subjects.LoaderOnDevice])
def test_others_deliver_it_too(root, kind):
    subject = kind(params(root, "raw"))
    assert measure.verify(subject, EXPECTED, 0.01).epochs >= 1
    subject.close()


def test_dali_delivers_it_too(root):
    pytest.importorskip("nvidia.dali")
    subject = subjects.LoaderByDali(params(root, "raw"))
    assert measure.verify(subject, EXPECTED, 1.0).epochs >= 1
    subject.close()


def test_folder_reads_just_the_packed_images(root):
    subject = subjects.Folder(params(root, "raw"))
    assert len(subject.files) == COUNT
    assert all(name.startswith(str(root / "images")) for name in subject.files)


def test_small_jpegs_are_the_stored_images_each_in_its_class(root, tmp_path):
    write_small(root / "raw.h5", tmp_path, 2)
    assert len(list(tmp_path.glob("*/*.jpg"))) == COUNT
    with Image.open(tmp_path / "000002/000000019.jpg") as image:
        assert image.size == (32, 32)
    made = params(root, "raw") | {"small": str(tmp_path)}
    for kind, more in (
        (subjects.FolderOfSmall, {}),
        (subjects.FolderOfTensors, {"tensors_of": "small"}),
        (subjects.FolderOfTensors, {}),
    ):
        subject = kind(made | more)
        assert measure.verify(subject, EXPECTED, 0.01).epochs >= 1
        subject.close()


def test_small_jpegs_of_a_large_set_are_evenly_spaced(root, monkeypatch):
    monkeypatch.setattr(compare, "MOST_SMALL", 5)
    assert compare.small_items(PackedFiles([root / "raw.h5"])).tolist() == [0, 4, 8, 12, 16]


def test_folders_without_torchvision_do_without_tensors(root, monkeypatch, tmp_path):
    monkeypatch.setattr(subjects, "imagefolder_class", lambda: None)
    write_small(root / "raw.h5", tmp_path, 1)
    subject = subjects.FolderOfSmall(params(root, "raw") | {"small": str(tmp_path)})
    assert measure.verify(subject, EXPECTED, 0.01).epochs >= 1
    subject.close()
    names, left_out = compare.entries(
        compare.contestants(32),
        PackedFiles([root / "raw.h5"]),
        CompareOptions(images=root / "images"),
        1,
        tmp_path / "small",
    )
    assert "folder of 32-px JPEGs" in [entry.name for entry in names]
    said = "torchvision is not installed, or was built for another torch"
    assert f"torchvision v2 on tensors: {said}" in left_out
    assert f"32-px JPEGs, v2 on tensors: {said}" in left_out


@pytest.mark.parametrize(
    ("options", "engines"),
    [
        ({}, ["auto"]),
        ({"sweep": True}, ["auto", "thread", "process"]),
        ({"only": ("H5Loader, threads",)}, ["thread"]),
    ],
)
def test_a_sweep_has_each_engine_by_itself(root, options, engines):
    entries, _ = compare.entries(
        compare.contestants(32),
        PackedFiles([root / "raw.h5"]),
        CompareOptions(**options),
        1,
        root / "small",
    )
    kinds = {
        "H5Loader": subjects.LoaderOnCpu,
        "H5Loader, threads": subjects.LoaderOfThreads,
        "H5Loader, processes": subjects.LoaderOfProcesses,
    }
    assert [kinds[one.name].engine for one in entries if one.name in kinds] == engines


def test_folder_without_torchvision_does_the_same(root, monkeypatch):
    monkeypatch.setattr(subjects, "imagefolder_class", lambda: None)
    subject = subjects.Folder(params(root, "raw"))
    assert measure.verify(subject, EXPECTED, 0.01).epochs >= 1
    subject.close()


def test_usual_h5py_is_float_between_0_and_1(root):
    images, _ = next(iter(subjects.UsualH5py(params(root, "raw")).epoch()))
    assert images.dtype == torch.float32
    assert 0 <= images.min() < images.max() <= 1


@pytest.mark.parametrize("store", ["raw", "yuv420", "jpeg", "original"])
def test_kernel_ceiling_crops_every_image(root, store):
    ceiling = ceilings.CropLoop(params(root, store))
    seen = [images.copy() for images, _ in ceiling.epoch()]
    assert [len(images) for images in seen] == [BATCH] * (COUNT // BATCH)
    means = np.concatenate(seen).mean((1, 2, 3))
    assert len(np.unique(means)) == COUNT
    assert np.concatenate(seen).std() > 10
    ceiling.close()


def test_ceilings_crop_in_the_proportions_of_the_source_as_the_loader_does(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/wide.jpg").write_bytes(jpeg_bytes(smooth(64, 256)))
    pack(tmp_path / "a", tmp_path / "wide.h5", size="64", num_workers=0)
    files = PackedFiles([tmp_path / "wide.h5"])
    boxes = np.array(ceilings.crop_boxes(files, 16, np.zeros(500, np.int64)))
    assert (boxes[:, :2] + boxes[:, 2:] <= 64).all()
    small = boxes[boxes[:, 2] < 50]
    assert len(small) > 50
    aspect = 4 * small[:, 3] / small[:, 2]
    assert 0.6 < aspect.min() < aspect.max() < 1.6


def test_region_kernel_makes_the_whole_kernels_images(root):
    made = []
    for kind in (ceilings.CropLoop, ceilings.RegionDecodeLoop):
        random.seed(0)
        ceiling = kind(params(root, "jpeg"))
        made.append(np.concatenate([images.copy() for images, _ in ceiling.epoch()]))
        ceiling.close()
    assert made[0].tobytes() == made[1].tobytes()


def test_gather_ceiling_copies_every_image_once(root):
    ceiling = ceilings.CopyLoop(params(root, "raw"))
    seen = np.concatenate([images.copy() for images, _ in ceiling.epoch()])
    whole = ceiling._packed.whole("images")
    assert sorted(map(bytes, seen)) == sorted(map(bytes, whole))
    ceiling.close()


def test_disk_rate_reads_the_file(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(bytes(9 << 20))
    rate = ceilings.disk_rate(file, seconds=5.0)
    assert rate is None or rate > 0


def test_crops_have_their_distribution():
    random.seed(0)
    boxes = np.array([draw_box(400, 400) for _ in range(4000)])
    top, left, height, width = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 400).all()
    assert (left + width <= 400).all()
    area = height * width / (400 * 400)
    assert area.min() > 0.078
    assert area.max() <= 1.0
    aspect = width / height
    assert aspect.min() > 0.72
    assert aspect.max() < 1.38
    assert abs(np.log(aspect).mean()) < 0.02


def test_a_sliver_is_cropped_in_its_middle():
    assert draw_box(10, 1000) == (0, 493, 10, 13)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tensor_crop_keeps_dtype_and_flips_half(dtype):
    random.seed(0)
    ramp = torch.arange(64).expand(3, 64, 64).to(dtype)
    out = [TensorCrop(16)(ramp) for _ in range(200)]
    assert all(o.shape == (3, 16, 16) and o.dtype == dtype for o in out)
    flipped = sum(bool(o[0, 0, 0] > o[0, 0, -1]) for o in out)
    assert 60 < flipped < 140


def test_pillow_crop_gives_a_tensor():
    from PIL import Image

    out = PillowCrop(16)(Image.fromarray(smooth(40, 50)))
    assert out.shape == (3, 16, 16)
    assert out.dtype == torch.uint8
    assert out.float().std() > 5


@pytest.mark.parametrize("store", ["raw", "jpeg"])
def test_what_python_takes_is_measured_without_kernels(root, store, monkeypatch):
    sizes, decoded = [], []
    resize, decode = cv2.resize, simplejpeg.decode_jpeg
    recorded = lambda src, size, *rest: (sizes.append(size), resize(src, size, *rest))[1]  # noqa: E731
    monkeypatch.setattr(cv2, "resize", recorded)
    monkeypatch.setattr(
        simplejpeg, "decode_jpeg", lambda *a, **k: (decoded.append(1), decode(*a, **k))[1]
    )
    file = root / f"{store}.h5"
    assert ceilings.python_seconds(file, subjects.crop_ops(40), BATCH, seconds=0) > 0
    assert sizes == [(40, 40)] * COUNT + [(1, 1)] * COUNT  # a pass with, a pass without
    assert len(decoded) == (COUNT if store == "jpeg" else 0)
    assert cv2.resize is recorded
