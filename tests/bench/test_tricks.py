from dataclasses import asdict
from pathlib import Path

import pytest

from h5feed.bench import tricks
from h5feed.bench.tricks import CHECKPOINTING, TRICKS, plain, synthetic, usable
from train.helpers import make_config

IMAGES = Path("folder")


@pytest.fixture(autouse=True)
def torchvision_is_there(monkeypatch):
    monkeypatch.setattr(tricks, "imagefolder_class", lambda: object)


def flat(config):
    values = {}
    for name, value in asdict(config).items():
        values.update(value if isinstance(value, dict) else {name: value})
    return values


def changed(before, after):
    pairs = flat(before), flat(after)
    return {name: pairs[1][name] for name in pairs[0] if pairs[0][name] != pairs[1][name]}


def test_the_plain_loop_has_no_trick(tmp_path):
    values = flat(plain(make_config(tmp_path, precision="bf16", compile="default"), IMAGES))
    expected = {
        "loader": "imagefolder",
        "workers": 0,
        "pin_memory": False,
        "persistent_workers": False,
        "augment_on": "cpu",
        "drop_biases": False,
        "grad_checkpointing": False,
        "implementation": "for-loop",
        "set_to_none": True,  # torch's own defaults are no trick
        "precision": "torch",
        "channels_last": False,
        "compile": "off",
        "cudnn_benchmark": False,
        "log_every": 1,
    }
    assert {name: values[name] for name in expected} == expected


def test_without_a_folder_the_plain_loop_reads_the_packed_file(tmp_path):
    assert plain(make_config(tmp_path), None).data.loader == "dataloader"


def test_without_torchvision_h5loader_is_all_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(tricks, "imagefolder_class", lambda: None)
    config = make_config(tmp_path)
    assert plain(config, IMAGES).data.loader == "h5loader"
    names, left_out = usable(config, IMAGES)
    assert {"packed file", "H5Loader"}.isdisjoint(trick.name for trick in names)
    assert "H5Loader: needs torchvision beside it, which is not to be had" in left_out


@pytest.mark.parametrize(
    ("name", "switched"),
    [
        ("workers, prefetch", {"workers": -1, "persistent_workers": True}),
        ("pinned memory", {"pin_memory": True}),
        ("packed file", {"loader": "dataloader"}),
        ("crop on the GPU", {"augment_on": "device"}),
        ("images on the GPU", {"residency": "auto"}),
        ("cuDNN autotuner", {"cudnn_benchmark": True}),
        ("TF32", {"precision": "tf32"}),
        ("AMP, bf16", {"precision": "bf16"}),
        ("channels_last", {"channels_last": True}),
        ("no useless biases", {"drop_biases": True}),
        ("fused optimizer", {"implementation": "fused"}),
        ("loss read seldom", {"log_every": 20}),
        ("torch.compile", {"compile": "default"}),
    ],
)
def test_each_trick_is_one_switch(tmp_path, name, switched):
    base = plain(make_config(tmp_path), IMAGES)
    trick = next(trick for trick in TRICKS if trick.name == name)
    assert changed(base, trick.apply(base)) == switched


def test_what_torch_does_by_default_can_only_be_undone(tmp_path):
    base = plain(make_config(tmp_path), IMAGES)
    trick = next(trick for trick in TRICKS if trick.name == "gradients to None")
    assert trick.apply(base) == base
    assert changed(base, trick.undo(base)) == {"set_to_none": False}


def test_h5loader_comes_after_packing(tmp_path):
    trick = next(trick for trick in TRICKS if trick.name == "H5Loader")
    folder, packed = (plain(make_config(tmp_path), images) for images in (IMAGES, None))
    assert trick.apply(folder) == folder
    assert changed(packed, trick.apply(packed)) == {"loader": "h5loader"}


def test_checkpointing_is_not_among_the_speed_ups():
    assert CHECKPOINTING not in TRICKS


def test_synthetic_data_is_the_same_for_all_ways_of_loading(tmp_path):
    base = plain(make_config(tmp_path), None)
    loading = [t for t in TRICKS if t.name in ("workers, prefetch", "H5Loader", "pinned memory")]
    assert {synthetic(trick.apply(base)) for trick in loading} == {synthetic(base)}
    assert synthetic(base).data.loader == "synthetic"


def test_what_means_nothing_here_is_said(tmp_path):
    names, left_out = usable(make_config(tmp_path, device="cpu", model="resnet9-small"), None)
    assert [trick.name for trick in names][:2] == ["workers, prefetch", "H5Loader"]
    assert "TF32: needs a GPU" in left_out
    assert "packed file: needs --images DIR, the folder that TRAIN was packed from" in left_out
    assert "no useless biases: resnet9-small has no bias before a batch norm" in left_out


def test_published_figures_name_hardware_and_source():
    for trick in (*TRICKS, CHECKPOINTING):
        if trick.published is not None:
            assert all(asdict(trick.published).values()), trick.name
