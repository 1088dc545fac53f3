"""Transforms of torchvision and timm as ops of h5feed.augment, so that a script's line can stay.

Neither library is imported: their classes are known by name, their arguments by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from h5feed.augment.choice import RandomApply, RandomChoice
from h5feed.augment.color import ColorJitter, GaussianBlur, Grayscale, RandomGrayscale
from h5feed.augment.erasing import RandomErasing
from h5feed.augment.floats import Normalize, ToDtype
from h5feed.augment.geometry import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from h5feed.augment.mixing import CutMix, MixUp, MixUpOrCutMix
from h5feed.augment.ops import Op
from h5feed.augment.policies import AugMix, AutoAugment, RandAugment, TrivialAugmentWide
from h5feed.augment.tone import (
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from h5feed.augment.warp import RandomAffine, RandomPerspective, RandomRotation
from h5feed.errors import UsageError

__all__ = ["from_torchvision"]

_LIBRARIES = ("torchvision", "timm")
_WAY_OUT = (
    "leave it out, or keep all of the transform in H5Dataset(path, transform=...) and use "
    "make_dataloader"
)


def from_torchvision(augment: Any) -> tuple[Op, ...]:
    """Return the ops that a torchvision transform comes to: a Compose, or any list of transforms.

    Ops of h5feed.augment in the list stay as they are, `ToImage` and the like come to nothing, and
    timm's own transforms (of `timm.data.create_transform`) are known, too. H5Loader's `augment`
    takes all this as it is.

    >>> class Compose:  # stands for torchvision.transforms.v2.Compose
    ...     __module__ = "torchvision.transforms.v2"
    ...     transforms = [CenterCrop(224), RandomHorizontalFlip()]
    >>> from_torchvision(Compose())
    (CenterCrop(size=224, mask_fill=0), RandomHorizontalFlip(p=0.5))

    Raises UsageError that names a transform which has no counterpart.
    """
    if isinstance(augment, Op):
        raise UsageError(f"augment={augment!r} is one op: give a list of ops, augment=[...]")
    if not isinstance(augment, Iterable) and not callable(augment):
        raise UsageError(
            f"augment={augment!r} is not a list of ops of h5feed.augment, nor a transform of "
            "torchvision"
        )
    return tuple(_joined(_ops([augment] if _is_foreign(augment) else augment)))


def _is_foreign(transform: Any) -> bool:
    library = type(transform).__module__.partition(".")[0]
    return library in (*_LIBRARIES, "torch") or not isinstance(transform, Iterable)


def _ops(transforms: Iterable[Any]) -> Iterator[Any]:
    """Give the ops, one after the other, and a _Pad for each Pad."""
    for transform in transforms:
        name, library = type(transform).__name__, type(transform).__module__.partition(".")[0]
        if isinstance(transform, Op):
            yield transform
        elif library == "torch" and name == "Sequential":
            yield from _ops(transform)
        elif library in _LIBRARIES and name == "Compose":
            yield from _ops(transform.transforms)
        elif library in (*_LIBRARIES, "torch") and name in _NOTHING:
            continue
        elif library in _LIBRARIES and name in _MADE and (library, name) not in _OTHERS:
            yield from _MADE[name](transform)
        elif library in _LIBRARIES:
            raise UsageError(
                f"augment: {library}'s {name} has no counterpart in h5feed.augment; {_WAY_OUT}"
            )
        else:
            raise UsageError(
                f"augment holds {transform!r}, which is not an op of h5feed.augment; {_WAY_OUT}"
            )


class _Pad:
    def __init__(self, transform: Any) -> None:
        self.arguments = {
            "padding": _listed(transform.padding),
            "padding_mode": transform.padding_mode,
            **_fills(transform),
        }


def _joined(ops: Iterator[Any]) -> Iterator[Op]:
    """Put what a Pad adds into the RandomCrop that follows it."""
    pad: _Pad | None = None
    for op in ops:
        if isinstance(op, _Pad) and pad is None:
            pad = op
        elif pad is None:
            yield op
        elif isinstance(op, RandomCrop) and op.padding is None:
            yield RandomCrop(op.size, pad_if_needed=op.pad_if_needed, **pad.arguments)
            pad = None
        else:
            break
    if pad is not None:
        raise UsageError(
            "augment: torchvision's Pad has a counterpart in h5feed.augment only right before a "
            "RandomCrop without padding, as RandomCrop(size, padding=...)"
        )


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _by_kind(values: Any, kind: str, default: Any) -> Any:
    """Return what v2's dict of values by type says of "Image" or "Mask"."""
    if not isinstance(values, Mapping):
        return values if kind == "Image" else default
    named = {getattr(key, "__name__", key): value for key, value in values.items()}
    for name in (kind, *(("PILImage", "Tensor") if kind == "Image" else ()), "others"):
        if name in named:
            return named[name]
    return default


def _fills(transform: Any) -> dict[str, Any]:
    fill = transform.fill
    color = _by_kind(fill, "Image", 0)
    one = fill if isinstance(fill, int) else 0  # a number is for masks, too
    mask = _by_kind(fill, "Mask", one)
    return {"fill": _listed(0 if color is None else color), "mask_fill": mask or 0}


def _apply(t: Any) -> Iterator[Op]:
    ops = tuple(_joined(_ops(t.transforms)))
    if ops:
        yield RandomApply(ops, t.p)


def _choice(t: Any) -> Iterator[Op]:
    """RandomChoice, also of one MixUp and one CutMix, as torchvision's training scripts have it."""
    by_name = {type(one).__name__: one for one in t.transforms}
    if sorted(by_name) != ["CutMix", "MixUp"] or len(t.transforms) != 2:
        lists = [tuple(_joined(_ops([one]))) for one in t.transforms]
        yield RandomChoice(lists, None if t.p is None else tuple(t.p))
        return
    mix, cut = by_name["MixUp"], by_name["CutMix"]
    probable = {type(one).__name__: p for one, p in zip(t.transforms, t.p, strict=True)}
    yield MixUpOrCutMix(
        alpha=mix.alpha,
        num_classes=mix.num_classes,
        cutmix_alpha=cut.alpha,
        cutmix_p=probable["CutMix"] / sum(probable.values()),
    )


def _timm_mixup(t: Any) -> Iterator[Op]:
    """Timm's Mixup and FastCollateMixup."""
    if t.mode != "batch" or t.cutmix_minmax is not None:
        raise UsageError(
            f"augment: timm's {type(t).__name__} with mode={t.mode!r} and "
            f"cutmix_minmax={t.cutmix_minmax!r} has no counterpart in h5feed.augment: give "
            "mode='batch', and cutmix_minmax=None"
        )
    cut = t.cutmix_alpha > 0
    yield MixUpOrCutMix(
        alpha=t.mixup_alpha if t.mixup_alpha > 0 else 1.0,
        num_classes=t.num_classes,
        cutmix_alpha=t.cutmix_alpha if cut else 1.0,
        cutmix_p=(t.switch_prob if t.mixup_alpha > 0 else 1.0) if cut else 0.0,
        p=t.mix_prob,
        label_smoothing=t.label_smoothing,
    )


def _resize(t: Any) -> Iterator[Op]:
    size = _listed(t.size)
    yield Resize(
        size[0] if isinstance(size, tuple) and len(size) == 1 else size,
        interpolation=t.interpolation,
        max_size=t.max_size,
        antialias=t.antialias is not False,
    )


def _random_crop(t: Any) -> Iterator[Op]:
    yield RandomCrop(
        _listed(t.size),
        padding=_listed(t.padding),
        pad_if_needed=t.pad_if_needed,
        padding_mode=t.padding_mode,
        **_fills(t),
    )


def _random_resized_crop(t: Any) -> Iterator[Op]:
    interpolation = t.interpolation
    if isinstance(interpolation, Sequence) and not isinstance(interpolation, str):
        raise UsageError(
            f"augment: {type(t).__name__} draws its interpolation from {list(interpolation)!r}, "
            'and RandomResizedCrop has one: give interpolation="bilinear" or "bicubic" '
            "(timm's train.py: --train-interpolation)"
        )
    yield RandomResizedCrop(
        _listed(t.size),
        scale=_listed(t.scale),
        ratio=_listed(t.ratio),
        interpolation=interpolation,
        antialias=getattr(t, "antialias", True) is not False,
    )


def _auto_augment(t: Any) -> Iterator[Op]:
    yield AutoAugment(t.policy, interpolation=t.interpolation, **_fills(t))


def _rand_augment(t: Any) -> Iterator[Op]:
    arguments = (t.num_ops, t.magnitude, t.num_magnitude_bins)
    yield RandAugment(*arguments, interpolation=t.interpolation, **_fills(t))


def _trivial_augment(t: Any) -> Iterator[Op]:
    yield TrivialAugmentWide(t.num_magnitude_bins, interpolation=t.interpolation, **_fills(t))


def _aug_mix(t: Any) -> Iterator[Op]:
    yield AugMix(
        t.severity,
        t.mixture_width,
        t.chain_depth,
        t.alpha,
        t.all_ops,
        interpolation=t.interpolation,
        fill=_fills(t)["fill"],
    )


def _affine(t: Any) -> Iterator[Op]:
    yield RandomAffine(
        _listed(t.degrees),
        translate=t.translate,
        scale=t.scale,
        shear=_listed(t.shear),
        interpolation=t.interpolation,
        center=t.center,
        **_fills(t),
    )


def _rotation(t: Any) -> Iterator[Op]:
    yield RandomRotation(
        _listed(t.degrees),
        interpolation=t.interpolation,
        expand=t.expand,
        center=t.center,
        **_fills(t),
    )


def _perspective(t: Any) -> Iterator[Op]:
    yield RandomPerspective(t.distortion_scale, t.p, interpolation=t.interpolation, **_fills(t))


def _jitter(t: Any) -> Iterator[Op]:
    yield ColorJitter(*(_listed(getattr(t, name)) for name in _JITTERED))


_JITTERED = ("brightness", "contrast", "saturation", "hue")


def _floats(dtype: Any, scale: bool) -> Iterator[Op]:
    if dtype is not None and str(dtype) != "torch.uint8":  # bytes are what there is
        yield ToDtype(dtype, scale=scale)


def _to_tensor(t: Any) -> Iterator[Op]:
    import torch

    yield ToDtype(torch.float32, scale=True)


def _to_dtype(t: Any) -> Iterator[Op]:
    mask = _by_kind(t.dtype, "Mask", None)
    if mask is not None and str(mask) != "torch.uint8":
        raise UsageError(
            f"augment: ToDtype makes masks {mask}, and ops change images only: give H5Dataset "
            f"target_dtype={mask}, and ToDtype the images' dtype alone"
        )
    yield from _floats(_by_kind(t.dtype, "Image", None), t.scale)


def _erasing(t: Any) -> Iterator[Op]:
    value = t.value
    if isinstance(value, Sequence) and len(value) == 1:
        value = value[0]
    yield RandomErasing(
        t.p, _listed(t.scale), _listed(t.ratio), "random" if value is None else _listed(value)
    )


def _timm_erasing(t: Any) -> Iterator[Op]:
    import math

    if t.max_count > 1 or t.num_splits > 1 or getattr(t, "rand_color", False):
        raise UsageError(
            "augment: timm's RandomErasing with several rectangles, splits or mode 'rand' has no "
            "counterpart in h5feed.augment: give re_count=1 and re_mode 'const' or 'pixel'"
        )
    low, high = (round(math.exp(limit), 9) for limit in t.log_aspect_ratio)
    value: Any = "random" if t.per_pixel else 0.0
    yield RandomErasing(t.probability, (t.min_area, t.max_area), (low, high), value)


def _either_erasing(t: Any) -> Iterator[Op]:
    return _timm_erasing(t) if hasattr(t, "probability") else _erasing(t)


_NOTHING = (
    *("Identity", "PILToTensor", "ToImage", "ToImageTensor", "ToPILImage", "ToPureTensor"),
    *("MaybePILToTensor", "ToNumpy"),  # timm's
)
"""What changes the kind of an image and nothing else: H5Loader makes tensors anyway."""

_OTHERS = {("timm", name) for name in ("AutoAugment", "RandAugment")}
"""What is another thing than its namesake in torchvision."""

_MADE: dict[str, Callable[[Any], Iterator[Any]]] = {
    "Resize": _resize,
    "CenterCrop": lambda t: iter([CenterCrop(_listed(t.size))]),
    "RandomCrop": _random_crop,
    "Pad": lambda t: iter([_Pad(t)]),
    "RandomResizedCrop": _random_resized_crop,
    "RandomResizedCropAndInterpolation": _random_resized_crop,
    "RandomHorizontalFlip": lambda t: iter([RandomHorizontalFlip(t.p)]),
    "RandomVerticalFlip": lambda t: iter([RandomVerticalFlip(t.p)]),
    "RandomAffine": _affine,
    "RandomRotation": _rotation,
    "RandomPerspective": _perspective,
    "AutoAugment": _auto_augment,
    "RandAugment": _rand_augment,
    "TrivialAugmentWide": _trivial_augment,
    "AugMix": _aug_mix,
    "RandomApply": _apply,
    "ColorJitter": _jitter,
    "Grayscale": lambda t: iter([Grayscale(t.num_output_channels)]),
    "RandomGrayscale": lambda t: iter([RandomGrayscale(t.p)]),
    "GaussianBlur": lambda t: iter([GaussianBlur(_listed(t.kernel_size), _listed(t.sigma))]),
    "RandomPosterize": lambda t: iter([RandomPosterize(t.bits, t.p)]),
    "RandomSolarize": lambda t: iter([RandomSolarize(t.threshold, t.p)]),
    "RandomInvert": lambda t: iter([RandomInvert(t.p)]),
    "RandomAutocontrast": lambda t: iter([RandomAutocontrast(t.p)]),
    "RandomEqualize": lambda t: iter([RandomEqualize(t.p)]),
    "RandomAdjustSharpness": lambda t: iter([RandomAdjustSharpness(t.sharpness_factor, t.p)]),
    "ToTensor": _to_tensor,
    "MaybeToTensor": _to_tensor,
    "ConvertImageDtype": lambda t: _floats(t.dtype, True),
    "ToDtype": _to_dtype,
    "Normalize": lambda t: iter([Normalize(tuple(map(float, t.mean)), tuple(map(float, t.std)))]),
    "RandomErasing": _either_erasing,
    "RandomChoice": _choice,
    "Mixup": _timm_mixup,
    "FastCollateMixup": _timm_mixup,
    "MixUp": lambda t: iter([MixUp(alpha=t.alpha, num_classes=t.num_classes)]),
    "CutMix": lambda t: iter([CutMix(alpha=t.alpha, num_classes=t.num_classes)]),
}
