import numpy as np
import pytest
import torch

from augment.judge import assert_close, planar
from h5feed.augment.color import shift_hue, shift_hue_batch

functional = pytest.importorskip("torchvision.transforms.v2.functional")

# every level of every channel in every order, grays among them
COLORS = (
    np.stack(np.meshgrid(*[np.r_[0:256:15, 1, 254]] * 3, indexing="ij"), axis=-1)
    .reshape(-1, 20, 3)
    .astype(np.uint8)
)


@pytest.mark.parametrize("factor", [-0.5, -0.31, -1e-3, 0.0, 0.2, 1 / 3, 0.5])
def test_hues_turn_as_torchvision_turns_them(factor):
    want = functional.adjust_hue(planar(COLORS), factor).permute(1, 2, 0)
    ours = COLORS.copy()
    shift_hue(ours, factor)
    assert_close(ours, want, most=1, mean=0.05)
    images = planar(COLORS)[None].float()
    made = shift_hue_batch(images, torch.full((1, 1, 1, 1), factor))
    assert_close(made[0].permute(1, 2, 0).numpy().astype(np.uint8), want, most=1, mean=0.05)
