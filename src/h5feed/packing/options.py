"""The options of packing, and the pixel fields that they ask for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from tyro.conf import UseAppendAction, arg

from h5feed.errors import UsageError
from h5feed.jpeg import MAX_PIXELS
from h5feed.packing.items import EXTENSIONS, ClassOrder
from h5feed.store.layout import Encoding, FieldSpec, Fit, images_spec, masks_spec

__all__ = ["PackOptions", "field_specs"]

_NOT_CONTENT = frozenset(
    {"num_workers", "on_error", "max_skipped", "overwrite", "resume"}
    | {"shards", "order", "seed", "part", "append"}  # a shard has them beside its number
)
_SHARDS = re.compile(r"(\d+)(?:\s*([kMGT])(i?)B)?")
_UNITS = {"k": 1, "M": 2, "G": 3, "T": 4}
_MOST_SHARDS = 100_000
_SHARD_SIZE = "256MB"
"""Of what is appended, where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """How images are packed: the options of `pack` and of `pack-h5`.

    >>> PackOptions(size="256", store="jpeg").check()
    >>> PackOptions(quality=101).check()
    Traceback (most recent call last):
    h5feed.errors.UsageError: quality=101 is out of range: give 1 to 100
    """

    size: str = "auto"
    """auto, a side S, or HxW: pixels to store.
    auto: the power of two nearest to the median short side, at most 512."""
    fit: Fit = "stretch"
    """How an image is fitted to that size.
    stretch: squeezed into it whole; h5feed's own crops undo that.
    crop: short side to S, centre cut out.
    pad: letterboxed.
    keep: short side S, proportions kept."""
    store: Encoding = "raw"
    """What is stored.
    raw: RGB pixels.
    yuv420: half the bytes, no decoding.
    jpeg: encoded again, at the stored size.
    original: the JPEG files' own bytes, untouched."""
    quality: int = 90
    """JPEG quality, 1 to 100, wherever packing encodes."""
    manifest: Path | None = None
    """A csv, tsv, jsonl or parquet file of paths with labels, classes or numeric targets: columns
    path, label (class numbers or names), class (names), target or target_…."""
    path_column: str | None = None
    """The manifest's column of paths, whatever it is called; ids without extension will do. In
    parquet files and Hugging Face's datasets that hold images, the column of these."""
    label_column: str | None = None
    """The manifest's column of class numbers or names, whatever it is called. A cell may hold a
    list of them, in jsonl: an item of several classes."""
    label_delimiter: str | None = None
    """What stands between the classes of an item of several, such as " " in "cat dog"; without it
    such a cell is one class."""
    class_columns: tuple[str, ...] = ()
    """The manifest's columns of 0 and 1, one for each class that an item may have, in their
    order; patterns such as "has_*" will do."""
    targets: tuple[str, ...] = ()
    """The manifest's columns of numbers to predict, whatever they are called."""
    fields: Annotated[UseAppendAction[tuple[str, ...]], arg(name="field")] = ()
    """The manifest's columns to keep as further fields, each NAME or NAME:TYPE: text, json, or
    float32, float64, int64 or uint8, alone or as in float32[17] or, of any length, float32[n,4].
    boxes are lists of [left, top, right, bottom] in pixels of the image, keypoints[17] lists of 17
    [x, y, visibility]; with @boxes, as in int64[n]@boxes, a row belongs to each of field boxes.
    Without TYPE the first row says it."""
    classes: Path | None = None
    """A text file of class names, one a line: what the manifest's class numbers, or those of
    boxes, mean. Otherwise the classes are those of its rows."""
    annotations: Path | None = None
    """COCO's JSON file (instances or keypoints), or a folder of Pascal VOC's XML files: boxes of
    the images, their classes and keypoints, kept as further fields."""
    masks: Path | None = None
    """A folder of masks, one per image: the same relative path but for the extension."""
    annotation_masks: bool = False
    """Masks drawn of COCO's polygons and RLE, which needs pycocotools: 0 is background, 1 the
    first class, 255 a crowd; small objects lie on large ones."""
    extensions: tuple[str, ...] = EXTENSIONS
    """Which files of a folder are images, by the endings of their names: torchvision ImageFolder's.
    GIFs are not among them. A manifest may name any file."""
    class_order: ClassOrder = "sorted"
    """How class names are numbered.
    sorted: as torchvision's ImageFolder does (class10 before class2).
    natural: as timm does (class2 before class10)."""
    background: tuple[int, int, int] = (255, 255, 255)
    """Red, green, blue under transparent pixels and around letterboxed images."""
    mask_fill: int = 0
    """Class number around letterboxed masks, 0 to 255, such as the loss's ignore index."""
    max_pixels: int = MAX_PIXELS
    """An image of more pixels, by its header, is skipped and not decoded; so is one that takes
    more than 12 bytes of memory for each of them. A worker takes no more: 2.2 GB by default."""
    non_jpeg: Literal["refuse", "reencode"] = "refuse"
    """What store original does with files that are not JPEG."""
    any_size: bool = False
    """Accept a size that is not a power of two."""
    allow_empty: bool = False
    """Accept class folders without images."""
    on_error: Literal["skip", "fail"] = "skip"
    """Whether an image that cannot be decoded is skipped and listed, or stops the run."""
    max_skipped: int | None = None
    """Stop when more images (of a shard) are skipped; otherwise the larger of 10 and 1 percent."""
    shards: str | None = None
    """Make a set: OUT becomes a folder of this many shards, or of as many as make each about so
    large, as in 256MB. Which images a shard holds follows from the source and these options."""
    order: Literal["random", "source"] | None = None
    """How images are dealt to shards.
    random: in an order drawn with --seed, so that a shard is a fair sample (the default).
    source: as they come, class by class."""
    seed: int = 0
    """Seed of order=random."""
    part: str | None = None
    """Pack one part of a set's shards, such as 3/8; the others are packed elsewhere, into the same
    folder. auto: as Slurm arrays, srun or torchrun say; auto/8: as indexed jobs of Kubernetes
    say."""
    append: bool = False
    """Add the images, as shards of their own, to the set that OUT is; new classes are numbered on.
    Who reads the set meanwhile goes on with what it was."""
    num_workers: Annotated[int | None, arg(name="workers")] = None
    """Worker processes; otherwise one per core (a container's quota counts) while memory lasts.
    0: all is done in one process."""
    overwrite: bool = False
    """Replace OUT if it exists, and delete an unfinished OUT.partial. If OUT is a link, the link
    stays and the file that it leads to is replaced."""
    resume: bool = False
    """Continue from the OUT.partial of an interrupted run, if there is one, after comparing all of
    it with its checksums; in a set with the shards that are not there yet."""

    def check(self) -> None:
        """Raise UsageError for a value out of range, or one that would be ignored."""
        for option in dataclass_fields(self):
            if get_origin(option.type) is Literal:
                _among(option.name, getattr(self, option.name), get_args(option.type))
        _in_range("quality", self.quality, 1, 100)
        for name, least in (("num_workers", 0), ("max_skipped", 0), ("max_pixels", 1)):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value)
                if value < least:
                    raise UsageError(f"{name}={value} is too small: give {least} or more")
        if not isinstance(self.background, Sequence) or len(self.background) != 3:
            raise UsageError(f"background={self.background} is not a color: give red, green, blue")
        for value in self.background:
            _in_range("background", value, 0, 255)
        _in_range("mask_fill", self.mask_fill, 0, 255)
        for end in self.extensions or ("",):
            if not end.startswith(".") or end != end.lower():
                raise UsageError(
                    f"extensions={' '.join(self.extensions)}: {end!r} is not the end of a name: "
                    "give them in small letters, with their dots, such as .jpg .gif"
                )
        self._check_companions()

    def content(self) -> dict[str, Any]:
        """Return the options that decide the file's bytes, as JSON values."""
        names = [option.name for option in dataclass_fields(self)]
        named = {name: getattr(self, name) for name in names if name not in _NOT_CONTENT}
        for name in (
            "manifest",
            "classes",
            "annotations",
            "masks",
        ):  # no absolute path may enter a file
            named[name] = None if named[name] is None else named[name].name
        return named | {
            "background": list(self.background),
            "extensions": list(self.extensions),
            "class_columns": list(self.class_columns),
            "targets": list(self.targets),
            "fields": list(self.fields),
        }

    def skip_limit(self, count: int) -> int:
        """Return how many of `count` images may be skipped."""
        return max(10, count // 100) if self.max_skipped is None else self.max_skipped

    def count_for(self, images: int, image_bytes: float) -> int:
        """Return how many shards `shards` makes of images of so many bytes.

        Raises UsageError where there are fewer images than shards.
        """
        number, unit, binary = self._shards()
        if unit:
            size = float(number * (1024 if binary else 1000) ** _UNITS[unit])
            return max(1, min(images, round(images * image_bytes / size)))
        if number > images:
            raise UsageError(f"shards={self.shards} of {images:,} images: give {images} or fewer")
        return number

    def _shards(self) -> tuple[int, str, str]:
        text = _SHARD_SIZE if self.shards is None else self.shards
        found = _SHARDS.fullmatch(text.strip())
        number = 0 if found is None else int(found[1])
        if found is None or not number or (not found[2] and number > _MOST_SHARDS):
            raise UsageError(
                f"shards={self.shards!r} is neither a number of shards, 1 to {_MOST_SHARDS:,}, nor "
                "how large they are to be, such as 256MB"
            )
        return number, found[2] or "", found[3] or ""

    @property
    def makes_a_set(self) -> bool:
        """Whether OUT is a folder of shards."""
        return self.shards is not None or self.append

    def _check_set(self) -> None:
        if self.append and self.overwrite:
            raise UsageError("overwrite with append: what is there is kept; give one of them")
        if self.makes_a_set:
            self._shards()
            _in_range("seed", self.seed, 0, (1 << 63) - 1)
            if self.order is not None:
                _among("order", self.order, ("random", "source"))
            if self.seed and self.order == "source":
                raise UsageError(
                    f"seed={self.seed} draws a random order, and order=source has none"
                )
            if self.part is not None and self.overwrite:
                raise UsageError(
                    f"overwrite with part={self.part}: parts that run at once would throw each "
                    "other's shards away; empty OUT before the first part, and leave overwrite out"
                )
            return
        for name in ("order", "part", "seed"):
            if value := getattr(self, name):
                raise UsageError(f"{name}={value} is for a set: give shards as well")

    def _check_companions(self) -> None:
        """Refuse options that would be ignored: the user believes that they do something."""
        self._check_set()
        if self.store == "original":
            for name, usual in (
                ("size", "auto"),
                ("fit", "stretch"),
                ("masks", None),
                ("annotation_masks", False),
            ):
                if getattr(self, name) != usual:
                    raise UsageError(
                        f"{name}={getattr(self, name)} with store=original: the files' own bytes "
                        f"keep their size; leave {name} out, or take store=jpeg"
                    )
        elif self.non_jpeg != "refuse":
            raise UsageError(
                f"non_jpeg={self.non_jpeg} is for store=original; with store={self.store} "
                "every format is taken: leave it out"
            )
        if self.mask_fill != 0 and self.fit != "pad":
            raise UsageError(
                f"mask_fill={self.mask_fill} fills the borders of letterboxed masks, and "
                f"fit={self.fit} makes none: leave it out, or take fit=pad"
            )
        if self.masks is not None and self.annotation_masks:
            raise UsageError(f"masks={self.masks} and annotation_masks: an item has one mask")
        if self.annotations is not None and self.manifest is not None:
            raise UsageError(
                f"annotations={self.annotations} and manifest={self.manifest} both list the "
                "images: give one of them"
            )
        if self.label_delimiter == "":
            raise UsageError("label_delimiter='' is empty: give what stands between two classes")
        given = {
            name: value
            for name in ("label_column", "label_delimiter", "class_columns", "targets")
            if (value := getattr(self, name))
        }
        if len(given) > 1 and given.keys() & {"class_columns", "targets"}:
            said = [f"{k}={v if isinstance(v, str) else ' '.join(v)}" for k, v in given.items()]
            raise UsageError(
                f"{said[0]} beside {said[-1]}: an item has a class, several, or numbers to "
                "predict, leave one of them out"
            )
        if self.quality != 90 and self.store in ("raw", "yuv420"):
            raise UsageError(
                f"quality={self.quality} is for encoding JPEG, and store={self.store} keeps "
                "pixels: leave it out, or take store=jpeg"
            )


def field_specs(options: PackOptions, size: tuple[int, int] | None) -> tuple[FieldSpec, ...]:
    """Return the fields of a file of `size` (height, width) pixels; None with store=original."""
    if size is None:
        return (images_spec("original", 0, 0, "keep"),)
    height, width = size
    if options.fit == "keep" and height != width:
        raise UsageError(f"size={height}x{width} with fit=keep: give one number, the short side")
    if options.store == "yuv420" and (height % 2 or width % 2):
        raise UsageError(f"size={height}x{width} with store=yuv420: both sides must be even")
    images = images_spec(options.store, height, width, options.fit)
    if options.masks is not None or options.annotation_masks:
        return (images, masks_spec(images))
    if options.mask_fill != 0:
        raise UsageError(
            f"mask_fill={options.mask_fill} without masks: leave it out, or give masks"
        )
    return (images,)


def _among(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not one of {', '.join(choices)}")


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is not a whole number")


def _in_range(name: str, value: int, least: int, most: int) -> None:
    _whole(name, value)
    if not least <= value <= most:
        raise UsageError(f"{name}={value} is out of range: give {least} to {most}")
