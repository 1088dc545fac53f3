import numpy as np
import pytest
import torch

from h5feed import H5Dataset, H5Loader, UsageError, augment
from h5feed.feed.device import Copies, HostLane, open_lane
from h5feed.feed.slots import Ring
from loaders import by_index, write_kind

CROP = (augment.RandomResizedCrop(16), augment.RandomHorizontalFlip())


def test_the_host_lane_lends_the_slot_itself():
    lane, ring = open_lane("cpu"), Ring((4, 2), np.dtype(np.uint8), keep=1)
    assert isinstance(lane, HostLane)
    assert not lane.pinned
    slot = ring.take()
    with lane.stream():
        rows = lane.send(slot, 3)
        ticket = lane.close([slot])
    lane.receive(ticket, [rows])
    assert rows.data_ptr() == slot.rows.ctypes.data
    assert rows.shape == (3, 2)
    lane.reclaim()
    assert ring.take() is not slot
    del rows
    assert ring.take() is slot


def test_refuses_a_device_that_is_not_there():
    with pytest.raises(UsageError, match="device='meta' is not one H5Loader sends to"):
        open_lane("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="this torch sees no CUDA device"):
            open_lane("cuda")


class Event:
    """A CUDA event's face: passes when told to."""

    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    @pytest.mark.parametrize("kind", ["raw", "yuv420", "jpeg"])
    @pytest.mark.parametrize("on", ["cpu", "device"])
    def test_batches_are_those_of_the_cpu(self, tmp_path, kind, on):
        ds = H5Dataset(write_kind(tmp_path / "a.h5", kind, count=60))
        found = []
        for device in ("cpu", "cuda"):
            with H5Loader(
                ds, 4, augment=CROP, device=device, augment_on=on, with_index=True
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
        with H5Loader(ds, 4, device="cuda", prefetch=4) as loader:
            kept = [images for images, _ in loader]
            copies = [images.clone() for images in kept]
            for images, _ in loader:
                torch.cuda._sleep(100_000)
                images.sum()
            assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
            assert loader.stats()["slots"] <= 12
