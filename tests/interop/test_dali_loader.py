"""DaliLoader beside H5Loader: the same samples, images, epochs, states and errors."""

import gc
import itertools
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
import torch
from torch.utils.data import DataLoader, RandomSampler

from h5feed import DamagedItemError, H5Dataset, H5Loader, UsageError, augment
from h5feed.augment.geometry import AxisOp
from h5feed.interop.dali import SUPPORTED_OPS, DaliLoader, iterator
from h5feed.jpeg import encode_jpeg
from images import jpeg_bytes, smooth
from loaders import KINDS, assert_same, by_index, write_kind
from packed import further_fields, image_spec, random_images, write_packed

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())
COUNT = 12


@pytest.fixture
def ds(tmp_path):
    return H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=COUNT))


def make(ds, batch_size=5, kind=DaliLoader, **options):
    options.setdefault("shuffle", "sampler" not in options)
    return kind(ds, batch_size, **{"augment": CROP, "with_index": True, **options})


def both(ds, batch_size=5, **options):
    """What DaliLoader and H5Loader deliver, batch by batch, of one pass."""
    loaders = [make(ds, batch_size, kind, **options) for kind in (DaliLoader, H5Loader)]
    assert len(loaders[0]) == len(loaders[1])
    return list(zip(*loaders, strict=True))


def assert_agree(made, expected):
    """Two batches are the same, up to the rounding of images."""
    images, target, indices = made
    assert torch.equal(indices, expected[2])
    assert torch.equal(target, expected[1])
    assert target.dtype == expected[1].dtype
    views, others = (part if isinstance(part, tuple) else (part,) for part in (images, expected[0]))
    for a, b in zip(views, others, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.is_contiguous(memory_format=torch.channels_last)
        difference = (a.float() - b.float()).abs()
        scale = 1 if a.dtype == torch.uint8 else 1 / 255
        assert difference.max() <= 2 * scale
        assert difference.mean() <= 0.5 * scale


def left(loader):
    """The indices of what is left of a pass, batch by batch."""
    return [indices.tolist() for _, _, indices in loader]


# Images


@pytest.mark.parametrize("kind", KINDS)
def test_every_store_and_fit_gives_the_images_of_h5loader(tmp_path, kind):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    for made, expected in both(ds, antialias=True, seed=3):
        assert_agree(made, expected)


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
@pytest.mark.parametrize("antialias", [True, False, "auto"])
def test_noise_agrees_to_the_border(tmp_path, antialias, encoding):
    images = random_images(COUNT, (48, 64))
    options = {}
    if encoding == "jpeg":
        images = [encode_jpeg(image, 95) for image in images]
        options["stored_shapes"] = np.tile(np.int32([48, 64]), (COUNT, 1))
    spec = image_spec(encoding, (48, 64))
    ds = H5Dataset(write_packed(tmp_path / "a.h5", images, spec=spec, **options))
    ops = (augment.RandomResizedCrop(20, scale=(0.3, 1)), augment.RandomVerticalFlip())
    for made, expected in both(ds, augment=ops, antialias=antialias):
        assert_agree(made, expected)


def test_images_as_they_are_stored(tmp_path):
    for kind in ("raw", "yuv420", "jpeg", "pad"):
        ds = H5Dataset(write_kind(tmp_path / f"{kind}.h5", kind))
        for made, expected in both(ds, augment=()):
            assert_agree(made, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_floats(ds, dtype):
    normalize = augment.Normalize(mean=(0.4, 0.5, 0.6), std=(1, 1, 1))
    for made, expected in both(ds, augment=(*CROP, augment.ToDtype(dtype, scale=True), normalize)):
        if dtype == torch.bfloat16:  # 8 bits: one step of it is more than the tolerance
            assert (made[0].float() - expected[0].float()).abs().max() <= 2 / 255 + 1 / 128
        else:
            assert_agree(made, expected)


def test_views_of_one_image(tmp_path):
    for kind in ("raw", "yuv420", "jpeg"):
        ds = H5Dataset(write_kind(tmp_path / f"{kind}.h5", kind))
        for made, expected in both(ds, views=2):
            assert_agree(made, expected)
            assert not torch.equal(*made[0])


def test_masks_have_their_images_geometry(tmp_path):
    rng = np.random.default_rng(0)
    masks = [rng.integers(0, 5, (32, 32, 1), np.uint8) for _ in range(COUNT)]
    ds = H5Dataset(write_packed(tmp_path / "a.h5", random_images(COUNT), masks=masks))
    ops = (augment.RandomResizedCrop((20, 24)), augment.RandomHorizontalFlip())
    for made, expected in both(ds, augment=ops):
        assert_agree(made, expected)
        assert made[1].shape[1:] == (20, 24)


def test_float_targets_target_transform_and_several_files(tmp_path):
    targets = np.random.default_rng(0).random((10, 3), np.float32)
    paths = [
        write_packed(tmp_path / name, random_images(10, seed=i), labels=targets + i, classes=())
        for i, name in enumerate(["a.h5", "b.h5"])
    ]
    for made, expected in both(H5Dataset(paths)):
        assert_agree(made, expected)
    ds = H5Dataset(write_kind(tmp_path / "c.h5", "raw"), target_transform=lambda label: label + 100)
    for made, expected in both(ds):
        assert_agree(made, expected)
        assert made[1].min() >= 100


# Order, epochs, state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False, "drop_last": True},
        {"shuffle": "block", "block": 3, "window": 2},
        {"indices": [3, 1, 7, 9]},
        {"rank": 1, "world_size": 5, "tail": "pad"},
        {"rank": 4, "world_size": 5, "tail": "drop"},
    ],
    ids=str,
)
def test_three_epochs_come_as_from_h5loader(ds, options):
    loaders = [make(ds, 2, kind, **options) for kind in (DaliLoader, H5Loader)]
    for _ in range(3):
        for made, expected in zip(*loaders, strict=True):
            assert_agree(made, expected)
        assert loaders[0].state_dict() == loaders[1].state_dict()
    for name in ("batches", "images", "skipped", "repeated"):
        assert loaders[0].stats()[name] == loaders[1].stats()[name]


def test_a_sampler_is_asked_once_a_pass(ds):
    class Counting(RandomSampler):
        asked = 0

        def __iter__(self):
            self.asked += 1
            return super().__iter__()

    sampler = Counting(ds)
    loader = make(ds, sampler=sampler)
    first, second = left(loader), left(loader)
    assert sampler.asked == 2
    assert first != second
    assert first == left(make(ds, kind=H5Loader, sampler=RandomSampler(ds)))


@pytest.mark.parametrize("elsewhere", [{}, {"batch_size": 7, "prefetch": 4}, {"kind": H5Loader}])
def test_what_was_made_ahead_is_not_lost(ds, elsewhere):
    loader = make(ds, 3, seed=4, prefetch=3)
    loader.set_epoch(2)
    expected = by_index(loader)
    loader.set_epoch(2)
    passed = iter(loader)
    assert loader.state_dict()["consumed"] == 0  # though three batches are in the making
    done = by_index([next(passed)])
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (2, 3)
    other = make(ds, **{"batch_size": 3, **elsewhere})
    other.load_state_dict(state)
    rest = by_index(other)
    assert sorted([*done, *rest]) == list(range(COUNT))
    if "kind" not in elsewhere:
        assert_same(done | rest, expected)
    other.load_state_dict(state)
    assert next(iter(other))[2].tolist() == list(rest)[: other.batch_size]


def test_after_a_break_the_next_pass_is_the_next_epoch(ds):
    expected = make(ds, 3, kind=H5Loader)
    loader = make(ds, 3)
    for stop in (1, 3, 4, 2):
        for batches, (made, other) in enumerate(zip(loader, expected, strict=False), 1):
            assert_agree(made, other)
            if batches == stop:
                break
    assert loader.state_dict()["epoch"] == expected.state_dict()["epoch"] == 3
    assert left(loader) == left(expected)


def test_one_pipeline_serves_all_passes(ds, monkeypatch):
    """Whole ones, broken off, resumed or elsewhere: building another takes a second and more."""
    made, make_pipeline = [], iterator.make_pipeline
    monkeypatch.setattr(
        iterator, "make_pipeline", lambda *args, **kw: made.append(0) or make_pipeline(*args, **kw)
    )
    loader = make(ds, 2)
    list(loader)
    next(iter(loader))
    state = loader.state_dict()
    loader.set_epoch(9)
    list(loader)
    loader.load_state_dict(state)
    assert sum(map(len, left(loader))) == COUNT - 2
    assert made == [0]


def test_two_passes_at_once(ds):
    expected = make(ds, kind=H5Loader)
    one, two = left(expected), left(expected)
    loader = make(ds)
    first = iter(loader)
    found = [next(first)[2].tolist()]
    second = iter(loader)
    found_too = [next(second)[2].tolist()]
    assert found + left(first) == one
    assert found_too + left(second) == two


def test_threads_that_share_a_pass_share_its_batches(ds):
    with make(ds, 1, with_index=True) as loader:
        for _ in range(5):
            passed = iter(loader)
            with ThreadPoolExecutor(4) as threads:
                shares = threads.map(
                    lambda _, passed=passed: [batch[-1].item() for batch in passed], range(4)
                )
            assert sorted(itertools.chain.from_iterable(shares)) == list(range(len(ds)))


def test_passes_without_batches(ds, tmp_path):
    short = make(ds, 20, drop_last=True)
    assert len(short) == 0
    assert list(short) == list(short) == []
    assert short.state_dict()["epoch"] == 2


def test_a_state_of_an_epochs_end_begins_the_next(ds):
    expected = make(ds, kind=H5Loader)
    _, second = left(expected), left(expected)
    loader = make(ds)
    loader.load_state_dict({**loader.state_dict(), "consumed": COUNT})
    assert left(loader) == second


def test_worker_processes_change_nothing(ds):
    """Two epochs, a break, and a resumed pass, by processes that know the file by its name."""
    expected = make(ds, 4, kind=H5Loader)
    with make(ds, 4, py_num_workers=2) as loader:
        for _ in range(2):
            for made, other in zip(loader, expected, strict=True):
                assert_agree(made, other)
        next(iter(loader))
        state = loader.state_dict()
        rest = left(loader)
        loader.load_state_dict(state)
        found = left(loader)
    next(iter(expected))
    expected.load_state_dict(state)
    assert found == left(expected)
    assert rest == left(expected)


# Damage


def damaged_file(path, encoding, bad=(), write=lambda data: data[: len(data) // 2]):
    """Twelve JPEG images; the bytes of those in `bad` are changed after packing."""
    data = [encode_jpeg(smooth(32, 32, seed), 95) for seed in range(COUNT)]
    size = (0, 0) if encoding == "original" else (32, 32)
    shapes = np.full((COUNT, 2), 32, np.int32)
    write_packed(path, data, spec=image_spec(encoding, size), stored_shapes=shapes)
    packed = path.read_bytes()
    for index in bad:
        spoiled = write(data[index]).ljust(len(data[index]), b"\0")
        assert packed.count(data[index]) == 1
        packed = packed.replace(data[index], spoiled)
    path.write_bytes(packed)
    return H5Dataset(path)


def zeros_within(data):
    """Damage that DALI passes over with a line on stderr."""
    middle = len(data) // 2
    return data[:middle] + bytes(40) + data[middle + 40 :]


@pytest.mark.parametrize("write", [lambda data: data[:100], zeros_within], ids=["cut", "within"])
@pytest.mark.parametrize("encoding", ["jpeg", "original"])
def test_a_damaged_item_is_named_when_its_turn_comes(tmp_path, encoding, write):
    ds = damaged_file(tmp_path / "a.h5", encoding, [7], write)
    passed = iter(make(ds, 4, shuffle=False))
    next(passed)
    with pytest.raises(DamagedItemError) as caught:
        next(passed)
    assert str(caught.value) == (
        f"{tmp_path}/a.h5: item 7 of /images (key '1/ü7.png') cannot be decoded: its bytes are not "
        'those that were packed; check-h5 lists every damaged item, and on_error="skip" goes on '
        "without them"
    )
    assert next(passed, None) is None


@pytest.mark.parametrize("encoding", ["jpeg", "original"])
def test_skip_puts_the_same_image_in_its_place_as_h5loader(tmp_path, encoding):
    ds = damaged_file(tmp_path / "a.h5", encoding, [2, 3, 11])
    loaders = [make(ds, 4, kind, on_error="skip") for kind in (DaliLoader, H5Loader)]
    for _ in range(2):
        for made, expected in zip(*loaders, strict=True):
            assert_agree(made, expected)
            assert not set(made[2].tolist()) & {2, 3, 11}
    assert loaders[0].stats()["skipped"] == loaders[1].stats()["skipped"] == 6


def test_a_batch_without_a_whole_item_is_an_error(tmp_path):
    ds = damaged_file(tmp_path / "a.h5", "jpeg", [0, 1, 2, 3])
    with pytest.raises(
        DamagedItemError, match=r"item 0 of /images.* no whole item in this batch of 4 to stand in"
    ):
        list(make(ds, 4, shuffle=False, on_error="skip"))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_only_dali_refuses_is_found_and_named(tmp_path, on_error):
    """Its bytes are those that were packed, so nothing tells before DALI's pipeline ends."""
    data = [jpeg_bytes(smooth(32, 32, seed)) for seed in range(COUNT)]
    data[6] = b"no image, and packed like that"
    shapes = np.full((COUNT, 2), 32, np.int32)
    spec = image_spec("original", (0, 0))
    ds = H5Dataset(write_packed(tmp_path / "a.h5", data, spec=spec, stored_shapes=shapes))
    loader = make(ds, 4, shuffle=False, on_error=on_error)
    if on_error == "skip":
        assert left(loader) == left(loader) == [[0, 1, 2, 3], [4, 5, 7, 7], [8, 9, 10, 11]]
        assert loader.stats()["skipped"] == 2
        return
    passed = iter(loader)
    next(passed)
    with pytest.raises(DamagedItemError, match=r"item 6 of .*: DALI's decoder refuses it"):
        next(passed)


def test_an_error_of_dali_itself_reaches_the_caller(ds, monkeypatch):
    loader = make(ds)
    passed = iter(loader)

    def fail(pipeline):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("h5feed.interop.dali.iterator.RunningPipeline.receive", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(passed)
    monkeypatch.undo()
    assert next(passed, None) is None
    assert sum(map(len, left(loader))) == COUNT


def test_ctrl_c_loses_no_batch(ds, monkeypatch):
    loader = make(ds, 3)
    passed = iter(loader)
    found = [next(passed)[2].tolist()]
    receive = type(passed._running).receive

    def interrupted(pipeline):
        receive(pipeline)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(passed._running), "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(passed)
    monkeypatch.undo()
    assert found + left(passed) == left(make(ds, 3, kind=H5Loader))


# Memory and processes


def test_what_the_caller_holds_stays(ds):
    loader = make(ds, 3)
    batches = list(loader)
    copies = [images.clone() for images, _, _ in batches]
    kept = batches[0][0][1].detach().numpy()
    first = kept.copy()
    for _ in range(3):
        list(loader)
    loader.close()
    del loader
    gc.collect()
    for (images, _, _), copy in zip(batches, copies, strict=True):
        assert torch.equal(images, copy)
    del batches, images
    gc.collect()
    assert np.array_equal(kept, first)


def test_arrays_live_until_dali_has_run(tmp_path):
    """With no_copy DALI reads them in place, prefetch batches later."""
    loader = make(H5Dataset(write_kind(tmp_path / "a.h5", "yuv420")), 2, prefetch=3)
    passed = iter(loader)
    kept = passed._running._feed._kept
    assert len(kept) == 3
    boxes = kept[0][0]
    next(passed)
    next(passed)
    assert len(kept) == 5
    assert kept[0][0] is boxes


def test_sixty_epochs_leave_nothing(tmp_path):
    path = write_kind(tmp_path / "a.h5", "jpeg", count=64, side=128)
    loader = make(H5Dataset(path), 16, augment=(augment.RandomResizedCrop(96),))
    process = psutil.Process()

    def run(epochs, stop=None):
        for _ in range(epochs):
            for step, _ in enumerate(loader):
                if step == stop:
                    break
        gc.collect()
        return process.memory_info().rss / 1e6, process.num_threads(), process.num_fds()

    run(15)
    memory, threads, files = run(5, stop=1)
    after = run(50)
    again = run(10, stop=1)
    for found in (after, again):
        assert found[0] - memory < 30  # MB; an epoch delivers 1.8
        assert found[1] <= threads
        assert found[2] <= files


def test_loaders_that_come_and_go_leave_nothing(ds):
    def counts():
        gc.collect()
        process = psutil.Process()
        return process.num_threads(), process.num_fds()

    next(iter(make(ds)))
    before = counts()
    for _ in range(5):
        loader = make(ds)
        list(loader)
        next(iter(loader))
        del loader
    assert counts() <= before


def test_a_forked_process_is_refused(ds):
    """It would wait for ever for DALI's threads."""
    loader = make(ds, 2)
    passed = iter(loader)
    next(passed)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        texts = []
        for begin in (lambda: iter(loader), lambda: next(passed)):
            try:
                begin()
            except UsageError as ex:
                texts.append(str(ex))
        del passed, loader  # must not destroy the pipeline either
        os.write(writing, repr(texts).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        texts = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    expected = (
        f"DaliLoader was made in process {os.getpid()} and is used in {pid}, forked from it: "
        "neither DALI's threads nor CUDA survive a fork; make the loader in the process that "
        "uses it, or start that process by spawn"
    )
    assert texts == repr([expected, expected])
    assert len(left(passed)) == 5


@pytest.mark.parametrize("body", ["for batch in loader: sys.exit(0)", "passed = iter(loader)"])
def test_the_interpreter_exits(ds, body):
    code = f"""
        import sys
        from h5feed import H5Dataset, augment
        from h5feed.interop.dali import DaliLoader
        loader = DaliLoader(H5Dataset(sys.argv[1]), 4, augment=(augment.RandomResizedCrop(16),))
        {body}
        """
    command = [sys.executable, "-c", textwrap.dedent(code), ds.files.paths[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# Arguments


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            augment.MixUp(num_classes=2),
            "MixUp is not supported by DaliLoader, which has crops, resizes, flips, "
            "RandomErasing, ToDtype and Normalize; leave it out, or use H5Loader",
        ),
        (
            augment.RandomErasing(value="random"),
            "RandomErasing(p=0.5, scale=(0.02, 0.33), ratio=(0.3, 3.3), value='random'): "
            'DaliLoader does not support value="random"; give a color, or use H5Loader',
        ),
    ],
)
def test_refuses_by_name_what_it_does_not_support(ds, op, message):
    ops = (*CROP, augment.ToDtype(torch.float32, scale=True), op)
    with pytest.raises(UsageError) as caught:
        make(ds, augment=ops)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            augment.RandomResizedCrop(16, interpolation="bicubic"),
            "RandomResizedCrop: interpolation='bicubic' is not supported by DaliLoader, which has "
            "'bilinear' alone; leave it out, or use H5Loader",
        ),
        (
            augment.RandomCrop(16, padding=2, padding_mode="reflect"),
            "RandomCrop: padding_mode='reflect' is not supported by DaliLoader, which has "
            "'constant' alone; leave it out, or use H5Loader",
        ),
    ],
)
def test_refuses_by_name_what_an_op_may_not_say(ds, op, message):
    with pytest.raises(UsageError) as caught:
        make(ds, augment=[op])
    assert str(caught.value) == message


def test_a_dataloader_built_of_it_is_refused_in_a_sentence(ds):
    with make(ds) as loader:
        rest = DataLoader(
            loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
        )
        with pytest.raises(UsageError, match=r"make no batches in another.* load_state_dict begi"):
            next(iter(rest))


def test_all_ops_are_either_supported_or_refused(ds):
    kinds = {value for value in vars(augment).values() if isinstance(value, type)}
    ops = {kind for kind in kinds if issubclass(kind, augment.Op)} - {augment.Op}
    supported = {kind for kind in ops if issubclass(kind, SUPPORTED_OPS)}
    assert {kind.__name__ for kind in supported} == {
        "AlternatingFlip",
        "Resize",
        "CenterCrop",
        "RandomCrop",
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "RandomVerticalFlip",
        "RandomErasing",
        "ToDtype",
        "Normalize",
    }
    for kind in ops - supported:
        choice = kind.__name__ in ("RandomApply", "RandomChoice")
        op = kind([augment.RandomInvert()]) if choice else object.__new__(kind)
        with pytest.raises(UsageError, match=f"^{kind.__name__} is not supported by DaliLoader"):
            make(ds, augment=(*CROP, op))


def test_a_crop_or_flip_of_your_own_is_supported(ds):
    """DALI is told boxes and flips, not ops."""

    class HalfTurn(AxisOp):
        def fold(self, frame, u):
            frame.flip(x=True, y=True)

    for made, expected in both(ds, augment=(*CROP, HalfTurn())):
        assert_agree(made, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"py_num_workers": -1}, "py_num_workers=-1 must be a whole number, 0 for none"),
        (
            {"py_num_workers": 2, "sampler": range(3)},
            "py_num_workers=2 processes would each ask the sampler",
        ),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"batch_size": True}, "batch_size=True must be a whole number of at least 1"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"on_error": "pass"}, "on_error='pass' is none of raise, skip"),
        ({"num_workers": -1}, "num_workers=-1 must be"),
        ({"antialias": "yes"}, "antialias='yes' must be True, False or \"auto\""),
    ],
)
def test_refuses_wrong_arguments(ds, options, message):
    with pytest.raises(UsageError) as caught:
        make(ds, **options)
    assert message in str(caught.value)


def test_refuses_impossible_places(ds):
    loader = make(ds)
    with pytest.raises(UsageError, match="state has consumed=-5, and an epoch has 12 samples"):
        loader.load_state_dict({**loader.state_dict(), "consumed": -5})
    with pytest.raises(UsageError, match="epoch=-1 must be a whole number of at least 0"):
        loader.set_epoch(-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["gpu", "cuda:1"])
def test_refuses_a_gpu_where_there_is_none(ds, device):
    with pytest.raises(UsageError, match="but this torch sees no CUDA device"):
        make(ds, device=device)


@pytest.mark.parametrize("kind", ["raw", "yuv420", "jpeg"])
def test_the_pipeline_of_a_gpu_can_be_defined(tmp_path, kind):
    """All that can be seen of it without one: DALI checks which operator takes what from where."""
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    ops = (*CROP, augment.RandomErasing(), augment.ToDtype(torch.float32, scale=True))
    loader = make(ds, augment=ops, antialias=True, views=2)
    loader._factory.device = torch.device("cuda", 0)
    assert loader.pipeline().device_id == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_same_images(tmp_path, kind):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind, count=40))
    expected = make(ds, kind=H5Loader, antialias=True)
    loader = make(ds, device="gpu", antialias=True)
    for _ in range(2):
        for made, other in zip(loader, expected, strict=True):
            assert made[0].device.type == made[1].device.type == "cuda"
            assert_agree([part.cpu() for part in made], other)


def test_further_fields_are_refused(tmp_path):
    path = write_packed(tmp_path / "a.h5", random_images(12), further=further_fields(12))
    with pytest.raises(UsageError, match=r"dataset\.target='caption': DaliLoader hands out"):
        make(H5Dataset(path, target="caption"))
