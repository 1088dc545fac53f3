"""What code that had an ImageFolder asks a packed file for: its arguments, its lists, its repr."""

from collections.abc import Callable, Iterable
from typing import Any

from h5feed.errors import UsageError

__all__ = [
    "FixedDict",
    "FixedList",
    "StandardTransform",
    "cannot_edit",
    "check_imagefolder_arguments",
    "is_of_torchvision_v2",
    "short_name",
]


def short_name(value: Any) -> str:
    """Return the name of a function, or that of an object's class."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return str(name)


def check_imagefolder_arguments(loader: Any, is_valid_file: Any) -> None:
    """Refuse ImageFolder's arguments that would do nothing here."""
    if loader is not None and getattr(loader, "__module__", "") != "torchvision.datasets.folder":
        raise UsageError(
            f"loader={short_name(loader)} would never be called, for images come from the packed "
            'file: leave it out, and say by output="tensor", "pil", "numpy" or "tv_tensor" what '
            "they are"
        )
    if is_valid_file is not None:
        raise UsageError(
            f"is_valid_file={short_name(is_valid_file)} cannot leave items out of a packed file: "
            "use torch.utils.data.Subset(ds, [i for i, (path, _) in enumerate(ds.samples) if "
            "is_valid_file(path)])"
        )


def is_of_torchvision_v2(transform: Any) -> bool:
    """Whether it is one of torchvision's v2 transforms, which take a plain tensor for an image."""
    return type(transform).__module__.startswith("torchvision.transforms.v2")


class StandardTransform:
    """`transform` and `target_transform` as one function of (image, target), as torchvision has."""

    def __init__(
        self, transform: Callable[[Any], Any] | None, target_transform: Callable[[Any], Any] | None
    ) -> None:
        self.transform = transform
        self.target_transform = target_transform

    def __call__(self, image: Any, target: Any) -> tuple[Any, Any]:
        """Return both, each after its own."""
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __repr__(self) -> str:
        lines = ["StandardTransform"]
        both = {"Transform: ": self.transform, "Target transform: ": self.target_transform}
        for head, each in both.items():
            if each is not None:
                lines.append(head + repr(each).replace("\n", "\n" + " " * len(head)))
        return "\n".join(lines)


def cannot_edit(name: str) -> UsageError:
    """Return the error for who edits what comes from the file."""
    return UsageError(
        f"{name} cannot be edited, for ds[i] and loaders read the packed file: to leave items out "
        "use torch.utils.data.Subset(ds, indices) or H5Loader(ds, ..., indices=), to change labels "
        f"target_transform; {name}.copy() is one of your own"
    )


def _refuse_edit(self: Any, *_: Any, **__: Any) -> Any:
    raise cannot_edit(self.name)


_refuse: Any = _refuse_edit


class FixedList(list[Any]):
    """A list that refuses to be edited. Copies of it, pickled ones too, are plain lists."""

    __slots__ = ("name",)

    def __init__(self, name: str, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


class FixedDict(dict[str, int]):
    """The same of a dict, which json.dumps takes as one."""

    __slots__ = ("name",)

    def __init__(self, name: str, values: dict[str, int]) -> None:
        super().__init__(values)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    clear = pop = popitem = setdefault = update = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse
