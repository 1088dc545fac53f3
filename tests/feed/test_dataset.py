import copy
import gc
import inspect
import json
import operator
import pickle
import random
import re
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

from h5feed.errors import UsageError
from h5feed.feed.dataloader import make_dataloader
from h5feed.feed.dataset import H5Dataset
from h5feed.feed.facts import channel_stats
from h5feed.feed.loader import H5Loader
from mapped import is_view, maps_of
from packed import image_spec, random_images, write_packed


@pytest.fixture
def images():
    return random_images(10)


@pytest.fixture
def path(tmp_path, images):
    return write_packed(tmp_path / "a.h5", images)


def test_an_image_is_a_view_of_the_mapped_file(path, images):
    ds = H5Dataset(path)
    for i, source in enumerate(images):
        image, label = ds[i]
        assert image.dtype == torch.uint8
        assert image.shape == (3, 32, 32)
        assert image.stride() == (1, 96, 3)
        assert is_view(path, image.data_ptr(), image.nbytes)
        assert np.array_equal(image.permute(1, 2, 0).numpy(), source)
        assert label == i % 2
        assert type(label) is int


def test_an_image_brings_no_more_storage_than_its_own(path):
    image, _ = H5Dataset(path)[4]
    assert image.untyped_storage().nbytes() == 32 * 32 * 3
    assert len(pickle.dumps(image.clone())) < 2 * 32 * 32 * 3


def test_reading_items_allocates_nothing_that_stays_or_grows(tmp_path):
    ds = H5Dataset(write_packed(tmp_path / "b.h5", random_images(20, (128, 128))))
    list(ds)
    gc.collect()
    tracemalloc.start()
    for _ in range(20):
        for i in range(len(ds)):
            ds[i]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4000  # a single image has 49,152 bytes


def test_plain_h5py_reads_the_same(path):
    ds = H5Dataset(path)
    with h5py.File(path) as file:
        for i in range(len(ds)):
            assert np.array_equal(file["images"][i], ds[i][0].permute(1, 2, 0).numpy())
            assert file["labels"][i] == ds[i][1]


def test_the_whole_field_is_one_tensor_without_a_copy(path, images):
    whole = H5Dataset(path).images
    assert whole.shape == (10, 3, 32, 32)
    assert whole.is_contiguous(memory_format=torch.channels_last)
    assert is_view(path, whole.data_ptr(), whole.nbytes)
    assert np.array_equal(whole.permute(0, 2, 3, 1).numpy(), np.stack(images))


def test_where_the_field_is_not_one_tensor_it_says_so(tmp_path, path):
    with pytest.raises(UsageError, match=r"single file .*a\.h5 and 1 more has store=raw, fit=st"):
        H5Dataset([path, path]).images  # noqa: B018
    nv12 = write_packed(
        tmp_path / "y.h5", [np.zeros((12, 8), np.uint8)], spec=image_spec("yuv420", (8, 8))
    )
    with pytest.raises(UsageError, match=r"store=yuv420.*use ds"):
        H5Dataset(nv12).images  # noqa: B018


def test_indices_are_those_of_a_list(path):
    ds = H5Dataset(path)
    assert len(ds) == 10
    assert torch.equal(ds[-1][0], ds[9][0])
    assert torch.equal(ds[np.int64(3)][0], ds[torch.tensor(3)][0])
    for index in (10, -11):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 10 items"):
            ds[index]
    with pytest.raises(IndexError, match="index 10"):
        ds.__getitems__([0, 10])
    with pytest.raises(TypeError):
        ds[1.0]
    assert len(list(ds)) == 10  # iteration ends at the IndexError


def test_several_samples_come_as_a_list_announced_before_they_are_read(path):
    ds = H5Dataset(path)
    told = []
    ds.files.announce = lambda indices: told.append(list(indices))
    samples = ds.__getitems__([3, -1, 3])
    assert told == [[3, 9, 3]]
    assert [label for _, label in samples] == [1, 1, 1]
    assert torch.equal(samples[1][0], ds[9][0])


def test_torch_takes_it_apart_and_together(path, images):
    ds = H5Dataset(path)
    assert np.array_equal(Subset(ds, [8, 2])[0][0].permute(1, 2, 0), images[8])
    parts = random_split(ds, [7, 3], torch.Generator().manual_seed(0))
    assert sorted(i for part in parts for i in part.indices) == list(range(10))
    both = ConcatDataset([ds, H5Dataset(path)])
    assert len(both) == 20
    assert torch.equal(both[13][0], ds[3][0])
    (batch, labels) = next(iter(DataLoader(Subset(ds, [1, 4, 5]), batch_size=3)))
    assert batch.shape == (3, 3, 32, 32)
    assert labels.tolist() == [1, 0, 1]


def test_several_files_and_patterns(tmp_path, path, images):
    write_packed(tmp_path / "b.h5", images[:3])
    for where in ([path, tmp_path / "b.h5"], tmp_path / "*.h5", str(tmp_path / "?.h5")):
        ds = H5Dataset(where)
        assert len(ds) == 13
        assert np.array_equal(ds[12][0].permute(1, 2, 0), images[2])
        assert len(ds.samples) == len(ds.targets) == 13


def test_imagefolder_attributes(path):
    ds = H5Dataset(path)
    assert ds.classes == ["cat", "dög"]
    assert ds.class_to_idx == {"cat": 0, "dög": 1}
    assert ds.targets == [0, 1] * 5
    assert ds.samples[:2] == [("0/ü0.png", 0), ("1/ü1.png", 1)]
    assert ds.imgs is ds.samples
    assert ds.transform is None
    assert ds.target_transform is None
    assert ds.transforms is None
    assert ds.root == str(path)
    assert ds.extensions == (".png",)
    assert torch.equal(ds.loader(ds.samples[3][0]), ds[3][0])
    assert repr(ds) == (
        f"Dataset H5Dataset\n    Number of datapoints: 10\n    Root location: {path}\n"
        "    Classes: 2\n    Stored: 32x32, store=raw, fit=stretch\n"
        "    Output: tensor, aspect=stored"
    )


def test_the_arguments_stand_in_imagefolder_s_order(path):
    from torchvision.datasets import ImageFolder

    ours = list(inspect.signature(H5Dataset).parameters.values())
    theirs = list(inspect.signature(ImageFolder).parameters.values())
    for mine, its in zip(ours, theirs, strict=False):
        assert (mine.name, mine.kind) == (its.name, its.kind)
        if its.name != "loader":
            assert mine.default == its.default
    assert all(more.kind is more.KEYWORD_ONLY for more in ours[len(theirs) :])
    ds = H5Dataset(str(path), np.array, lambda label: label + 5, None, None, True)
    assert (ds[3][0].shape, ds[3][1]) == ((32, 32, 3), 6)


def test_torchvision_s_own_loaders_mean_pil_images(path):
    from torchvision.datasets.folder import default_loader

    class Folder(H5Dataset):
        def __init__(self, root, transform=None, loader=default_loader, **more):
            super().__init__(root, transform, loader=loader, **more)

        def __getitem__(self, index):
            path, target = self.samples[index]
            return self.loader(path), target, path

        def extra_repr(self):
            return "with paths"

    image, label, where = Folder(path)[3]
    assert (image.size, label, where) == ((32, 32), 1, "1/ü3.png")
    assert isinstance(Folder(path, output="numpy")[3][0], np.ndarray)
    assert repr(Folder(path)).endswith("Output: pil, aspect=source\n    with paths")


def test_samples_open_where_their_folder_is_named(tmp_path, path, images):
    for number, name in ((0, "0"), (1, "1")):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.fromarray(images[number]).save(tmp_path / "images" / name / f"ü{number}.png")
    ds = H5Dataset(path, image_root=tmp_path / "images", output="pil")
    for index in (0, 1):
        where, label = pickle.loads(pickle.dumps(ds)).samples[index]
        assert np.array_equal(np.asarray(Image.open(where)), np.asarray(ds[index][0]))
        assert np.array_equal(np.asarray(ds.loader(where)), images[index])
        assert label == index
    with pytest.raises(
        UsageError, match=r"image_root='/no/such' is not a folder: give the folder th"
    ):
        H5Dataset(path, image_root="/no/such")
    with pytest.raises(
        UsageError, match=r"loader\('0/ü0.png'\): .*a\.h5 has no image of that path"
    ):
        ds.loader("0/ü0.png")
    twice = H5Dataset([path, path])
    with pytest.raises(UsageError, match=r"some images of .* have the same path, which tells none"):
        twice.loader("0/ü0.png")


def test_transforms_takes_image_and_target_together(tmp_path, path, images):
    masks = [m[:, :, :1].copy() for m in random_images(10, seed=5)]
    masked = write_packed(tmp_path / "m.h5", images, masks=masks)
    both = H5Dataset(
        masked,
        transforms=lambda image, mask: (image.flip(-1), mask.flip(-1)),
        output="tensor",
    )
    image, mask = pickle.loads(pickle.dumps(H5Dataset(masked)))[3]
    assert torch.equal(both[3][0], image.flip(-1))
    assert torch.equal(both[3][1], mask.flip(-1))
    both.transforms = None
    assert torch.equal(both[3][0], image)

    alone = H5Dataset(path, torch.Tensor.float, str)
    assert [type(part) for part in alone.transforms(torch.zeros(1), 3)] == [torch.Tensor, str]
    assert repr(alone).splitlines()[-3:] == [
        "    StandardTransform",
        f"    Transform: {torch.Tensor.float!r}",
        "    Target transform: <class 'str'>",
    ]
    other = H5Dataset(path)
    other.transforms = alone.transforms
    assert (other.transform, other.target_transform) == (torch.Tensor.float, str)
    with pytest.raises(UsageError, match=r"dataset\.transforms=.* give it to H5Loader as augment="):
        H5Loader(H5Dataset(path, transforms=lambda image, label: (image, label)), 2)


def test_by_default_a_transform_gets_what_imagefolder_gives_it(tmp_path, path, images):
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    ds = H5Dataset(path)
    assert ds.output == "tensor"
    ds.transform = np.asarray
    assert (ds.output, ds.aspect) == ("pil", "source")
    assert np.array_equal(pickle.loads(pickle.dumps(ds))[3][0], images[3])
    ds.transform = None
    assert torch.is_tensor(ds[3][0])
    ds.target_transform = str
    assert ds.output == "tensor"
    squeezed = write_packed(tmp_path / "s.h5", images, source_shapes=[[60, 80]] * 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert H5Dataset(squeezed, lambda image: image.size)[0][0] == (42, 32)

    masks = [m[:, :, :1].copy() for m in random_images(10, seed=5)]
    masked = write_packed(tmp_path / "m.h5", images, masks=masks)
    joint = H5Dataset(masked, transforms=v2.RandomHorizontalFlip(1))
    image, mask = joint[3]
    assert (type(image), type(mask)) == (tv_tensors.Image, tv_tensors.Mask)
    assert np.array_equal(mask, masks[3][:, ::-1, 0])
    kinds = H5Dataset(masked, transforms=lambda *both: [type(one) for one in both])[3]
    assert kinds == (Image.Image, Image.Image)


def test_keys_make_a_sample_a_dict(path, images):
    ds = H5Dataset(path, keys=("pixel_values", "labels"))
    assert ds.keys == ("pixel_values", "labels")
    assert list(ds[3]) == ["pixel_values", "labels"]
    assert np.array_equal(ds[3]["pixel_values"].permute(1, 2, 0), images[3])
    assert ds[3]["labels"] == 1
    for made in (DataLoader(ds, batch_size=4), make_dataloader(ds, 4, num_workers=0)):
        batch = next(iter(made))
        assert batch["pixel_values"].shape == (4, 3, 32, 32)
        assert batch["labels"].tolist() == [0, 1, 0, 1]
    assert batch["pixel_values"].is_contiguous(memory_format=torch.channels_last)
    for wrong in ("image", ("image",), ("a", "a"), ("a", 1), 5, ("a", "b", "c")):
        text = re.escape(f"keys={wrong!r} is not two names, of image and target: give keys=(")
        with pytest.raises(UsageError, match=text):
            H5Dataset(path, keys=wrong)


def test_tv_tensors_are_told_apart_by_torchvision(tmp_path, path, images):
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    masks = [m[:, :, :1].copy() for m in random_images(10, seed=5)]
    masked = write_packed(tmp_path / "m.h5", images, masks=masks)
    image, mask = H5Dataset(masked, output="tv_tensor")[3]
    assert (type(image), image.dtype) == (tv_tensors.Image, torch.uint8)
    assert (type(mask), mask.dtype, mask.shape) == (tv_tensors.Mask, torch.int64, (32, 32))
    assert is_view(masked, image.data_ptr(), image.nbytes)
    assert np.array_equal(mask.numpy(), masks[3][:, :, 0])
    flip = v2.RandomHorizontalFlip(1)
    flipped, same = H5Dataset(masked, output="tv_tensor", transforms=flip)[3]
    assert torch.equal(flipped, image.flip(-1))
    assert torch.equal(same, mask.flip(-1))
    as_stored = H5Dataset(masked, output="tv_tensor", target_dtype=torch.uint8)
    assert (type(as_stored[3][1]), as_stored[3][1].dtype) == (tv_tensors.Mask, torch.uint8)
    assert as_stored.aspect == "source"
    image, label = H5Dataset(path, output="tv_tensor")[3]
    assert (type(image), label) == (tv_tensors.Image, 1)
    batch, _ = next(iter(make_dataloader(as_stored, 4, num_workers=0)))
    assert batch.is_contiguous(memory_format=torch.channels_last)


def test_a_transform_that_takes_other_images_is_told_the_output(path):
    from torchvision.transforms import ToTensor

    ds = H5Dataset(path, ToTensor(), output="tensor")
    text = re.escape(
        "transform=ToTensor does not take what output='tensor' gives (pic should be PIL Image or "
        "ndarray. Got <class 'torch.Tensor'>): give output=\"pil\" for PIL images, as ImageFolder "
        'gives them or "numpy" for uint8 arrays (H, W, C)'
    )
    with pytest.raises(UsageError, match=text):
        ds[0]
    assert H5Dataset(path, ToTensor())[0][0].shape == (3, 32, 32)
    failing = H5Dataset(path, transforms=lambda image, target: (image.no_such, target))
    with pytest.raises(UsageError, match=r"transforms=<lambda> does not take .*no attribute 'no_s"):
        failing[0]
    fails_later = H5Dataset(path, lambda image: image.size + 1 if ds.note else image)
    ds.note = False
    fails_later[0]
    ds.note = True
    with pytest.raises(TypeError):  # a defect of the transform's own
        fails_later[1]


MISTAKES = [
    (
        lambda p: H5Dataset(p, loader=str.lower),
        "loader=lower would never be called, for images come from the packed file: leave it out, "
        'and say by output="tensor", "pil", "numpy" or "tv_tensor" what they are',
    ),
    (
        lambda p: H5Dataset(p, is_valid_file=str.islower),
        "is_valid_file=islower cannot leave items out of a packed file: use torch.utils.data.Sub",
    ),
    (
        lambda p: H5Dataset(p, "pil"),
        "transform='pil' is not a function: give a function, or leave it",
    ),
    (
        lambda p: H5Dataset(p, None, 3),
        "target_transform=3 is not a function: give a function, or le",
    ),
    (
        lambda p: H5Dataset(p, transforms=3),
        "transforms=3 is not a function: give a function, or leave",
    ),
    (lambda p: H5Dataset(5), "root=5 is not a path: give a packed file, or a list of some"),
    (
        lambda p: H5Dataset(p, str, transforms=str),
        "transform beside transforms: give transforms alone, called on (image, target), or trans",
    ),
    (
        lambda p: setattr(H5Dataset(p, transforms=str), "transform", str),
        "transform beside transforms: give transforms alone",
    ),
    (
        lambda p: setattr(H5Dataset(p, transforms=str), "target_transform", str),
        "target_transform beside transforms: give transforms alone",
    ),
    (
        lambda p: setattr(H5Dataset(p), "loader", str),
        "loader cannot be changed, for it says how the packed file is read: make another H5Dataset",
    ),
]


@pytest.mark.parametrize(("mistake", "text"), MISTAKES)
def test_a_mistake_is_one_sentence(path, mistake, text):
    with pytest.raises(UsageError, match="^" + re.escape(text)):
        mistake(path)


def test_a_folder_is_to_be_packed_first(tmp_path):
    (tmp_path / "my photos").mkdir()
    where = str(tmp_path / "my photos")
    text = re.escape(
        f"root={where!r} is a folder: pack it with `pack-h5 '{where}' 'my photos.h5'`, and give "
        "that file"
    )
    for root in (where, tmp_path / "my photos", [where]):
        with pytest.raises(UsageError, match=text):
            H5Dataset(root)


def test_lists_are_made_at_first_use_and_not_pickled(path):
    ds = H5Dataset(path, transform=torch.Tensor.float, output="tensor")
    plain = pickle.dumps(ds)
    assert ds.targets is ds.targets
    assert ds.samples is ds.samples
    assert pickle.dumps(ds) == plain
    again = pickle.loads(plain)
    assert again[3][0].dtype == torch.float32
    assert again.samples == ds.samples


EDITS = [
    lambda ds: ds.samples.pop(),
    lambda ds: ds.samples.sort(key=str),
    lambda ds: random.shuffle(ds.imgs),
    lambda ds: ds.targets.__setitem__(0, 1),
    lambda ds: ds.targets.__setitem__(slice(None), [1] * 10),
    lambda ds: ds.targets.__delitem__(0),
    lambda ds: operator.iadd(ds.targets, [1]),
    lambda ds: operator.imul(ds.targets, 2),
    lambda ds: ds.classes.append("cow"),
    lambda ds: ds.class_to_idx.update(cat=1),
    lambda ds: ds.class_to_idx.__setitem__("cat", 1),
    lambda ds: operator.ior(ds.class_to_idx, {"cat": 1}),
    lambda ds: setattr(ds, "targets", [1] * 10),
    lambda ds: setattr(ds, "samples", ds.samples[:3]),
    lambda ds: setattr(ds, "imgs", []),
    lambda ds: setattr(ds, "classes", ["a", "b"]),
    lambda ds: setattr(ds, "class_to_idx", {}),
]


@pytest.mark.parametrize("edit", EDITS)
def test_what_would_be_ignored_is_refused(path, edit):
    ds = H5Dataset(path)
    before = [ds.classes.copy(), ds.class_to_idx.copy(), ds.targets.copy(), ds.samples.copy()]
    text = (
        r"^(classes|class_to_idx|targets|samples|imgs) cannot be edited, for ds\[i\] and loaders "
        r"read the packed file: to leave items out use torch\.utils\.data\.Subset\(ds, indices\) "
        r"or H5Loader\(ds, \.\.\., indices=\), to change labels target_transform; \1\.copy\(\) is "
    )
    with pytest.raises(UsageError, match=text):
        edit(ds)
    assert before == [ds.classes, ds.class_to_idx, ds.targets, ds.samples]


def test_the_read_only_lists_are_lists_and_their_copies_are_plain(path):
    ds = H5Dataset(path)
    assert isinstance(ds.targets, list)
    assert isinstance(ds.class_to_idx, dict)
    assert json.dumps(ds.class_to_idx) == json.dumps({"cat": 0, "dög": 1})
    assert torch.tensor(ds.targets).sum() == 5
    for held in (ds.classes, ds.targets, ds.samples, ds.class_to_idx):
        plain = dict if isinstance(held, dict) else list
        for copied in (copy.copy(held), copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
            assert type(copied) is plain
            assert copied == held
            copied.clear()


def test_labels_as_float_targets_and_none(tmp_path, images):
    targets = np.random.default_rng(0).random((10, 3), np.float32)
    ds = H5Dataset(write_packed(tmp_path / "f.h5", images, labels=targets, classes=()))
    assert ds[4][1].dtype == torch.float32
    assert torch.equal(ds[4][1], torch.from_numpy(targets[4]))
    assert np.array_equal(ds.targets, targets)
    assert ds.classes == []
    ds[4][1].zero_()
    with pytest.raises(ValueError, match="read-only"):
        ds.targets[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        ds.samples[0][1][:] = 0
    assert torch.equal(ds[4][1], torch.from_numpy(targets[4]))

    flat = H5Dataset(write_packed(tmp_path / "n.h5", images, labels=np.full(10, -1), classes=()))
    assert flat[0][1] == -1
    assert flat.targets == [-1] * 10


def test_masks_come_in_the_label_s_place(tmp_path, images):
    masks = [m[:, :, :1].copy() for m in random_images(10, seed=5)]
    path = write_packed(tmp_path / "m.h5", images, masks=masks)
    image, mask = H5Dataset(path)[3]
    assert mask.dtype == torch.uint8
    assert mask.shape == (32, 32)
    assert is_view(path, mask.data_ptr(), mask.nbytes)
    assert np.array_equal(mask.numpy(), masks[3][:, :, 0])
    assert np.array_equal(image.permute(1, 2, 0), images[3])
    assert np.array_equal(H5Dataset(path, output="numpy")[3][1], masks[3][:, :, 0])
    drawn = H5Dataset(path, output="pil")[3][1]
    assert drawn.mode == "L"
    assert np.array_equal(np.asarray(drawn), masks[3][:, :, 0])


def test_target_dtype_is_what_labels_and_masks_come_as(tmp_path, images):
    masks = [m[:, :, :1].copy() for m in random_images(10, seed=5)]
    path = write_packed(tmp_path / "m.h5", images, masks=masks)
    seen = []
    ds = H5Dataset(path, target_dtype=torch.int64, target_transform=lambda m: seen.append(m) or m)
    mask = ds[3][1]
    assert seen[0] is mask
    assert mask.dtype == torch.int64
    assert np.array_equal(mask.numpy(), masks[3][:, :, 0])
    assert pickle.loads(pickle.dumps(H5Dataset(path, target_dtype=torch.int64)))[3][1].equal(mask)
    array = H5Dataset(path, output="numpy", target_dtype=torch.int32)[3][1]
    assert array.dtype == np.int32
    assert np.array_equal(array, masks[3][:, :, 0])
    text = (
        r'target_dtype=torch\.\w+ is nothing that masks can be with output="\w+": leave it out, or'
    )
    for output, dtype in (("pil", torch.int64), ("numpy", torch.bfloat16)):
        with pytest.raises(UsageError, match=text):
            H5Dataset(path, output=output, target_dtype=dtype)
    with pytest.raises(
        UsageError, match=r"target_dtype='long' is not a dtype of torch: give torch"
    ):
        H5Dataset(path, target_dtype="long")

    labels = H5Dataset(write_packed(tmp_path / "l.h5", images), target_dtype=torch.float32)
    assert (labels[3][1].dtype, labels[3][1].item()) == (torch.float32, 1)
    targets = write_packed(tmp_path / "t.h5", images, labels=np.ones((10, 2), "f4"), classes=())
    assert H5Dataset(targets, target_dtype=torch.float16)[0][1].dtype == torch.float16


def test_output_numpy_is_a_read_only_view(path, images):
    image, _ = H5Dataset(path, output="numpy")[2]
    assert is_view(path, image.ctypes.data, image.nbytes)
    assert np.array_equal(image, images[2])
    with pytest.raises(ValueError, match="read-only"):
        image[0] = 0


def test_output_pil_is_a_copy(path, images):
    ds = H5Dataset(path, output="pil")
    image, _ = ds[2]
    assert isinstance(image, Image.Image)
    assert image.mode == "RGB"
    image.paste((0, 0, 0), (0, 0, 32, 32))
    assert np.array_equal(np.asarray(ds[2][0]), images[2])


def test_transforms_are_called_as_in_torchvision(path):
    ds = H5Dataset(
        path, transform=lambda image: image.size, target_transform=lambda label: label + 100
    )
    assert ds[3] == ((32, 32), 101)
    ds.transform = lambda image: "other"
    ds.target_transform = None
    assert ds[3] == ("other", 1)
    assert H5Dataset(path, output="pil", transform=lambda image: image.size)[0][0] == (32, 32)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"output": "cupy"}, "output='cupy' is not one of tensor, pil, numpy, tv_tensor"),
        ({"aspect": "true"}, "aspect='true' is not one of stored, source"),
    ],
)
def test_wrong_choices_name_the_right_ones(path, options, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        H5Dataset(path, **options)


def test_a_transform_meets_squeezed_images_only_where_that_was_said(tmp_path, images):
    sources = np.int32([[32, 32]] * 3 + [[375, 500]] * 7)
    path = write_packed(tmp_path / "s.h5", images, source_shapes=sources)
    text = re.escape(
        f"transform would see squeezed images: {path} has fit=stretch, which stores item 3 of "
        '375x500 as 32x32; give aspect="source" for images in true proportions from ds[i], or '
        'aspect="stored" for the squeezed ones as they are'
    )

    def size(image):
        return tuple(image.shape[1:])

    for output in ("tensor", "numpy"):
        with pytest.raises(UsageError, match=text):
            H5Dataset(path, transform=size, output=output)
        plain = H5Dataset(path, output=output)
        with pytest.raises(UsageError, match=text):
            pickle.loads(pickle.dumps(plain)).transform = size
        assert H5Dataset(path, transform=np.shape, output=output, aspect="stored")[3][0] != (32, 42)
    source = H5Dataset(path, transform=size, output="tensor", aspect="source")
    assert source[3][0] == (32, 42)
    asked = H5Dataset(path, transform=torch.Tensor.sum, output="tensor", aspect="stored")
    assert pickle.loads(pickle.dumps(asked))[3][0] == asked[3][0]
    assert H5Dataset(path, transform=lambda image: image.size)[3][0] == (42, 32)
    assert H5Dataset(path, output="pil", aspect="stored")[3][0].size == (32, 32)
    H5Dataset(path, target_transform=str)  # for H5Loader


def test_the_first_squeezed_image_comes_with_a_warning_where_nobody_asked(tmp_path, images):
    path = write_packed(tmp_path / "s.h5", images, source_shapes=[[60, 80]] * 10)
    for output in ("tensor", "numpy"):
        ds = H5Dataset(path, output=output)
        wrapped = Subset(ds, [4, 5])  # as random_split gives it, to be transformed outside
        text = "^" + re.escape(f"ds[i] gives squeezed images: {path} has fit=stretch, which stores")
        with pytest.warns(UserWarning, match=text):
            wrapped[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped[1], ds[0]
        with pytest.raises(UsageError, match="transform would see squeezed images"):
            ds.transform = torch.Tensor.float
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for asked in ({"aspect": "stored"}, {"aspect": "source"}, {"output": "pil"}):
            H5Dataset(path, **asked)[0]
        H5Dataset(write_packed(tmp_path / "a.h5", images))[0]
        with H5Loader(H5Dataset(path), 5, shuffle=True) as loader:
            list(loader)
        channel_stats(H5Dataset(path).files)


def test_all_images_as_one_tensor_are_squeezed_only_where_that_was_said(tmp_path, images):
    path = write_packed(tmp_path / "s.h5", images, source_shapes=[[60, 80]] * 10)
    ds = H5Dataset(path)
    text = "^" + re.escape(f"images gives squeezed images: {path} has fit=stretch, which stores")
    with pytest.warns(UserWarning, match=text) as warned:
        ds.images  # noqa: B018
    assert warned[0].filename == __file__
    for options in ({"aspect": "source"}, {"output": "pil"}):
        text = "images, which is one tensor of one size, would be squeezed images: .* from ds.i., o"
        with pytest.raises(UsageError, match=text):
            H5Dataset(path, **options).images  # noqa: B018
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ds.images.shape == H5Dataset(path, aspect="stored").images.shape
        ds[0]
        true = write_packed(tmp_path / "a.h5", images)
        assert H5Dataset(true).images.shape == H5Dataset(true, aspect="source").images.shape


def test_images_within_a_pixel_of_their_proportions_are_not_squeezed(tmp_path, images):
    path = write_packed(tmp_path / "s.h5", images, source_shapes=[[333, 334]] * 10)
    tensors = H5Dataset(path, transform=torch.Tensor.float, output="tensor")
    assert tensors[3][0].dtype == torch.float32


def test_a_subclass_keeps_its_own_attributes_through_pickle(path):
    ds = H5Dataset(path)
    ds.note = "mine"
    assert pickle.loads(pickle.dumps(ds)).note == "mine"


def test_threads_read_what_one_thread_reads(path, images):
    ds = H5Dataset(path)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: ds[i % 10][0].permute(1, 2, 0).numpy().copy(), range(500)))
    assert all(np.array_equal(image, images[i % 10]) for i, image in enumerate(got))


def test_an_image_outlives_its_dataset(path, images):
    image, _ = H5Dataset(path)[6]
    gc.collect()
    assert np.array_equal(image.permute(1, 2, 0), images[6])


def test_a_dropped_dataset_unmaps_its_file_at_once(path):
    ds = H5Dataset(path, transform=torch.Tensor.clone, output="tensor")
    ds[0]
    assert maps_of(path)
    del ds
    assert not maps_of(path)
