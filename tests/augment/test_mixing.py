from dataclasses import replace

import numpy as np
import pytest
import torch

from augment.draws import FakeDraws
from augment.judge import assert_close, assert_drawn_alike, make_images, on_device, run
from h5feed.augment import CutMix, MixUp, MixUpOrCutMix, Pipeline, ToDtype
from h5feed.augment.mixing import mix_labels
from h5feed.errors import UsageError

v2 = pytest.importorskip("torchvision.transforms.v2")

LABELS = torch.tensor([3, 0, 9, 3, 1])


def theirs(op, params, batch, labels):
    params = {**params, "labels": labels, "batch_size": len(labels)}
    return op.transform(batch, params), op.transform(labels, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mixup_is_torchvisions_in_place_and_on_a_device(dtype):
    images = make_images(5, 16, 20)
    pipeline, params, out = run([ToDtype(dtype, scale=True), MixUp()], images, FakeDraws(range(5)))
    batch = torch.from_numpy(out.view(np.int16) if out.dtype == np.uint16 else out).view(dtype)
    op, kept = v2.MixUp(num_classes=10), {"lam": float(params.mix[0])}
    want, labels = theirs(op, kept, batch.permute(0, 3, 1, 2).float(), LABELS)
    pipeline.mix_rows(params, out)
    close = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(batch.permute(0, 3, 1, 2).float(), want, **close)
    torch.testing.assert_close(on_device(pipeline, params, images).float(), batch.float(), **close)
    torch.testing.assert_close(pipeline.mix_labels(params, LABELS), labels)


def test_cutmix_is_torchvisions_in_place_and_on_a_device():
    images = make_images(5, 16, 20)
    for seed in range(5):
        pipeline, params, out = run([CutMix()], images, FakeDraws(range(5), seed))
        kept, _, y0, x0, y1, x1 = params.mix.tolist()
        box = {"box": tuple(int(v) for v in (x0, y0, x1, y1)), "lam_adjusted": kept}
        batch = torch.from_numpy(images).permute(0, 3, 1, 2)
        want, labels = theirs(v2.CutMix(num_classes=10), box, batch, LABELS)
        pipeline.mix_rows(params, out)
        assert torch.equal(torch.from_numpy(out).permute(0, 3, 1, 2), want)
        assert (on_device(pipeline, params, images).numpy() == out).all()
        torch.testing.assert_close(pipeline.mix_labels(params, LABELS), labels)


def test_bytes_are_mixed_too():
    images = make_images(5, 16, 20)
    pipeline, params, out = run([MixUp()], images, FakeDraws(range(5)))
    share = params.mix[0]
    pipeline.mix_rows(params, out)
    want = share * images + (1 - share) * np.roll(images, 1, axis=0)
    assert np.abs(out - want).max() <= 0.5001
    assert_close(on_device(pipeline, params, images), out, most=1)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_shares_and_boxes_are_drawn_as_torchvision_draws_them(alpha):
    n = 2000
    torch.manual_seed(0)
    mixed = [
        MixUp(alpha=alpha).draw(FakeDraws([0], k).batch_uniform(3, 3), (40, 60)) for k in range(n)
    ]
    made = [v2.MixUp(alpha=alpha, num_classes=2).make_params([]) for _ in range(n)]
    assert_drawn_alike([row[0] for row in mixed], [one["lam"] for one in made])
    cut = np.array(
        [
            CutMix(alpha=alpha).draw(FakeDraws([0], k).batch_uniform(3, 3), (40, 60))
            for k in range(n)
        ]
    )
    shape = torch.zeros(3, 40, 60)
    made = [v2.CutMix(alpha=alpha, num_classes=2).make_params([shape]) for _ in range(n)]
    assert_drawn_alike(cut[:, 0], [one["lam_adjusted"] for one in made])
    for column, corner in ((3, 0), (2, 1), (5, 2), (4, 3)):
        assert_drawn_alike(cut[:, column], [one["box"][corner] for one in made])


def test_soft_labels_mix_as_they_are_and_numbers_need_their_count():
    soft = torch.rand(5, 4)
    torch.testing.assert_close(mix_labels(soft, 0.25, None), soft * 0.25 + soft.roll(1, 0) * 0.75)
    with pytest.raises(UsageError, match="need to know how many classes there are: give num_class"):
        mix_labels(LABELS, 0.5, None)


@pytest.mark.parametrize(("label", "classes"), [(9, 9), (-1, 10)])
def test_a_label_outside_the_classes_is_refused(label, classes):
    labels = torch.tensor([3, 0, label, 3])
    with pytest.raises(UsageError) as caught:
        mix_labels(labels, 0.5, classes)
    assert str(caught.value) == (
        f"MixUp and CutMix met label {label}, and num_classes={classes} means 0 to {classes - 1}: "
        "give num_classes above every label, and leave items without a class (-1) out by indices="
    )


def test_without_mixing_labels_stay_numbers():
    pipeline, params, _ = run([], make_images(5, 8, 8), FakeDraws(range(5)))
    assert not pipeline.uses_batch
    assert pipeline.mix_labels(params, LABELS) is LABELS


def test_mixing_comes_last_and_for_one_view():
    with pytest.raises(UsageError, match=r"MixUp\(.*\) works on whole batches: put it last"):
        Pipeline([MixUp(), ToDtype(torch.float32, scale=True)])
    with pytest.raises(UsageError, match=r"MixUp\(.*\) mixes labels: use it with views=1, not 2"):
        Pipeline([MixUp()], views=2)


def test_either_mixing_comes_as_often_as_it_should_with_smooth_targets():
    op = MixUpOrCutMix(alpha=0.8, cutmix_p=0.25, p=0.8, label_smoothing=0.1)
    drawn = np.array([op.draw(u, (40, 60)) for u in np.random.default_rng(0).random((4000, 3))])
    none = (drawn == (1, 1, 0, 0, 0, 0)).all(axis=1)
    cut = ~none & (drawn[:, 1] == 0)
    assert none.mean() == pytest.approx(0.2, abs=0.03)
    assert cut.mean() == pytest.approx(0.2, abs=0.03)
    mixed = drawn[~none & ~cut]
    assert (mixed[:, 0] == mixed[:, 1]).all()
    assert (mixed[:, 2:] == (0, 0, 40, 60)).all()
    pipeline = Pipeline([op])
    pipeline.bind((8, 8), num_classes=4)
    params = replace(pipeline_params(pipeline), mix=np.array([0.75, 0.75, 0, 0, 8, 8]))
    targets = pipeline.mix_labels(params, torch.tensor([0, 3]))
    want = 0.9 * torch.tensor([[0.75, 0, 0, 0.25], [0.25, 0, 0, 0.75]]) + 0.025
    assert torch.allclose(targets, want)


def pipeline_params(pipeline):
    sizes = np.full((2, 2), 8)
    return pipeline.draw(FakeDraws(range(2)), sizes, sizes)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"p": 2}, "MixUpOrCutMix: p=2 must be between 0 and 1"),
        ({"cutmix_alpha": 0}, "MixUpOrCutMix: cutmix_alpha=0 must be positive"),
        ({"alpha": 0}, "MixUpOrCutMix: alpha=0 must be positive"),
    ],
)
def test_wrong_arguments_of_either_mixing_are_one_sentence(arguments, text):
    with pytest.raises(UsageError) as caught:
        MixUpOrCutMix(**arguments)
    assert str(caught.value) == text
