"""`H5Dataset`: a packed file where torchvision's ImageFolder was."""

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from h5feed.errors import UsageError
from h5feed.feed.files import FilePath, PackedFiles, expand_paths
from h5feed.feed.image import (
    Aspect,
    Output,
    first_squeezed,
    image_reader,
    in_dtype,
)
from h5feed.feed.options import check_whole
from h5feed.jpeg import MAX_PIXELS

__all__ = ["H5Dataset"]

Transform = Callable[[Any], Any]
Value = TypeVar("Value")
# What __setstate__ makes anew rather than pickling it.
_REMADE = ("_image", "_target", "_lists")

_FIXED = ("classes", "class_to_idx", "targets", "samples", "imgs")


class H5Dataset(Dataset[tuple[Any, Any]]):
    """Map-style dataset over one or several packed files; `ds[i]` is `(image, label)`.

    With `output="tensor"` the image is uint8 (C, H, W) in channels_last memory, and for
    `store=raw` a view of the file: no pixel is copied. Transforms and you may write into it all
    the same: whoever reads the item later gets the file's pixels. From the first write on, images
    are copies, about 7 to 30 µs for 256² pixels. (Two views of one item that were both taken
    before the first write are the same memory.) With `output="numpy"` the image is a read-only
    uint8 (H, W, C) view, with `output="pil"` a PIL image.

    The label is an int; or a float32 tensor (K,) where the file has several targets an item;
    or, where it has masks, the item's mask: uint8 (H, W) in the same output.

    >>> ds = H5Dataset("photos.h5")
    >>> image, label = ds[0]
    >>> image.shape, image.dtype, label
    (torch.Size([3, 64, 64]), torch.uint8, 0)
    >>> len(ds), ds.targets[:4]
    (12, [0, 1, 0, 1])

    It has ImageFolder's attributes, which are read-only: to leave items out use
    `torch.utils.data.Subset` (or `H5Loader(indices=)`), to change labels `target_transform`;
    `ds.targets.copy()` is a list of your own.

    It pickles as paths, options and transforms, and can be used under fork, spawn, forkserver and
    threads, opened before or after.
    """

    def __init__(
        self,
        path: FilePath | Sequence[FilePath],
        *,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        output: Output = "tensor",
        aspect: Aspect | None = None,
        target_dtype: torch.dtype | None = None,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        """Open `path`: a file, a glob pattern, or a sequence of files packed alike.

        `transform` is called on each image and `target_transform` on each label or mask, as in
        torchvision.

        `aspect="source"` undoes what `--fit` did to an image's proportions: it resizes a stretched
        one (short side as stored) and cuts a padded one out of its letterbox; then images have
        different sizes. `aspect="stored"` hands images out as they lie in the file. By default
        it is "source" with `output="pil"`, as ImageFolder's images are, and else "stored"; but a
        `transform` never meets squeezed images unless `aspect="stored"` says so, and the first
        that `ds[i]` gives otherwise comes with a warning. H5Loader needs none of this.

        `target_dtype` is what labels and masks are made before `target_transform` gets them: most
        losses want masks as torch.int64, and they are stored as uint8, an eighth of the bytes.
        Class numbers are then tensors without axes.

        `max_pixels` is the most that an image may be stored at: what a file says of its images
        decides how much memory is asked for, before anything is decoded.

        Raises FileNotFoundError, H5FormatError where a file is not a sound h5feed file or has a
        larger image, and UsageError for a wrong argument.
        """
        _check_choice("output", output, get_args(Output))
        if aspect is not None:
            _check_choice("aspect", aspect, get_args(Aspect))
        check_whole(1, max_pixels=max_pixels)
        if target_dtype is not None and not isinstance(target_dtype, torch.dtype):
            raise UsageError(
                f"target_dtype={target_dtype!r} is no dtype of torch: give torch.int64"
            )
        self._output: Output = output
        self._given_aspect: Aspect | None = aspect
        self._unasked = self.aspect == "stored" and aspect is None
        self._warns = self._unasked
        self._target_dtype = target_dtype
        self.max_pixels = max_pixels
        self.pixels = PackedFiles(expand_paths(path), max_pixels=max_pixels)
        self._lists: dict[str, Any] = {}
        self.transform = transform
        self.target_transform = target_transform
        self._bind()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        at = self._plain(index)
        if self._warns:
            self._warn_squeezed("ds[i]")  # for whoever transforms what comes from here
        image = self._image(at)
        if self.transform is not None:
            image = self.transform(image)
        target = self._target(at)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return several samples, after telling the kernel which bytes they need."""
        plain = [self._plain(index) for index in indices]
        self.pixels.announce(plain)
        return [self[at] for at in plain]

    @property
    def output(self) -> Output:
        """What an image is handed out as."""
        return self._output

    @property
    def aspect(self) -> Aspect:
        """Whether images come as they are stored, or in their source's proportions."""
        if self._given_aspect is not None:
            return self._given_aspect
        return "source" if self.output == "pil" else "stored"

    @property
    def target_dtype(self) -> torch.dtype | None:
        """What labels and masks are handed out as; None is as they are stored."""
        return self._target_dtype

    @property
    def transform(self) -> Transform | None:
        """Called on each image; may be replaced at any time."""
        return self._transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        if transform is not None and self._unasked and (squeezed := self._squeezed()):
            raise UsageError(f"transform would see {squeezed}")
        self._transform = transform

    @property
    def images(self) -> Tensor:
        """The whole field as one uint8 tensor (N, C, H, W), channels_last, without a copy.

        Each access gives memory of its own: what is written into one is in no other, in no item
        and not in the file. Images that packing squeezed come as they are stored, with the
        warning that `ds[i]` gives. Raises UsageError for anything but one raw file whose images
        have one size, for squeezed ones with `aspect="source"`, and where the system gives no
        memory that is copied on write.
        """
        spec = self.pixels.specs["images"]
        if spec.encoding != "raw" or not spec.is_fixed or len(self.pixels.paths) > 1:
            raise UsageError(
                f"images is one tensor only for a single file with store=raw and images of one "
                f"size; {self.pixels.name} has store={spec.encoding}, fit={spec.fit}; use ds[i]"
            )
        if self._warns:
            self._warn_squeezed("images")
        elif self.aspect == "source" and (squeezed := self._squeezed()):
            raise UsageError(f"images, which is one tensor of one size, would be {squeezed}")
        try:
            whole = self.pixels.writable_whole("images")
        except OSError as ex:
            raise UsageError(
                f"images needs memory that is copied on write, and the system gives none for "
                f"{self.pixels.name} ({ex.strerror}; vm.overcommit_memory=2?); use ds[i]"
            ) from ex
        return torch.from_numpy(whole.transpose(0, 3, 1, 2))

    @property
    def classes(self) -> list[str]:
        """Class names in the order of their numbers."""
        return self._once("classes", lambda: _FixedList("classes", self.pixels.classes))

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class number by name."""
        return self._once(
            "class_to_idx",
            lambda: _FixedDict("class_to_idx", {c: i for i, c in enumerate(self.classes)}),
        )

    @property
    def targets(self) -> Any:
        """Class number of each item, −1 where there is none; or a float32 array (N, K).

        A list, made at the first use; it and the array are read-only.
        """
        labels = self.pixels.labels
        if labels.ndim == 1:
            return self._once("targets", lambda: _FixedList("targets", labels.tolist()))
        fixed = labels.view()
        fixed.flags.writeable = False
        return fixed

    @property
    def samples(self) -> list[tuple[str, Any]]:
        """(source path relative to the packed folder, label) of each item.

        A read-only list, made at the first use: about 1 µs and 200 bytes an item.
        """

        def make() -> list[tuple[str, Any]]:
            return _FixedList("samples", zip(self.pixels.keys(), self.targets, strict=True))

        return self._once("samples", make)

    @property
    def imgs(self) -> list[tuple[str, Any]]:
        """The same as `samples`, as in torchvision."""
        return self.samples

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED:
            raise _cannot_edit(name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        spec = self.pixels.specs["images"]
        size = f"{spec.height}x{spec.width}, " if spec.is_fixed else ""
        return (
            f"H5Dataset({self.pixels.name!r}: {len(self)} items, {len(self.classes)} classes, "
            f"{size}store={spec.encoding}, fit={spec.fit}, output={self.output})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _REMADE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lists = {}
        self._bind()

    def _bind(self) -> None:
        """Choose once how an image and a target are read."""
        pixels = self.pixels
        self._image = image_reader(pixels, "images", output=self.output, aspect=self.aspect)
        self._target = self._target_reader()

    def _target_reader(self) -> Callable[[int], Any]:
        dtype, labels = self.target_dtype, self.pixels.labels
        if "masks" in self.pixels.specs:
            read = image_reader(self.pixels, "masks", output=self.output, aspect=self.aspect)
            return read if dtype is None else in_dtype(read, dtype, self.output)
        if labels.ndim == 2:
            return lambda index: torch.tensor(labels[index], dtype=dtype)
        if dtype is not None:
            return lambda index: torch.tensor(labels.item(index), dtype=dtype)
        return labels.item

    def _squeezed(self) -> str | None:
        """Say that images come squeezed, by the first that does; None where none does."""
        at = first_squeezed(self.pixels)
        if at is None:
            return None
        spec, (height, width) = self.pixels.specs["images"], self.pixels.source_shapes[at]
        return (
            f"squeezed images: {self.pixels.name} has fit=stretch, which stores item {at} of "
            f"{height}x{width} as {spec.height}x{spec.width}; give "
            'aspect="source" for images in true proportions from ds[i], or aspect="stored" for the '
            "squeezed ones as they are"
        )

    def _warn_squeezed(self, what: str) -> None:
        """Warn, once, where `what` gives squeezed images that nobody asked for."""
        self._warns = False
        if squeezed := self._squeezed():
            warnings.warn(f"{what} gives {squeezed}", stacklevel=3)

    def _plain(self, index: int) -> int:
        """Return 0 ≤ index < N for an index that may count from the end."""
        at, count = operator.index(index), len(self.pixels)
        if not -count <= at < count:
            raise IndexError(f"index {at} is out of range for {count} items")
        return at + count if at < 0 else at

    def _once(self, name: str, make: Callable[[], Value]) -> Value:
        if name not in self._lists:
            self._lists[name] = make()
        found: Value = self._lists[name]
        return found


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not one of {', '.join(choices)}")


def _cannot_edit(name: str) -> UsageError:
    return UsageError(
        f"{name} cannot be edited, for ds[i] and loaders read the packed file: to leave items out "
        "use torch.utils.data.Subset(ds, indices) or H5Loader(ds, ..., indices=), to change labels "
        f"target_transform; {name}.copy() is one of your own"
    )


def _refuse_edit(self: Any, *_: Any, **__: Any) -> Any:
    raise _cannot_edit(self.name)


_refuse: Any = _refuse_edit


class _FixedList(list[Any]):
    """A list that refuses to be edited. Copies of it, pickled ones too, are plain lists."""

    __slots__ = ("name",)

    def __init__(self, name: str, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


class _FixedDict(dict[str, int]):
    """The same of a dict, which json.dumps takes as one."""

    __slots__ = ("name",)

    def __init__(self, name: str, values: dict[str, int]) -> None:
        super().__init__(values)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    clear = pop = popitem = setdefault = update = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse
