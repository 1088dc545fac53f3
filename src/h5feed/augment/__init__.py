"""What happens to an image: parameters drawn for a batch, kernels for the CPU and any device.

Ops are named, ordered and parametrised as in torchvision.transforms.v2; a Pipeline runs them.

An image that packing squeezed (fit="stretch") counts in its true proportions at its stored
resolution: 375x500 stored as 256x256 counts as 256x341, what torchvision's Resize(256) would have
made of the source. So RandomCrop(224) or CenterCrop(224) mean there what they mean after
Resize(256), and no op ever shows a squeezed image; only without any op that crops or resizes does
the stored image come as it is.

The CPU and a device make the same of the same pixels, up to rounding: max 2, mean 0.5 of 255 for
every crop and every other change of its own. Changes of color in a row multiply what rounding left:
after a crop, ColorJitter(0.4, 0.4, 0.4, 0.1) comes up to 10 apart in single pixels (one in 200 is
more than 2 apart, the mean stays below 0.5), as far as torchvision's own carries a difference of 1.
So do the policies' changes in a row: Solarize after a warp turns a level at its threshold over.
"""

from h5feed.augment.choice import RandomApply, RandomChoice
from h5feed.augment.color import ColorJitter, GaussianBlur, Grayscale, RandomGrayscale
from h5feed.augment.erasing import RandomErasing
from h5feed.augment.floats import Normalize, ToDtype
from h5feed.augment.geometry import (
    AlternatingFlip,
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from h5feed.augment.mixing import CutMix, MixUp, MixUpOrCutMix
from h5feed.augment.ops import Draws, ImageOp, Op
from h5feed.augment.pipeline import Params, Pipeline
from h5feed.augment.places import Moves, SanitizeBoundingBoxes
from h5feed.augment.plan import Kernel
from h5feed.augment.policies import AugMix, AutoAugment, RandAugment, TrivialAugmentWide
from h5feed.augment.tone import (
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from h5feed.augment.translate import from_torchvision
from h5feed.augment.warp import RandomAffine, RandomPerspective, RandomRotation

__all__ = [
    "AlternatingFlip",
    "AugMix",
    "AutoAugment",
    "CenterCrop",
    "ColorJitter",
    "CutMix",
    "Draws",
    "GaussianBlur",
    "Grayscale",
    "ImageOp",
    "Kernel",
    "MixUp",
    "MixUpOrCutMix",
    "Moves",
    "Normalize",
    "Op",
    "Params",
    "Pipeline",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAffine",
    "RandomApply",
    "RandomAutocontrast",
    "RandomChoice",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomInvert",
    "RandomPerspective",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomSolarize",
    "RandomVerticalFlip",
    "Resize",
    "SanitizeBoundingBoxes",
    "ToDtype",
    "TrivialAugmentWide",
    "from_torchvision",
]
