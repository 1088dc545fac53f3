import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from h5feed import H5Dataset, H5Loader, UsageError, augment
from h5feed.feed import loader as loader_module
from h5feed.feed.device import Copies, CudaTransfer, HostTransfer, open_transfer
from h5feed.feed.memory import Ring
from h5feed.feed.options import explain_decoding
from loaders import assert_same, by_index, write_kind

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def test_the_host_transfer_lends_the_slot_itself():
    transfer, ring = open_transfer("cpu"), Ring((4, 2), np.dtype(np.uint8), keep=1)
    assert isinstance(transfer, HostTransfer)
    assert not transfer.pinned
    slot = ring.take()
    with transfer.stream():
        rows = transfer.send(slot, 3)
        ticket = transfer.close([slot])
    transfer.receive(ticket, [rows])
    assert rows.data_ptr() == slot.rows.ctypes.data
    assert rows.shape == (3, 2)
    transfer.reclaim()
    assert ring.take() is not slot
    del rows
    assert ring.take() is slot


def test_refuses_a_device_that_is_not_there():
    with pytest.raises(UsageError, match="device='meta' is not one H5Loader sends to"):
        open_transfer("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="this torch sees no CUDA device"):
            open_transfer("cuda")


class Event:
    """A CUDA event's face: passes when told to. Nobody can wait for it on the host."""

    def __init__(self):
        self.passed = False
        self.stream = None

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.passed


class Stream:
    def __init__(self, name):
        self.name = name
        self.waited_for = []

    def wait_event(self, event):
        self.waited_for.append(event)


class FakeCuda:
    """What CudaTransfer takes of torch.cuda; which stream is current is known for each thread."""

    def __init__(self):
        self.consumers = Stream("consumer")
        self.events = []
        self._now = threading.local()

    def current_device(self):
        return 0

    def Stream(self, device):
        return Stream(f"transfer to {device}")

    def Event(self):
        self.events.append(Event())
        return self.events[-1]

    @contextmanager
    def stream(self, stream):
        self._now.stream = stream
        yield
        self._now.stream = self.consumers

    def current_stream(self, device):
        return getattr(self._now, "stream", self.consumers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_means_cuda(tmp_path):
    with pytest.raises(UsageError, match="device='gpu', but this torch sees no CUDA device"):
        H5Loader(H5Dataset(write_kind(tmp_path / "a.h5", "raw")), 4, device="gpu")


class FakeTransfer(CudaTransfer):
    """A CudaTransfer to the CPU: its copies are done at once, and known as done when told."""

    def __init__(self):
        super().__init__(torch.device("cpu"), FakeCuda())
        self.pinned = False  # there is nothing to lock pages for
        self.sent = []

    def send(self, slot, count):
        self.sent.append((slot, self._cuda.current_stream(self.device)))
        return torch.from_numpy(slot.rows[:count]).clone()


@pytest.fixture
def transfer(monkeypatch):
    made = FakeTransfer()
    monkeypatch.setattr(loader_module, "open_transfer", lambda device: made)
    return made


@pytest.mark.filterwarnings("ignore:.*are held at once")
def test_a_batch_is_sent_on_its_own_stream_and_waited_for_on_the_consumers(transfer, tmp_path):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=60))
    with H5Loader(ds, 4, shuffle=True, augment=CROP, device="cuda", augment_on="device") as loader:
        for number, _ in enumerate(loader, 1):
            waited_for = transfer._cuda.consumers.waited_for
            assert len(waited_for) == number
            assert waited_for[-1].stream is transfer._stream
    assert len(set(map(id, waited_for))) == 15
    assert {stream for _, stream in transfer.sent} == {transfer._stream}


@pytest.mark.filterwarnings("ignore:.*are held at once")
def test_a_slot_comes_back_by_event_and_not_before(transfer, tmp_path):
    """Batches go on while copies are under way: with slots of their own, and never a host wait."""
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=60))
    with H5Loader(ds, 4, shuffle=True, augment=CROP, prefetch=3, num_workers=2) as loader:
        list(loader)
        slots = [id(slot) for slot, _ in transfer.sent]
        assert len(set(slots)) == len(slots) == 15
        for event in transfer._cuda.events:
            event.passed = True
        before = len(transfer._cuda.events)
        for _ in loader:
            for event in transfer._cuda.events[before:]:
                event.passed = True
        again = {id(slot) for slot, _ in transfer.sent[15:]}
        assert len(again) <= 3 + 2 + 1


def test_batches_of_a_cuda_transfer_are_those_of_the_host(transfer, tmp_path, monkeypatch):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", "jpeg", count=30))
    options = {"augment": CROP, "with_index": True, "augment_on": "device"}
    found = by_index(H5Loader(ds, 4, shuffle=True, **options))
    assert transfer.sent
    monkeypatch.setattr(loader_module, "open_transfer", open_transfer)
    assert_same(found, by_index(H5Loader(ds, 4, shuffle=True, **options)))


def test_labels_and_indices_are_copied_from_page_locked_memory(tmp_path, monkeypatch):
    """From pageable memory a copy that is not to block waits for the device all the same."""
    builder = H5Loader(H5Dataset(write_kind(tmp_path / "a.h5", "raw")), 4, shuffle=True)._builder
    builder.transfer = SimpleNamespace(device=torch.device("meta"), pinned=True)
    locked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: locked.append(tensor) or tensor)
    labels = torch.arange(4)
    assert builder._small(labels).is_meta
    assert locked == [labels]
    assert builder._small("what a target_transform made") == "what a target_transform made"


def test_memory_of_a_batch_waits_for_the_consumers_stream():
    """All its tensors on the device, and none of those that stayed."""

    class There:
        is_cuda = True

        def record_stream(self, stream):
            self.stream = stream

    transfer, images, labels = FakeTransfer(), There(), torch.zeros(3)
    transfer.receive(Event(), [images, labels])
    assert images.stream is transfer._cuda.consumers


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raw", "nobody: store=raw is pixels"),
        ("jpeg", "loader threads: batches stay on the CPU"),
    ],
)
def test_stats_say_who_decodes(tmp_path, kind, said):
    ds = H5Dataset(write_kind(tmp_path / "a.h5", kind))
    assert H5Loader(ds, 4, shuffle=True).stats()["decoding"] == said
    there = explain_decoding(ds.files, SimpleNamespace(device=torch.device("cuda", 0)))
    assert ("DaliLoader decodes on a GPU" in there) == (kind == "jpeg")


def test_slots_of_copies_come_home_in_order_when_their_events_pass():
    copies, ring = Copies(), Ring((1,), np.dtype(np.uint8), keep=8)
    slots, events = [ring.take() for _ in range(3)], [Event() for _ in range(3)]
    for event, slot in zip(events, slots, strict=True):
        copies.add(event, [slot])
    events[1].passed = True
    copies.reclaim()
    assert ring.take() not in slots, "the first copy is still under way"
    events[0].passed = True
    copies.reclaim()
    assert {ring.take(), ring.take()} == {slots[0], slots[1]}
    assert ring.take() is not slots[2]


@pytest.mark.cuda
@needs_cuda
class TestCuda:
    @pytest.mark.parametrize("kind", ["raw", "yuv420", "jpeg"])
    @pytest.mark.parametrize("on", ["cpu", "device"])
    def test_batches_are_those_of_the_cpu(self, tmp_path, kind, on):
        ds = H5Dataset(write_kind(tmp_path / "a.h5", kind, count=60))
        found = []
        for device in ("cpu", "cuda"):
            with H5Loader(
                ds, 4, shuffle=True, augment=CROP, device=device, augment_on=on, with_index=True
            ) as loader:
                found.append(by_index(loader))
        for index, (views, label) in found[0].items():
            there, other = found[1][index]
            assert there[0].is_cuda
            assert other.is_cuda
            assert (views[0].float() - there[0].cpu().float()).abs().max() <= 2
            assert label == other.cpu()

    def test_what_is_kept_does_not_change(self, tmp_path):
        ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=200))
        with H5Loader(ds, 4, shuffle=True, device="cuda", prefetch=4) as loader:
            kept = [images for images, _ in loader]
            copies = [images.clone() for images in kept]
            for images, _ in loader:
                torch.cuda._sleep(100_000)
                images.sum()
            assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
            assert loader.stats()["slots"] <= 12

    @pytest.mark.parametrize("kind", ["raw", "yuv420"])
    @pytest.mark.parametrize("residency", ["device", "pinned"])
    def test_residency_changes_nothing(self, tmp_path, kind, residency):
        ds = H5Dataset(write_kind(tmp_path / "a.h5", kind, count=60))
        options = {"augment": CROP, "device": "cuda", "with_index": True}
        with H5Loader(ds, 8, residency=residency, shuffle=True, **options) as loader:
            assert loader._builder.resident._rows.is_cuda
            found = [by_index(loader) for _ in range(2)]
        with H5Loader(ds, 8, shuffle=True, **options) as loader:
            for views in found:
                assert_same(views, by_index(loader))

    def test_pinned_images_take_no_memory_of_the_device(self, tmp_path):
        ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=400, side=64))
        before = torch.cuda.memory_allocated()
        loader = H5Loader(ds, 8, shuffle=True, device="cuda", residency="pinned")
        assert torch.cuda.memory_allocated() == before
        resident = H5Loader(ds, 8, shuffle=True, device="cuda", residency="device")
        assert torch.cuda.memory_allocated() - before >= 400 * 64 * 64 * 3
        del loader, resident

    def test_what_does_not_fit_is_said(self):
        transfer = open_transfer("cuda")
        with pytest.raises(UsageError, match=r'residency="device": the images take .* GB free'):
            transfer.reserve(1 << 50, pinned=False)
        assert transfer.free_bytes() > 0

    @pytest.mark.parametrize("residency", ["stream", "device", "pinned"])
    def test_a_step_never_waits_for_the_device(self, tmp_path, residency):
        """Every operation that would is an error of torch's, in any thread."""
        ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=200))
        ops = (*CROP, augment.ToDtype(torch.float16, scale=True))
        with H5Loader(
            ds, 4, shuffle=True, augment=ops, device="cuda", residency=residency
        ) as loader:
            list(loader)  # allocates, and loads kernels
            torch.cuda.synchronize()
            try:
                torch.cuda.set_sync_debug_mode("error")
                for images, _ in loader:
                    images.mul_(2)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def test_the_consumer_gets_its_batch_before_the_device_has_it(self, tmp_path):
        """The host runs ahead: a pass over the loader ends while the device still sleeps."""
        ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=64))
        with H5Loader(ds, 4, shuffle=True, augment=CROP, device="cuda", prefetch=4) as loader:
            list(loader)
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000_000)
            done = torch.cuda.Event()
            for images, _ in loader:
                images.sum()
            done.record()
            assert not done.query()

    def test_pinned_slots_come_back_by_event(self, tmp_path):
        ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=400))
        with H5Loader(ds, 4, shuffle=True, device="cuda", prefetch=3, num_workers=2) as loader:
            for _ in range(5):
                for images, _ in loader:
                    images.sum()
            slots = [slot for ring in loader._builder.rings for slot in ring._slots]
            assert all(torch.from_numpy(slot.rows).is_pinned() for slot in slots)
            assert len(slots) < 40

    @needs_two
    @pytest.mark.parametrize("residency", ["stream", "device", "pinned"])
    def test_the_second_device(self, tmp_path, residency):
        ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=60))
        options = {"augment": CROP, "with_index": True, "augment_on": "device"}
        expected = by_index(H5Loader(ds, 4, device="cuda:0", shuffle=True, **options))
        with H5Loader(
            ds, 4, device="cuda:1", residency=residency, shuffle=True, **options
        ) as loader:
            found = by_index(loader)
        assert torch.cuda.current_device() == 0
        for index, (views, label) in found.items():
            assert views[0].device == label.device == torch.device("cuda", 1)
            assert torch.equal(views[0].cpu(), expected[index][0][0].cpu())

    def test_compiled_it_makes_the_same_images(self, tmp_path):
        ds = H5Dataset(write_kind(tmp_path / "a.h5", "raw", count=60))
        options = {"augment": CROP, "device": "cuda", "with_index": True}
        with H5Loader(ds, 8, compile=True, shuffle=True, **options) as loader:
            found = by_index(loader)
            assert loader.stats()["compiled"]
        for index, (views, _) in by_index(H5Loader(ds, 8, shuffle=True, **options)).items():
            off = (views[0].int() - found[index][0][0].int()).abs()
            assert off.max() <= 2
            assert off.float().mean() <= 0.5
