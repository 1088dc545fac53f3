from dataclasses import fields, replace

import cv2
import pytest
import torch

from h5feed.augment import (
    AlternatingFlip,
    AugMix,
    AutoAugment,
    CenterCrop,
    ColorJitter,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    TrivialAugmentWide,
)
from h5feed.errors import H5FormatError, UsageError
from h5feed.train import data as data_module
from h5feed.train.config import DataConfig
from h5feed.train.data import open_data, scoring_ops, to_torchvision, training_ops
from h5feed.train.distributed import World
from h5feed.train.trainer import train
from images import smooth
from packed import write_packed
from train.files import (
    make_images,
    write_classes,
    write_folder,
    write_labels,
    write_scenes,
    write_targets,
)
from train.helpers import make_config

torch.set_num_threads(1)
CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, device=CPU)
LOADERS = ["h5loader", "dali", "dataloader", "imagefolder", "synthetic"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    return {
        "classes": write_classes(root / "classes.h5"),
        "targets": write_targets(root / "targets.h5"),
        "labels": write_labels(root / "labels.h5"),
        "scenes": write_scenes(root / "scenes.h5", void=7),
        "folder": write_folder(root / "folder"),
    }


def config_for(paths, out, loader="h5loader", kind="classes", **options):
    path = paths["folder" if loader == "imagefolder" else kind]
    if loader == "imagefolder":
        pytest.importorskip("torchvision")
        options = {"size": 16, **options}
    elif loader == "dataloader":
        pytest.importorskip("torchvision")
    elif loader == "dali":
        pytest.importorskip("nvidia.dali")
    config = make_config(out, loader=loader, workers=0, **{"crop": "none", **options})
    return replace(config, train=path, val=path)


def open_(*args, world=ALONE, **options):
    return open_data(config_for(*args, **options), world)


def resumed(epoch, skip, *args, **options):
    """The training loader at `epoch`, which another one began and left after `skip` batches."""
    made = open_(*args, **options).train_loader(16)
    made.set_epoch(epoch)
    if skip:
        iterator = iter(made)
        for _ in range(skip):
            next(iterator)
        state = made.state_dict()
        made = open_(*args, **options).train_loader(16)
        made.load_state_dict(state)
    return made


def samples(batches):
    """Every (label, sum of pixels) of some batches, sorted: which images came."""
    return sorted(
        (targets[k].tolist(), int(images[k].sum()))
        for images, targets in batches
        for k in range(len(images))
    )


@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader_keeps_the_protocol(paths, tmp_path, loader):
    data = open_(paths, tmp_path, loader)
    assert (data.task, data.num_outputs, data.size) == ("classification", 4, 16)
    made = data.train_loader(16)
    kinds = {"h5loader": "H5Loader", "dali": "DaliLoader", "synthetic": "SyntheticLoader"}
    assert type(made).__name__ == kinds.get(loader, "StockLoader")
    made.set_epoch(0)
    batches = list(made)
    assert len(batches) == len(made) == 3
    for images, targets in batches:
        assert (images.shape, images.dtype) == ((16, 3, 16, 16), torch.uint8)
        assert (targets.shape, targets.dtype) == ((16,), torch.int64)


@pytest.mark.parametrize(("workers", "threads"), [(-1, "auto"), (0, 1), (3, 3)])
def test_the_switches_reach_h5loader(paths, tmp_path, monkeypatch, workers, threads):
    made = []
    monkeypatch.setattr(data_module, "H5Loader", lambda *args, **options: made.append(options))
    switches = {
        "workers": workers,
        "prefetch": 5,
        "augment_on": "device",
        "residency": "device",
    }
    config = replace(
        make_config(tmp_path, **switches), train=paths["classes"], val=paths["classes"]
    )
    open_data(config, ALONE).train_loader(16)
    assert [options["shuffle"] for options in made] == [False, True]  # to score and to train
    for options in made:
        assert options["num_workers"] == threads
        assert options["prefetch"] == 5
        assert options["augment_on"] == options["residency"] == "device"


@pytest.mark.parametrize("loader", ["h5loader", "dali", "dataloader", "imagefolder"])
def test_images_come_once_an_epoch_and_in_another_order_in_the_next(paths, tmp_path, loader):
    images, labels = make_images()
    every = sorted(zip(labels.tolist(), images.sum((1, 2, 3)).tolist(), strict=True))
    data = open_(paths, tmp_path, loader, flip=False)
    made = data.train_loader(16)
    orders = []
    for epoch in (0, 1):
        made.set_epoch(epoch)
        batches = [(i.clone(), t.clone()) for i, t in made]
        assert samples(batches) == every
        orders.append(torch.cat([images.sum((1, 2, 3)) for images, _ in batches]).tolist())
    assert orders[0] != orders[1]
    assert samples((i.clone(), t.clone()) for i, t in data.val_loader) == every


@pytest.mark.parametrize("loader", ["h5loader", "dataloader", "imagefolder"])
def test_mean_and_deviation_are_the_pixels_own(paths, tmp_path, loader):
    images, _ = make_images()
    data = open_(paths, tmp_path, loader)
    assert data.mean == pytest.approx(images.mean((0, 1, 2)).tolist(), rel=1e-3)
    assert data.std == pytest.approx(images.std((0, 1, 2)).tolist(), rel=1e-3)


@pytest.mark.parametrize("loader", ["h5loader", "dali", "dataloader", "imagefolder"])
@pytest.mark.parametrize("crop", ["random-resized", "random-crop"])
def test_random_crops_are_a_function_of_seed_epoch_and_image(paths, tmp_path, loader, crop):
    def crops_of(seed, epoch, skip=0):
        made = resumed(epoch, skip, paths, tmp_path, loader, crop=crop, seed=seed)
        return torch.cat([images for images, _ in made])

    first = crops_of(0, 0)
    assert torch.equal(crops_of(0, 0), first)
    assert not torch.equal(crops_of(0, 1), first)
    assert not torch.equal(crops_of(1, 0), first)
    assert torch.equal(crops_of(0, 0, skip=2), first[32:])


@pytest.mark.parametrize("loader", ["h5loader", "dataloader"])
def test_worker_processes_and_threads_change_no_image(paths, tmp_path, loader):
    found = []
    for workers in (0, 2):
        config = config_for(paths, tmp_path, loader, crop="random-resized")
        config = replace(config, data=replace(config.data, workers=workers))
        made = open_data(config, ALONE).train_loader(16)
        made.set_epoch(3)
        found.append(torch.cat([images for images, _ in made]))
    assert torch.equal(*found)


@pytest.mark.parametrize("loader", ["h5loader", "dataloader"])
def test_two_processes_share_what_one_would_have(paths, tmp_path, loader):
    def batches(rank, size, accumulate=1):
        world = World(rank=rank, size=size, device=CPU)
        made = open_(paths, tmp_path, loader, world=world, accumulate=accumulate).train_loader(16)
        made.set_epoch(0)
        return [samples([(i.clone(), t.clone())]) for i, t in made]

    one = batches(0, 1)
    both = [sorted(a + b) for a, b in zip(batches(0, 2), batches(1, 2), strict=True)]
    assert both == one
    parts = batches(0, 1, accumulate=2)
    assert [sorted(a + b) for a, b in zip(parts[::2], parts[1::2], strict=True)] == one


@pytest.mark.parametrize("loader", ["h5loader", "dataloader"])
def test_scoring_shares_every_image_once_even_unevenly(tmp_path, loader):
    paths = {"classes": write_classes(tmp_path / "odd.h5", count=49)}
    shares = []
    for rank in range(3):
        world = World(rank=rank, size=3, device=CPU)
        data = open_(paths, tmp_path, loader, world=world, batch_size=15)
        shares += samples((i.clone(), t.clone()) for i, t in data.val_loader)
    images, labels = make_images(49)
    every = zip(labels.tolist(), images.sum((1, 2, 3)).tolist(), strict=True)
    assert sorted(shares) == sorted(every)


@pytest.mark.parametrize("loader", ["h5loader", "dataloader"])
def test_masks_keep_their_images_geometry(paths, tmp_path, loader):
    data = open_(paths, tmp_path, loader, "scenes", crop="random-resized", ignore_index=7)
    assert (data.task, data.num_outputs) == ("segmentation", 2)
    made = data.train_loader(16)
    made.set_epoch(0)
    agreeing, total = 0, 0
    for images, masks in made:
        assert masks.shape == (16, 16, 16)
        counted = masks != 7
        agreeing += ((images[:, 0] > 115) == (masks == 1))[counted].sum().item()
        total += counted.sum().item()
    assert agreeing / total > 0.9


def test_torchvision_crops_the_same_proportions_as_our_own_loader(tmp_path):
    true = [smooth(80, 160, seed) for seed in range(4)]
    squeezed = [cv2.resize(image, (80, 80), interpolation=cv2.INTER_AREA) for image in true]
    path = write_packed(tmp_path / "s.h5", squeezed, source_shapes=[[80, 160]] * 4)
    batches = []
    for loader in ("h5loader", "dataloader"):
        data = open_({"classes": path}, tmp_path, loader, size=70, batch_size=4, crop="auto")
        batches.append(next(iter(data.val_loader))[0].clone().float())
    assert (batches[0] - batches[1]).abs().mean() < 1


def test_targets_come_as_floats(paths, tmp_path):
    for loader in ("h5loader", "synthetic"):
        data = open_(paths, tmp_path, loader, "targets")
        assert (data.task, data.num_outputs) == ("regression", 2)
        _, targets = next(iter(data.train_loader(16)))
        assert (targets.shape, targets.dtype) == ((16, 2), torch.float32)


@pytest.mark.parametrize("loader", ["h5loader", "dali", "dataloader", "synthetic"])
def test_several_classes_an_image_are_known_by_the_file(paths, tmp_path, loader):
    data = open_(paths, tmp_path, loader, "labels")
    assert (data.task, data.num_outputs, data.classes) == ("multi-label", 2, ("bottom", "left"))
    _, targets = next(iter(data.train_loader(16)))
    assert (targets.shape, targets.dtype) == ((16, 2), torch.float32)
    assert sorted(set(targets.flatten().tolist())) == [0, 1]


def test_what_has_no_name_is_a_number_unless_it_is_asked_for(paths, tmp_path):
    unnamed = {"labels": write_labels(tmp_path / "unnamed.h5", classes=())}
    assert open_(unnamed, tmp_path, kind="labels").task == "regression"
    assert open_(unnamed, tmp_path, kind="labels", task="multi-label").task == "multi-label"
    assert open_(paths, tmp_path, kind="labels", task="regression").task == "regression"
    refuse(paths, tmp_path, r"--task multi-label needs 0 or 1 .*targets\.h5 has other numbers",
           kind="targets", task="multi-label")  # fmt: skip
    refuse(paths, tmp_path, r"--task multi-label needs 0 or 1 .*, and .*classes\.h5 has one class",
           task="multi-label")  # fmt: skip
    refuse(paths, tmp_path, r"--task classification needs a class per .*, and .* has any number",
           kind="labels", task="classification")  # fmt: skip
    refuse(paths, tmp_path, r"--num-outputs 3: .*labels\.h5 has 2 targets an image",
           kind="labels", num_outputs=3)  # fmt: skip
    other = write_labels(tmp_path / "other.h5", classes=("left", "bottom"))
    refuse(paths, tmp_path, r"other\.h5 and .*labels\.h5 number the same classes in another order",
           kind="labels", val=other)  # fmt: skip


def test_the_synthetic_batch_is_one_and_the_same_object(paths, tmp_path):
    data = open_(paths, tmp_path, "synthetic", "scenes", ignore_index=7)
    first, second, _ = data.train_loader(16)
    assert first is second
    assert first[1].shape == (16, 16, 16)
    assert first[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("loader", ["h5loader", "dataloader", "imagefolder"])
def test_training_learns_through_every_loader(paths, tmp_path, loader):
    config = config_for(paths, tmp_path, loader, flip=False, epochs=6)
    assert train(config).val["accuracy"] > 0.9


def test_sizes(tmp_path, paths):
    assert open_(paths, tmp_path).size == 16
    assert open_(paths, tmp_path, size=8).size == 8
    large = {"classes": write_classes(tmp_path / "large.h5", count=16, size=256)}
    data = open_(large, tmp_path, crop="auto", batch_size=8)
    assert data.size == 224
    assert next(iter(data.train_loader(96)))[0].shape == (8, 3, 96, 96)
    assert next(iter(data.val_loader))[0].shape == (8, 3, 224, 224)


@pytest.mark.parametrize("loader", ["h5loader", "imagefolder"])
def test_outputs_may_be_more_than_the_classes(paths, tmp_path, loader):
    assert open_(paths, tmp_path, loader, num_outputs=10).num_outputs == 10


@pytest.mark.parametrize("loader", LOADERS)
def test_outputs_fewer_than_the_classes_are_refused(paths, tmp_path, loader):
    with pytest.raises(UsageError) as caught:
        open_(paths, tmp_path, loader, num_outputs=3)
    path = paths["folder" if loader == "imagefolder" else "classes"]
    assert str(caught.value) == (
        f"--num-outputs 3 is too small: {path} has class numbers up to 3, which need 4; leave it "
        "out to take the file's"
    )


def test_outputs_are_held_against_what_is_in_the_file(paths, tmp_path):
    refuse(paths, tmp_path, "--num-outputs 1 is too small: .* has class numbers up to 1, which",
           kind="scenes", num_outputs=1, ignore_index=7)  # fmt: skip
    for wrong in (1, 3):
        refuse(paths, tmp_path, rf"--num-outputs {wrong}: .* has 2 targets an image, each of",
               kind="targets", num_outputs=wrong)  # fmt: skip
    more_names = {"classes": write_classes(tmp_path / "m.h5", classes=tuple("abcdefg"))}
    assert open_(more_names, tmp_path, num_outputs=4).num_outputs == 4
    val = write_classes(tmp_path / "v.h5", classes=())
    unnamed = {"classes": write_classes(tmp_path / "n.h5", count=3, classes=())}
    refuse(unnamed, tmp_path, r"v\.h5 has class numbers up to 3", val=val, num_outputs=3)
    config = config_for(paths, tmp_path, task="my_tasks:make", num_outputs=1)
    assert open_data(config, ALONE).num_outputs == 1


def refuse(paths, tmp_path, match, *, val=None, error=UsageError, world=ALONE, **options):
    config = config_for(paths, tmp_path, **options)
    if val is not None:
        config = replace(config, val=val)
    with pytest.raises(error, match=match):
        open_data(config, world)


def test_a_class_mismatch_names_the_classes(tmp_path, paths):
    val = write_classes(tmp_path / "v.h5", classes=("bottom left", "cow", "top left", "top right"))
    text = r"--val .*v\.h5 and .*classes\.h5 have not the same classes; in one of them only: " \
        r"bottom right, cow\. Pack both"  # fmt: skip
    refuse(paths, tmp_path, text, val=val)


def test_missing_columns_are_one_sentence_each(tmp_path, paths):
    unlabelled = {"classes": write_classes(tmp_path / "u.h5", unlabelled=5)}
    refuse(unlabelled, tmp_path, r"u\.h5 has 5 of 48 images without a class \(label -1\): pack a")
    refuse(paths, tmp_path, r"--task segmentation needs masks, and .*classes\.h5 has none: pack",
           task="segmentation")  # fmt: skip
    refuse(paths, tmp_path, r"--task regression needs a column of targets, and .* has classes",
           task="regression")  # fmt: skip
    refuse(paths, tmp_path, r"--task classification needs a class per image, and .* has numbers",
           kind="targets", task="classification")  # fmt: skip
    refuse(paths, tmp_path, "--loader imagefolder has classes only, not --task regression",
           loader="imagefolder", task="regression")  # fmt: skip


def test_a_set_of_another_kind_to_score_on_is_refused(tmp_path, paths):
    other = write_targets(tmp_path / "three.h5", columns=3)
    refuse(paths, tmp_path, r"three\.h5 has 3 targets an image, and .*targets\.h5 has 2",
           kind="targets", val=other)  # fmt: skip
    scenes = write_scenes(tmp_path / "more.h5", classes=3)
    refuse(paths, tmp_path, r"more\.h5 has 3 classes, and .*scenes\.h5 has 2: score on",
           kind="scenes", val=scenes, ignore_index=7)  # fmt: skip
    refuse(paths, tmp_path, r"--task regression needs a column of targets, and .*classes\.h5",
           kind="targets", val=paths["classes"], task="regression")  # fmt: skip


def test_files_that_are_none_and_batches_that_do_not_split(tmp_path, paths):
    (tmp_path / "no.h5").write_bytes(b"nothing")
    refuse(paths, tmp_path, r"no\.h5", val=tmp_path / "no.h5", error=H5FormatError)
    refuse(paths, tmp_path, r"gone\.h5", val=tmp_path / "gone.h5", error=FileNotFoundError)
    refuse(paths, tmp_path, r"cannot take .*gone: ", loader="imagefolder", val=tmp_path / "gone")
    refuse(paths, tmp_path, "--batch-size 16 cannot be shared by 3 processes in --accumulate 2 eq",
           accumulate=2, world=World(rank=0, size=3, device=CPU))  # fmt: skip


@pytest.mark.parametrize("loader", LOADERS)
def test_no_loader_is_made_that_would_have_no_batch(tmp_path, paths, loader):
    """What goes through epochs without end would wait for one for ever."""
    data = open_(paths, tmp_path, loader, batch_size=64)
    with pytest.raises(UsageError, match=r"--batch-size 64 is more than the 48 images of "):
        data.train_loader(16)


def test_a_batch_larger_than_the_set_is_one_sentence(tmp_path, paths):
    config = config_for(paths, tmp_path / "run", batch_size=64)
    with pytest.raises(UsageError) as caught:
        train(config)
    assert str(caught.value) == (
        f"--batch-size 64 is more than the 48 images of {paths['classes']}: take 48 or fewer"
    )
    config = config_for(paths, tmp_path / "run", batch_size=65, accumulate=5)
    with pytest.raises(UsageError, match=r"--batch-size 65 .*: take 45 or fewer"):
        train(config)
    few = {"classes": write_classes(tmp_path / "few.h5", count=4)}
    config = config_for(few, tmp_path / "run", batch_size=5, accumulate=5)
    with pytest.raises(UsageError, match=r"the 4 images of .*: it takes 5 for a batch at least"):
        train(config)


FLIP = RandomHorizontalFlip()


@pytest.mark.parametrize(
    ("crop", "size", "stored", "dense", "expected"),
    [
        ("auto", 32, (32, 32), False, [RandomCrop(32, padding=4), FLIP]),
        ("auto", 24, (32, 32), False, [Resize((24, 24)), RandomCrop(24, padding=3), FLIP]),
        ("auto", 224, (256, 256), False, [RandomResizedCrop(224), FLIP]),
        ("auto", 224, None, False, [RandomResizedCrop(224), FLIP]),
        ("auto", 64, (64, 64), True, [RandomResizedCrop(64, scale=(0.25, 1.0)), FLIP]),
        ("random-resized", 32, (32, 32), False, [RandomResizedCrop(32), FLIP]),
        ("random-crop", 224, (224, 224), False, [RandomCrop(224, padding=28), FLIP]),
        ("none", 224, (256, 128), False, [Resize((224, 224)), FLIP]),
        ("none", 32, (32, 32), False, [FLIP]),
    ],
)
def test_training(crop, size, stored, dense, expected):
    assert training_ops(DataConfig(crop=crop), size, stored, dense=dense) == expected
    plain = training_ops(DataConfig(crop=crop, flip=False), size, stored, dense=dense)
    assert plain == expected[:-1]


@pytest.mark.parametrize("padding", [0, 2])
def test_padding_may_be_chosen(padding):
    config = DataConfig(crop="random-crop", padding=padding)
    expected = [RandomCrop(32, padding=padding), FLIP]
    assert training_ops(config, 32, (32, 32), dense=False) == expected


@pytest.mark.parametrize(
    ("crop", "size", "stored", "dense", "expected"),
    [
        ("auto", 32, (32, 32), False, []),
        ("auto", 24, (32, 32), False, [Resize((24, 24))]),
        ("auto", 224, (256, 256), False, [Resize(256), CenterCrop(224)]),
        ("random-resized", 96, None, False, [Resize(110), CenterCrop(96)]),
        ("auto", 224, (256, 256), True, [Resize((224, 224))]),
        ("none", 224, (256, 256), False, [Resize((224, 224))]),
    ],
)
def test_scoring(crop, size, stored, dense, expected):
    assert scoring_ops(DataConfig(crop=crop), size, stored, dense=dense) == expected


def test_torchvision_gets_the_same_arguments():
    pytest.importorskip("torchvision")
    ops = [
        Resize((24, 20)),
        CenterCrop(16),
        RandomCrop(16, padding=4),
        RandomResizedCrop(8, scale=(0.25, 1.0)),
        RandomHorizontalFlip(0.25),
    ]
    made = to_torchvision(ops).transforms
    assert [type(op).__name__ for op in made] == [type(op).__name__ for op in ops]
    assert made[0].size == [24, 20]
    assert made[1].size == (16, 16)
    assert (made[2].size, made[2].padding) == ((16, 16), [4, 4, 4, 4])
    assert made[3].scale == (0.25, 1.0)
    assert made[4].p == 0.25
    assert {f.name for f in fields(RandomResizedCrop)} - {"interpolation", "antialias"} == {
        "size", "scale", "ratio"
    }  # fmt: skip


def test_padding_of_masks_is_not_scored():
    pytest.importorskip("torchvision")
    from torchvision import tv_tensors

    config = DataConfig(crop="random-crop", flip=False)
    ops = training_ops(config, 32, (32, 32), dense=True, ignore_index=255)
    assert ops == [RandomCrop(32, padding=4, mask_fill=255)]
    made = to_torchvision([RandomCrop(32, padding=31, mask_fill=255)])
    scene = torch.full((3, 32, 32), 7, dtype=torch.uint8)
    image, mask = made(tv_tensors.Image(scene), tv_tensors.Mask(scene[0]))
    assert set(image.unique().tolist()) == {0, 7}
    assert torch.equal(mask == 255, image[0] == 0)
    assert training_ops(config, 32, (32, 32), dense=False, ignore_index=255) == [
        RandomCrop(32, padding=4)
    ]


def test_color_jitter_and_random_erase_come_last_and_only_where_asked_for():
    config = DataConfig(crop="none", color_jitter=0.4, random_erase=0.25)
    mean = (120.4, 110.6, 99.5)
    jitter = ColorJitter(0.4, 0.4, 0.4)
    erasing = RandomErasing(0.25, value=[120.0, 111.0, 100.0])
    assert training_ops(config, 32, (32, 32), dense=False, mean=mean) == [FLIP, jitter, erasing]
    assert scoring_ops(config, 32, (32, 32), dense=False) == []
    scenes = DataConfig(crop="none", color_jitter=0.4)
    assert training_ops(scenes, 32, (32, 32), dense=True) == [FLIP, jitter]
    with pytest.raises(UsageError, match=r"--random-erase 0\.25 would paint over what masks still"):
        training_ops(config, 32, (32, 32), dense=True)
    with pytest.raises(UsageError, match=r"--random-erase 1\.5 is too large: it is a share"):
        DataConfig(random_erase=1.5)
    with pytest.raises(UsageError, match=r"--color-jitter -1\.0 is too small"):
        DataConfig(color_jitter=-1.0)


def test_torchvision_jitters_and_erases_alike():
    pytest.importorskip("torchvision")
    config = DataConfig(crop="none", flip=False, color_jitter=0.4, random_erase=1.0)
    ops = training_ops(config, 32, (32, 32), dense=False, mean=(200.0, 0.0, 0.0))
    jitter, erasing = to_torchvision(ops).transforms
    assert (jitter.brightness, jitter.saturation, jitter.hue) == ((0.6, 1.4), (0.6, 1.4), None)
    erased = erasing(torch.full((3, 32, 32), 7, dtype=torch.uint8))
    assert [sorted(set(channel.flatten().tolist())) for channel in erased] == [
        [7, 200], [0, 7], [0, 7]
    ]  # fmt: skip


def unbalanced(path):
    images, labels = make_images(48)
    labels[:] = 0
    labels[:6] = 1
    return write_packed(path, list(images), labels=labels, classes=("many", "few"))


def test_balance_draws_each_class_as_often_and_resumes(tmp_path):
    paths = {"classes": unbalanced(tmp_path / "u.h5")}
    options = {"balance": True, "flip": False}

    def epoch(epoch, skip=0):
        return torch.cat([labels for _, labels in resumed(epoch, skip, paths, tmp_path, **options)])

    drawn = torch.cat([epoch(number) for number in range(8)])
    assert len(drawn) == 8 * 48
    assert 0.4 < drawn.float().mean() < 0.6
    assert epoch(3, skip=2).tolist() == epoch(3)[32:].tolist()
    without = open_(paths, tmp_path, flip=False).train_loader(16)
    assert torch.cat([labels for _, labels in without]).sum() == 6


def test_repeats_come_in_a_row(paths, tmp_path):
    made = open_(paths, tmp_path, aug_repeats=4, crop="random-crop").train_loader(16)
    labels = torch.cat([labels for _, labels in made])
    assert len(labels) == 48
    assert (labels.view(12, 4) == labels.view(12, 4)[:, :1]).all()


def test_sampling_that_cannot_be_is_one_sentence(paths, tmp_path):
    def refused(match, **options):
        data = open_(paths, tmp_path, **options)
        with pytest.raises(UsageError, match=match):
            data.train_loader(16)

    refused(r"--balance needs one class an image, and .*labels\.h5 is for multi-label: leave it",
            kind="labels", balance=True)  # fmt: skip
    refused("--balance needs one class an image, and .* is for regression",
            kind="targets", balance=True)  # fmt: skip
    refused("--balance needs one class an image, and .* is for segmentation",
            kind="scenes", ignore_index=7, balance=True)  # fmt: skip
    refused("--balance is for --loader h5loader, and dataloader takes each image once an epoch",
            loader="dataloader", balance=True)  # fmt: skip
    refused("--aug-repeats 3 is for --loader h5loader, and imagefolder takes each image once",
            loader="imagefolder", aug_repeats=3)  # fmt: skip
    refused(r"AlternatingFlip\(\) has no counterpart in torchvision: leave it out, or take",
            loader="dataloader", alternating_flip=True)  # fmt: skip


def test_scoring_has_a_size_of_its_own(tmp_path):
    large = {"classes": write_classes(tmp_path / "large.h5", count=16, size=256)}
    sizes = {"crop": "auto", "batch_size": 8, "size": 96, "val_size": 128}
    data = open_(large, tmp_path, **sizes, val_resize=140)
    assert next(iter(data.train_loader(data.size)))[0].shape == (8, 3, 96, 96)
    assert next(iter(data.val_loader))[0].shape == (8, 3, 128, 128)
    config = DataConfig(val_resize=140)
    expected = [Resize(140), CenterCrop(128)]
    assert scoring_ops(config, 128, (256, 256), dense=False) == expected
    assert scoring_ops(DataConfig(crop="none", val_resize=140), 128, None, dense=True) == expected
    with pytest.raises(
        UsageError, match="--val-resize 100 is less than the 128 px that are scored"
    ):
        open_(large, tmp_path, **sizes, val_resize=100)


def test_airbenchs_crops_and_flips(paths, tmp_path):
    config = DataConfig(
        crop="random-crop", padding=2, padding_mode="reflect", alternating_flip=True
    )
    ops = training_ops(config, 32, (32, 32), dense=False)
    assert ops == [RandomCrop(32, padding=2, padding_mode="reflect"), AlternatingFlip()]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ra", RandAugment(magnitude=18, mask_fill=7)),
        ("ta_wide", TrivialAugmentWide(mask_fill=7)),
        ("imagenet", AutoAugment("imagenet", mask_fill=7)),
        ("augmix", AugMix()),
    ],
)
def test_policies_by_torchvisions_names(paths, tmp_path, name, op):
    config = DataConfig(crop="none", auto_augment=name, ra_magnitude=18)
    ops = training_ops(config, 16, (16, 16), dense=True, ignore_index=7)
    assert ops == [RandomHorizontalFlip(), op]
    for loader in ("h5loader", "dataloader"):
        data = open_(paths, tmp_path, loader, auto_augment=name, batch_size=8)
        images, _ = next(iter(data.train_loader(16)))
        assert (images.shape, images.dtype) == ((8, 3, 16, 16), torch.uint8)


def test_a_policy_that_cannot_be_is_refused(paths, tmp_path):
    data = open_(paths, tmp_path, "dataloader", "scenes", ignore_index=7, auto_augment="ra")
    with pytest.raises(UsageError, match="--auto-augment ra with --loader dataloader is torchvis"):
        data.train_loader(16)
    with pytest.raises(UsageError, match="--ra-magnitude 31 is too large: 30 is the strongest"):
        DataConfig(auto_augment="ra", ra_magnitude=31)
