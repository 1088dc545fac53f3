"""`H5Dataset`: a packed file where torchvision's ImageFolder was."""

import operator
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from h5feed.errors import UsageError
from h5feed.feed.fields import Fields, ItemColumns, Target, field_value, select_items, target_names
from h5feed.feed.files import FilePath, PackedFiles, expand_paths
from h5feed.feed.image import (
    Aspect,
    Output,
    first_squeezed,
    image_reader,
    mask_reader,
)
from h5feed.feed.imagefolder import (
    FixedDict,
    FixedList,
    StandardTransform,
    cannot_edit,
    check_imagefolder_arguments,
    is_of_torchvision_v2,
    short_name,
)
from h5feed.feed.options import check_whole
from h5feed.jpeg import MAX_PIXELS

__all__ = ["H5Dataset", "checked_keys"]

Transform = Callable[[Any], Any]
Transforms = Callable[[Any, Any], tuple[Any, Any]]
Value = TypeVar("Value")
# What __setstate__ makes anew rather than pickling it.
_REMADE = ("_image", "_target", "_lists")

_FIXED = ("classes", "class_to_idx", "targets", "samples", "imgs")


class H5Dataset(Dataset[tuple[Any, Any]]):
    """Map-style dataset over one or several packed files; `ds[i]` is `(image, label)`.

    With `output="tensor"` the image is uint8 (C, H, W) in channels_last memory, and for
    `store=raw` a view of the file: no pixel is copied. Transforms and you may write into it all
    the same: reading the item again later gives the file's pixels. From the first write on, images
    are copies, about 7 to 30 µs for 256² pixels. (Two views of one item that were both taken
    before the first write are the same memory.) With `output="numpy"` the image is a read-only
    uint8 (H, W, C) view, with `output="pil"` a PIL image, with `output="tv_tensor"` the tensor as
    torchvision's `tv_tensors.Image`, and a mask as int64 `tv_tensors.Mask`.

    The label is an int; or a float32 tensor (K,) where the file has several targets an item;
    or, where it has masks, the item's mask: uint8 (H, W) in the same output. With
    `keys=("pixel_values", "labels")` a sample is a dict of these two.

    >>> ds = H5Dataset("photos.h5")
    >>> image, label = ds[0]
    >>> image.shape, image.dtype, label
    (torch.Size([3, 64, 64]), torch.uint8, 0)
    >>> len(ds), ds.targets[:4]
    (12, [0, 1, 0, 1])

    It has ImageFolder's arguments in their order, and its attributes. The lists are read-only: to
    leave items out use `torch.utils.data.Subset` (or `H5Loader(indices=)`), to change labels
    `target_transform`; `ds.targets.copy()` is a list of your own.

    It pickles as paths, options and transforms, and can be used under fork, spawn, forkserver and
    threads, opened before or after.
    """

    def __init__(
        self,
        root: FilePath | Sequence[FilePath],
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        loader: Callable[[str], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        transforms: Transforms | None = None,
        output: Output | None = None,
        aspect: Aspect | None = None,
        target_dtype: torch.dtype | None = None,
        keys: tuple[str, str] | None = None,
        target: Target = None,
        image_root: FilePath | None = None,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        """Open `root`: a packed file, a set's folder, a pattern, or a list of files packed alike.

        `transform` is called on each image and `target_transform` on each label or mask, or in
        the place of both `transforms` on (image, target), as in torchvision.

        `output` is the type of the images. By default a transform gets PIL images, as
        ImageFolder's does (torchvision's v2 ones given as `transforms`: tv_tensors, by which they
        tell a mask from an image), and without any you get tensors. Transforms that take tensors
        are faster on `output="tensor"`.

        `loader`, `is_valid_file` and `allow_empty` stand where ImageFolder has them. Images come
        from the packed file: torchvision's own loaders mean `output="pil"`, and others are
        refused, as is `is_valid_file`. Classes without images are kept as they were packed.

        `aspect="source"` undoes what `--fit` did to an image's proportions: it resizes a stretched
        one (short side as stored) and cuts a padded one out of its letterbox; then images have
        different sizes. `aspect="stored"` hands images out as they lie in the file. By default
        it is "source" with `output="pil"`, as ImageFolder's images are, and with "tv_tensor";
        else "stored"; but a transform never meets squeezed images unless `aspect="stored"` says
        so, and the first that `ds[i]` gives otherwise comes with a warning. H5Loader needs none
        of this.

        `target_dtype` is the type that labels and masks are converted to before `target_transform`
        is called: most losses want masks as torch.int64, and they are stored as uint8, an eighth
        of the bytes. Class numbers are then tensors without axes.

        `keys` names image and target: `ds[i]` is then a dict, which Hugging Face's Trainer takes.

        `target` says what comes beside the image: "label", "mask", or the name of a further field
        (see `fields`). Several names, or "all", make it a dict of them. Arrays are then tensors
        (numpy arrays with `output="numpy"`), one number is a Python number, text is str. Boxes
        and keypoints lie in the image as `ds[i]` gives it; with `output="tv_tensor"` they are
        torchvision's BoundingBoxes and KeyPoints.

        `image_root` is the folder that was packed: the paths of `samples` then begin with it, and
        open.

        `max_pixels` is the most that an image may be stored at: what a file says of its images
        decides how much memory is asked for, before anything is decoded.

        Raises FileNotFoundError, H5FormatError where a file is not a sound h5feed file or has a
        larger image, and UsageError for a wrong argument.
        """
        check_imagefolder_arguments(loader, is_valid_file)
        if output is None and loader is not None:
            output = "pil"
        if output is not None:
            _check_choice("output", output, get_args(Output))
        if aspect is not None:
            _check_choice("aspect", aspect, get_args(Aspect))
        check_whole(1, max_pixels=max_pixels)
        if target_dtype is not None and not isinstance(target_dtype, torch.dtype):
            raise UsageError(
                f"target_dtype={target_dtype!r} is not a dtype of torch: give torch.int64"
            )
        self._given_output: Output | None = output
        self._given_aspect: Aspect | None = aspect
        self._warned = False
        self._target_dtype = target_dtype
        self._keys = checked_keys(keys)
        self._image_root = _checked_image_root(image_root)
        self.max_pixels = max_pixels
        self.files = PackedFiles(expand_paths(root), max_pixels=max_pixels)
        self._named_targets = target_names(target, self.files)
        self._lists: dict[str, Any] = {}
        self._transform: Transform | None = None
        self._target_transform: Transform | None = None
        self._transforms: Transforms | None = None
        self._proven = False
        self._bind()
        self.transform = transform
        self.target_transform = target_transform
        if transforms is not None:
            self.transforms = transforms

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        at = self._plain(index)
        if self._warns:
            self._warn_squeezed("ds[i]")  # its caller may transform the images
        image, target = self._image(at), self._target(at)
        if self.image_transform is not None:
            image, target = self._transformed(image, target)
        if self._target_transform is not None:
            target = self._target_transform(target)
        if self._keys is None:
            return image, target
        return {self._keys[0]: image, self._keys[1]: target}

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, after telling the kernel which bytes they need.

        What H5Loader's `batch_sampler` gave goes through to its `collate_fn`.
        """
        if getattr(indices, "samples", None) is not None:
            return indices  # type: ignore[return-value]
        plain = [self._plain(index) for index in indices]
        self.files.announce(plain)
        return [self[at] for at in plain]

    @property
    def output(self) -> Output:
        """What an image is handed out as."""
        if self._given_output is not None:
            return self._given_output
        if self._transforms is not None and is_of_torchvision_v2(self._transforms):
            return "tv_tensor"
        return "tensor" if self.image_transform is None else "pil"

    @property
    def aspect(self) -> Aspect:
        """Whether images come as they are stored, or in their source's proportions."""
        if self._given_aspect is not None:
            return self._given_aspect
        return "source" if self.output in ("pil", "tv_tensor") else "stored"

    @property
    def target_dtype(self) -> torch.dtype | None:
        """What labels and masks are handed out as; None is as they are stored."""
        return self._target_dtype

    @property
    def keys(self) -> tuple[str, str] | None:
        """The names of image and target in a sample; None where a sample is a tuple."""
        return self._keys

    @property
    def target(self) -> str | tuple[str, ...] | None:
        """What comes beside the image: a name, several, or None for the mask or else the label."""
        return self._named_targets

    @property
    def fields(self) -> Fields:
        """The further fields that were packed, such as boxes and captions, by name.

        `ds.fields["caption"][i]` reads that item's value alone.
        """
        return self._once("fields", lambda: Fields(self.files))

    def select(self, condition: Callable[[ItemColumns], Any]) -> npt.NDArray[np.int64]:
        """Return the items for which `condition` is true: int64 (n,), in their order.

        `condition` gets the columns of all items by name, as arrays: "label", "class", "key", the
        source's "width" and "height", and every further field. For `torch.utils.data.Subset`, or
        H5Loader's `indices`.

        >>> ds = H5Dataset("photos.h5")
        >>> ds.select(lambda columns: (columns["class"] == "cat") & (columns["width"] >= 64))
        array([ 0,  2,  4,  6,  8, 10])

        Raises UsageError where there is no such column, or what comes is not an array of booleans.
        """
        return select_items(self.files, condition)

    @property
    def root(self) -> str | list[str]:
        """The packed file, as an absolute path; a list of several."""
        paths = self.files.paths
        return paths[0] if len(paths) == 1 else list(paths)

    @property
    def image_root(self) -> str | None:
        """The folder that the paths of `samples` begin with, where one was given."""
        return self._image_root

    @property
    def transform(self) -> Transform | None:
        """The function called on each image; may be replaced at any time."""
        return self._transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self._check_transform("transform", transform)
        self._transform = transform
        self._bind()

    @property
    def target_transform(self) -> Transform | None:
        """The function called on each label or mask; may be replaced at any time."""
        return self._target_transform

    @target_transform.setter
    def target_transform(self, target_transform: Transform | None) -> None:
        _check_callable("target_transform", target_transform)
        if target_transform is not None and self._transforms is not None:
            raise _one_or_the_other("target_transform")
        self._target_transform = target_transform

    @property
    def transforms(self) -> Transforms | None:
        """The function called on (image, target): `transforms`, or both of the separate ones.

        None if none was given. May be replaced at any time.
        """
        if self._transforms is None and (self.transform or self.target_transform):
            return StandardTransform(self.transform, self.target_transform)
        return self._transforms

    @transforms.setter
    def transforms(self, transforms: Transforms | None) -> None:
        if isinstance(transforms, StandardTransform):  # what another dataset's `transforms` gave
            self._transforms = None
            self.transform = transforms.transform
            self.target_transform = transforms.target_transform
            return
        if transforms is not None and (self.transform or self.target_transform):
            raise _one_or_the_other("transform" if self.transform else "target_transform")
        self._check_transform("transforms", transforms)
        self._transforms = transforms
        self._bind()

    @property
    def image_transform(self) -> Transform | Transforms | None:
        """Whichever of `transform` and `transforms` images pass through; None where neither."""
        return self._transforms if self._transforms is not None else self._transform

    @property
    def images(self) -> Tensor:
        """The whole field as one uint8 tensor (N, C, H, W), channels_last, without a copy.

        Each access returns a tensor of its own: writing to it changes no other, no item and not the
        file. Images that packing squeezed come as they are stored, with the
        warning that `ds[i]` gives. Raises UsageError for anything but one raw file whose images
        have one size, for squeezed ones with `aspect="source"`, and where the system gives no
        memory that is copied on write.
        """
        spec = self.files.specs["images"]
        if spec.encoding != "raw" or not spec.is_fixed or not self.files.is_single:
            raise UsageError(
                f"images is one tensor only for a single file with store=raw and images of one "
                f"size; {self.files.name} has store={spec.encoding}, fit={spec.fit}; use ds[i]"
            )
        if self._warns:
            self._warn_squeezed("images")
        elif self.aspect == "source" and (squeezed := self._squeezed()):
            raise UsageError(f"images, which is one tensor of one size, would be {squeezed}")
        try:
            whole = self.files.writable_whole("images")
        except OSError as ex:
            raise UsageError(
                f"images needs memory that is copied on write, and the system gives none for "
                f"{self.files.name} ({ex.strerror}; vm.overcommit_memory=2?); use ds[i]"
            ) from ex
        return torch.from_numpy(whole.transpose(0, 3, 1, 2))

    @property
    def classes(self) -> list[str]:
        """Class names in the order of their numbers."""
        return self._once("classes", lambda: FixedList("classes", self.files.classes))

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class number by name."""
        return self._once(
            "class_to_idx",
            lambda: FixedDict("class_to_idx", {c: i for i, c in enumerate(self.classes)}),
        )

    @property
    def targets(self) -> Any:
        """Class number of each item, −1 where there is none; or a float32 array (N, K).

        With `classes`, that has 1 for each of the K classes of an item of several.
        A list, made at the first use; it and the array are read-only.
        """
        if not self.files.label_shape:
            return self._once("targets", lambda: FixedList("targets", self.files.labels.tolist()))

        def make() -> npt.NDArray[Any]:
            fixed: npt.NDArray[Any] = self.files.labels.view()
            fixed.flags.writeable = False
            return fixed

        return self._once("targets", make)

    @property
    def samples(self) -> list[tuple[str, Any]]:
        """(source path, label) of each item; the path is relative to the packed folder.

        With `image_root` it begins with that. A read-only list, made at the first use: about 1 µs
        and 200 bytes an item.
        """

        def make() -> list[tuple[str, Any]]:
            paths = self.files.keys()
            if self._image_root is not None:
                paths = [os.path.join(self._image_root, path) for path in paths]
            return FixedList("samples", zip(paths, self.targets, strict=True))

        return self._once("samples", make)

    @property
    def imgs(self) -> list[tuple[str, Any]]:
        """The same as `samples`, as in torchvision."""
        return self.samples

    @property
    def loader(self) -> Callable[[str], Any]:
        """Function that makes the image of a path of `samples`, from the packed file.

        For code that takes ImageFolder's `samples` and `loader` apart.
        """
        return self._load

    @property
    def extensions(self) -> tuple[str, ...]:
        """The lower-case extensions of the images that were packed, such as (".jpg", ".png")."""

        def make() -> tuple[str, ...]:
            return tuple(sorted({os.path.splitext(path)[1].lower() for path, _ in self.samples}))

        return self._once("extensions", make)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED:
            raise cannot_edit(name)
        found = getattr(type(self), name, None)
        if isinstance(found, property) and found.fset is None:
            raise UsageError(
                f"{name} cannot be changed, for it says how the packed file is read: make another "
                "H5Dataset"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        spec = self.files.specs["images"]
        size = f"{spec.height}x{spec.width}, " if spec.is_fixed else ""
        lines = [
            f"Dataset {type(self).__name__}",
            f"Number of datapoints: {len(self)}",
            f"Root location: {self.files.name}",
            f"Classes: {len(self.classes)}",
            f"Stored: {size}store={spec.encoding}, fit={spec.fit}",
            f"Output: {self.output}, aspect={self.aspect}",
            *self.extra_repr().splitlines(),
            *([] if self.transforms is None else repr(self.transforms).splitlines()),
        ]
        return "\n    ".join(lines)

    def extra_repr(self) -> str:
        """Return further lines of the repr; for subclasses, as in torchvision."""
        return ""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _REMADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lists = {}
        self._bind()

    def _bind(self) -> None:
        """Choose how an image and a target are read."""
        files = self.files
        self._image = image_reader(files, "images", output=self.output, aspect=self.aspect)
        self._target = self._target_reader()
        unasked = self._given_aspect is None and self.aspect == "stored"
        self._warns = unasked and not self._warned

    def _target_reader(self) -> Callable[[int], Any]:
        names = self._named_targets
        if names is None:
            return self._value_reader("mask" if "masks" in self.files.specs else "label")
        if isinstance(names, str):
            return self._value_reader(names)
        readers = {name: self._value_reader(name) for name in names}
        return lambda index: {name: read(index) for name, read in readers.items()}

    def _value_reader(self, name: str) -> Callable[[int], Any]:
        """Return what reads one item's label, mask or further field."""
        if name in self.files.field_types:
            return field_value(self.files, name, self.output, self.aspect)
        dtype, row = self.target_dtype, partial(self.files.row, "labels")
        if name == "mask":
            return mask_reader(self.files, output=self.output, aspect=self.aspect, dtype=dtype)
        if self.files.label_shape:
            return lambda index: torch.tensor(row(index), dtype=dtype)
        if dtype is not None:
            return lambda index: torch.tensor(row(index).item(), dtype=dtype)
        return self.files.labels.item if self.files.in_order else lambda index: row(index).item()

    def _load(self, path: str) -> Any:
        numbers = self._once("numbers", lambda: {p: i for i, (p, _) in enumerate(self.samples)})
        at = numbers.get(path)
        if at is None:
            raise UsageError(
                f"loader({path!r}): {self.files.name} has no image of that path; it takes the "
                "paths of ds.samples"
            )
        if len(numbers) < len(self):
            raise UsageError(
                f"loader({path!r}): some images of {self.files.name} have the same path, which "
                "tells none of them; use ds[i]"
            )
        return self._image(at)

    def _transformed(self, image: Any, target: Any) -> tuple[Any, Any]:
        """Return both after `transforms`, or after `transform` what that makes of the image."""
        joint, alone = self._transforms, self._transform
        try:
            if joint is not None:
                image, target = joint(image, target)
            elif alone is not None:
                image = alone(image)
        except (TypeError, AttributeError) as ex:
            if self._proven:
                raise  # it has taken such images before
            name = "transform" if joint is None else "transforms"
            others = [f'"{key}" for {what}' for key, what in _GIVEN.items() if key != self.output]
            raise UsageError(
                f"{name}={short_name(self.image_transform)} does not take what "
                f"output={self.output!r} gives ({ex}): give output={' or '.join(others)}"
            ) from ex
        self._proven = True
        return image, target

    def _check_transform(self, name: str, given: Any) -> None:
        """Refuse a transform that is not callable, is given twice, or would see squeezed images."""
        _check_callable(name, given)
        if given is None:
            return
        if name == "transform" and self._transforms is not None:
            raise _one_or_the_other("transform")
        gives_stored = self._given_output in ("tensor", "numpy") and self._given_aspect is None
        if gives_stored and (squeezed := self._squeezed()):
            raise UsageError(
                f'{name} would see {squeezed}; output="pil" gives PIL images in true proportions, '
                "as ImageFolder does"
            )
        self._proven = False

    def _squeezed(self) -> str | None:
        """Say that images come squeezed, by the first that does; None where none does."""
        at = first_squeezed(self.files)
        if at is None:
            return None
        spec, (height, width) = self.files.specs["images"], self.files.row("source_shapes", at)
        return (
            f"squeezed images: {self.files.name} has fit=stretch, which stores item {at} of "
            f"{height}x{width} as {spec.height}x{spec.width}; give "
            'aspect="source" for images in true proportions from ds[i], or aspect="stored" for the '
            "squeezed ones as they are"
        )

    def _warn_squeezed(self, what: str) -> None:
        """Warn once if `what` returns squeezed images without having been asked to."""
        self._warned, self._warns = True, False
        if squeezed := self._squeezed():
            warnings.warn(f"{what} gives {squeezed}", stacklevel=3)

    def _plain(self, index: int) -> int:
        """Return 0 ≤ index < N for an index that may count from the end."""
        at, count = operator.index(index), len(self.files)
        if not -count <= at < count:
            raise IndexError(f"index {at} is out of range for {count} items")
        return at + count if at < 0 else at

    def _once(self, name: str, make: Callable[[], Value]) -> Value:
        if name not in self._lists:
            self._lists[name] = make()
        found: Value = self._lists[name]
        return found


_GIVEN: dict[Output, str] = {
    "pil": "PIL images, as ImageFolder gives them",
    "numpy": "uint8 arrays (H, W, C)",
    "tensor": "uint8 tensors (C, H, W)",
}


def _check_callable(name: str, given: Any) -> None:
    if given is not None and not callable(given):
        raise UsageError(f"{name}={given!r} is not a function: give a function, or leave it out")


def _one_or_the_other(name: str) -> UsageError:
    return UsageError(
        f"{name} beside transforms: give transforms alone, called on (image, target), or transform "
        "and target_transform"
    )


def checked_keys(keys: Any) -> tuple[str, str] | None:
    """Return the names of image and target; UsageError for what are no two names."""
    if keys is None:
        return None
    names = tuple(keys) if isinstance(keys, Sequence) and not isinstance(keys, str) else ()
    if len(set(names)) != 2 or len(names) != 2 or not all(isinstance(n, str) and n for n in names):
        raise UsageError(
            f"keys={keys!r} is not two names, of image and target: give "
            'keys=("pixel_values", "labels")'
        )
    return names[0], names[1]


def _checked_image_root(image_root: FilePath | None) -> str | None:
    if image_root is None:
        return None
    folder = os.path.expanduser(os.fspath(image_root))
    if not Path(folder).is_dir():
        raise UsageError(
            f"image_root={folder!r} is not a folder: give the folder that was packed, or leave it "
            "out"
        )
    return folder


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not one of {', '.join(choices)}")
