import numpy as np
import pytest
import torch

from h5feed.augment import CutMix, MixUp
from h5feed.augment.mixing import mix_labels, mix_rows
from h5feed.train.config import RecipeConfig
from h5feed.train.tricks import mix_batch

IMAGES = torch.arange(4).view(4, 1, 1, 1).expand(4, 3, 16, 16).to(torch.uint8) * 40
LABELS = torch.tensor([0, 1, 2, 3])


def test_mixup_adds_shares_of_images_and_targets():
    images, targets = mix_batch(IMAGES, LABELS, RecipeConfig(mixup=1.0), 4, (1, 2))
    share = targets[1, 1].item()
    assert 0 < share < 1
    assert targets[1].tolist() == pytest.approx([1 - share, share, 0, 0])
    assert images[1].unique().item() == pytest.approx(40 * share, rel=1e-5)
    assert images[0].unique().item() == pytest.approx(120 * (1 - share), rel=1e-5)


def test_cutmix_pastes_a_box_and_weighs_by_its_area():
    for seed in range(20):
        images, targets = mix_batch(IMAGES, LABELS, RecipeConfig(cutmix=1.0), 4, (seed,))
        assert images.dtype == torch.uint8
        kept = (images[1] == 40).float().mean().item()
        pasted = (images[1] == 0).float().mean().item()
        assert kept + pasted == pytest.approx(1)
        assert targets[1].tolist() == pytest.approx([pasted, kept, 0, 0], abs=1e-6)
    assert IMAGES[1].unique().item() == 40  # what came in is as it was


def test_with_both_a_batch_takes_one_of_them():
    both = RecipeConfig(mixup=1.0, cutmix=1.0)
    kinds = {mix_batch(IMAGES, LABELS, both, 4, (seed,))[0].dtype for seed in range(20)}
    assert kinds == {torch.uint8, torch.float32}


def test_the_draw_is_a_function_of_the_seed():
    config = RecipeConfig(mixup=0.4)
    one, two, other = (mix_batch(IMAGES, LABELS, config, 4, seed) for seed in ((1,), (1,), (2,)))
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[1], other[1])


def test_a_label_that_is_no_class_is_refused():
    with pytest.raises(RuntimeError, match="MixUp or CutMix met a label outside of 0 to 2"):
        mix_batch(IMAGES, LABELS, RecipeConfig(mixup=1.0), 3, (1,))


@pytest.mark.parametrize("recipe", [RecipeConfig(mixup=0.4), RecipeConfig(cutmix=1.0)])
def test_batches_are_mixed_as_h5loaders_are(recipe):
    op = MixUp(alpha=0.4) if recipe.mixup else CutMix(alpha=1.0)
    images, targets = mix_batch(IMAGES, LABELS, recipe, 4, (5,))
    drawn = op.draw(np.random.default_rng((5,)).random(3), (16, 16))
    rows = IMAGES.permute(0, 2, 3, 1).contiguous().numpy()
    mix_rows(rows, drawn, torch.uint8)
    expected = torch.from_numpy(rows).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(images.float(), expected, atol=0.51, rtol=0)
    torch.testing.assert_close(targets, mix_labels(LABELS, float(drawn[0]), 4))
