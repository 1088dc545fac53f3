"""What is to be packed: from SRC, a folder, files or a dataset, to items and their images."""

import glob
import hashlib
import operator
import os
import pickle
import re
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from h5feed.errors import PackError, UsageError
from h5feed.optional import require
from h5feed.packing.annotations import (
    coco_outlines,
    count_others,
    draw_mask,
    find_layout,
    read_annotations,
)
from h5feed.packing.arrow import is_hugging_face, open_hugging_face, open_parquets
from h5feed.packing.decode import DAMAGED, DecodeError, decode_mask, image_to_rgb, read_file
from h5feed.packing.items import (
    EXTENSIONS,
    FURTHER_EXTENSIONS,
    ClassOrder,
    ImageSource,
    Table,
    file_status,
    sorted_classes,
)
from h5feed.packing.manifest import first_columns, read_manifest
from h5feed.packing.tables import ColumnOptions
from h5feed.packing.tars import open_tars
from h5feed.progress import Progress
from h5feed.store.fields import FieldValues
from h5feed.system import is_out_of_memory
from h5feed.text import counted

__all__ = ["DatasetSource", "FolderSource", "Label", "names_files", "open_source"]

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
_NUMBERED = re.compile(r"[-_.]?\d.*|\.(?:tar|parquet)$")
_SPLIT = re.compile("train|training|val|valid|validation|test|testing", re.IGNORECASE)
_MASK_EXTENSIONS = (
    ".png", ".tif", ".tiff", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".jpg", ".jpeg",
)  # fmt: skip
_MASK_ENDS = _MASK_EXTENSIONS + tuple(end.upper() for end in _MASK_EXTENSIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource(ImageSource):
    """Images that are files below a folder and, where there are any, their masks."""

    root: Path
    mask_root: Path | None = None
    mask_ends: npt.NDArray[np.uint8] | None = None
    """(N,) which of `_MASK_ENDS` each item's mask has."""
    outlines: FieldValues | None = None
    """What masks are drawn of, where they are not files."""

    def path(self, index: int) -> bytes:
        """Return the path of an item's image."""
        return os.path.join(os.fsencode(self.root), self.key(index))

    def read(self, index: int, *, max_pixels: int, most: int | None = None) -> bytes:
        """Return the bytes of an item's file, the first `most` of them."""
        return read_file(self.path(index), max_pixels=max_pixels, most=most)

    def mask_path(self, index: int) -> bytes | None:
        """Return the path of an item's mask; None in a source without masks."""
        if self.mask_root is None or self.mask_ends is None:
            return None
        end = _MASK_ENDS[self.mask_ends[index]]
        return os.path.join(os.fsencode(self.mask_root), _stem(self.key(index)) + end.encode())

    def bytes_of(self, index: int) -> int:
        """Return how large an item's image file is; 0 where it is gone."""
        try:
            return os.stat(self.path(index)).st_size
        except OSError:
            return 0

    def mask(self, index: int, *, max_pixels: int) -> npt.NDArray[np.uint8] | None:
        """Return an item's mask, decoded or drawn; None in a source without masks."""
        if self.outlines is not None:
            return draw_mask(self.outlines.item(index), max_pixels=max_pixels)
        path = self.mask_path(index)
        if path is None:
            return None
        return decode_mask(read_file(path, max_pixels=max_pixels), max_pixels=max_pixels)

    def statuses(self) -> Iterator[bytes]:
        """Yield size and time of change of each image's file and its mask's, or its outlines."""
        for index in range(len(self)):
            mask = self.mask_path(index)
            status = file_status(self.path(index)) + (b"" if mask is None else file_status(mask))
            yield status + (b"" if self.outlines is None else bytes(self.outlines.item(index)))


def open_source(
    src: Any,
    *,
    manifest: str | os.PathLike[str] | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    label_delimiter: str | None = None,
    class_columns: Sequence[str] = (),
    targets: Sequence[str] = (),
    fields: Sequence[str] = (),
    classes: str | os.PathLike[str] | None = None,
    annotations: str | os.PathLike[str] | None = None,
    masks: str | os.PathLike[str] | None = None,
    annotation_masks: bool = False,
    extensions: Sequence[str] = EXTENSIONS,
    class_order: ClassOrder = "sorted",
    allow_empty: bool = False,
    num_workers: int | None = None,
    progress: bool = False,
) -> ImageSource:
    """Find the images of a folder, of tar or parquet files, or of a Hugging Face Dataset.

    Class folders follow torchvision's ImageFolder to the letter: sorted class names, nested
    files, links followed; class_order="natural" numbers them as timm does. A folder without
    subfolders is flat: its labels are −1. With `manifest` (csv, tsv, jsonl or parquet), or a
    metadata file with a column file_name in the folder, as Hugging Face has it, its rows say which
    files, in which order, with which labels; the options up to `fields` say what its columns are.
    `annotations` is COCO's JSON file, or a folder of VOC's XML files, about boxes in the images;
    a dataset of these that lies as it is published needs it not (see `find_layout`).
    `masks` is a folder that holds a file of the same relative stem for every image; with
    `annotation_masks` they are drawn of COCO's segmentations.

    Tar files (WebDataset's) and parquet files with a column of image bytes are given by their
    path, a list of paths, a pattern such as "train-{000..146}.tar" or "data/train-*.parquet", or
    the folder that holds nothing else.
    `num_workers` processes look into tars. `progress` says on stderr what is found, where that
    takes a while.

    Raises UsageError for an argument that names the wrong thing, PackError for what cannot
    be read.
    """
    wanted = ColumnOptions(
        path_column=path_column,
        label_column=label_column,
        label_delimiter=label_delimiter,
        class_columns=class_columns,
        targets=targets,
        fields=fields,
        classes=classes,
        class_order=class_order,
    )
    paths = () if is_hugging_face(src) else _containers(src)
    with Progress(None, "finding images", show=progress, brief=True) as bar:
        if is_hugging_face(src) or paths:
            kind = f"{paths[0].suffix} files" if paths else "a dataset"
            about = {
                "manifest": manifest,
                "annotations": annotations,
                "masks": masks,
                "annotation_masks": annotation_masks,
            }
            for name, value in about.items():
                if value:
                    raise UsageError(f"{name}={value} is about a folder, and SRC is {kind}")
            return _open_container(src, paths, wanted, extensions, num_workers, seen=bar.advance)
        folder, listed, note, own = Path(src), None, "", False
        if manifest is None and annotations is None and (found := find_layout(folder)):
            folder, annotations, listed = found
            note = f"read with their annotations: {annotations}"
        _check_folder(folder, "SRC")
        if manifest is None and annotations is None:
            manifest, note = _metadata(folder)
            own = manifest is not None
        if manifest is None:
            wanted.refuse("a manifest's columns: give one as well")
        if annotations is not None:
            table = read_annotations(Path(annotations), folder, listed=listed, seen=bar.advance)
        elif manifest is not None:
            table = read_manifest(Path(manifest), folder, wanted, seen=bar.advance)
        else:
            kinds = _Extensions(extensions)
            table = _read_folder(folder, kinds, class_order, allow_empty, seen=bar.advance)
    source = FolderSource(root=folder, **table.columns())
    if note:
        source = replace(source, notes=(note, *source.notes))
    if own and (others := count_others(folder, map(source.key, range(len(source))))):
        said = f"left out, in SRC and not in its manifest: {counted(others, 'image')}"
        source = replace(source, notes=(*source.notes, said))
    if annotation_masks:
        if annotations is None or not os.path.isfile(annotations):
            raise UsageError("annotation_masks draws COCO's segmentations: give its JSON file")
        require("pycocotools.mask", "coco")
        return replace(source, outlines=coco_outlines(Path(annotations)))
    if masks is None:
        return source
    with Progress(len(source), "finding masks", show=progress, brief=True) as bar:
        return _with_masks(source, Path(masks), seen=bar.advance)


def _metadata(folder: Path) -> tuple[Path | None, str]:
    """Return the folder's own manifest, as Hugging Face's ImageFolder has it, and what to say."""
    paths = [folder / f"metadata.{end}" for end in ("jsonl", "csv", "parquet")]
    found = [path for path in paths if path.is_file() and "file_name" in first_columns(path)]
    if not found:
        return None, ""
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise UsageError(
            f"SRC {str(folder)!r} holds {names}, each with a column file_name: keep one, or say "
            f"which, as --manifest {shlex.quote(str(found[0]))}"
        )
    return (
        found[0],
        f"read as the manifest: {found[0].name} in SRC, which has a column file_name",
    )


# --- tar and parquet files


def names_files(src: Any) -> bool:
    """Whether a source is a path, a pattern, or a list of paths: no dataset."""
    if isinstance(src, list | tuple) and src:
        return all(isinstance(path, str | os.PathLike) for path in src)
    return isinstance(src, str | os.PathLike)


def _open_container(
    src: Any,
    paths: Sequence[Path],
    wanted: ColumnOptions,
    extensions: Sequence[str],
    num_workers: int | None,
    *,
    seen: Callable[[], None],
) -> ImageSource:
    if not paths:
        return open_hugging_face(src, wanted, seen=seen)
    top = os.path.commonpath([os.path.abspath(path.parent) for path in paths])
    names = [os.path.relpath(path, top).replace(os.sep, "/") for path in paths]
    if paths[0].suffix == ".parquet":
        return open_parquets(paths, names, wanted, seen=seen)
    if wanted.path_column is not None:
        raise UsageError(
            f"path_column={wanted.path_column}: the images of a tar are its members; leave it out"
        )
    return open_tars(
        paths, names, wanted, extensions=extensions, num_workers=num_workers, seen=seen
    )


def _containers(src: Any) -> tuple[Path, ...]:
    """Return the tar or parquet files that SRC means, in order; () where it is a folder."""
    given = [src] if isinstance(src, str | os.PathLike) else list(src)
    if len(given) == 1 and os.path.isdir(given[0]):
        return _containers_in(Path(given[0]))
    found = [path for each in given for path in _matching(os.fspath(each))]
    missing = [path for path in found if path.suffix in (".tar", ".parquet") and not path.exists()]
    if missing:
        raise UsageError(f"SRC {str(missing[0])!r} does not exist")
    suffixes = sorted({path.suffix for path in found})
    if suffixes in ([".tar"], [".parquet"]):
        return tuple(found)
    if len(given) == len(found) == 1:
        return ()  # no folder either, which is said as such
    raise UsageError(
        f"SRC names files of {', '.join(map(repr, suffixes))}: give a folder, or files that are "
        "all .tar or all .parquet"
    )


def _matching(text: str) -> list[Path]:
    """Return the files of a pattern, sorted where it has * ? or [], in order where {a,b}."""
    if os.path.exists(text) or not re.search(r"[*?\[{]", text):
        return [Path(text)]
    found = []
    for name in _expanded(text):
        files = sorted(glob.glob(name)) if glob.has_magic(name) else [name]
        if not files or not os.path.exists(files[0]):
            raise UsageError(f"SRC {text!r}: there is no file {name!r}")
        found += files
    return [Path(name) for name in found]


def _expanded(text: str) -> Iterator[str]:
    """Yield the names that a pattern with braces stands for, as a shell does."""
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    first, last, parts = match.groups()
    if parts is not None:
        inner = parts.split(",")
    else:
        inner = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    for part in inner:
        yield from _expanded(text[: match.start()] + part + text[match.end() :])


def _containers_in(folder: Path) -> tuple[Path, ...]:
    """Return the tar or parquet files of a folder that has neither images nor other folders."""
    names, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name.endswith((".tar", ".parquet")):
                    names.append(entry.name)
                elif entry.name.lower().endswith(EXTENSIONS) or "metadata." in entry.name:
                    return ()
                if len(folders) > 1:
                    return ()
    except OSError as ex:
        raise _unreadable(ex) from ex
    if folders == ["data"] and not names:  # as on Hugging Face's hub
        return _containers_in(folder / "data")
    if not names or folders:
        return ()
    names.sort()
    starts = sorted({_NUMBERED.sub("", name) + "*" + Path(name).suffix for name in names})
    if len(starts) > 1:
        commands = [f"  pack-h5 {shlex.quote(str(folder / each))} OUT.h5" for each in starts]
        raise UsageError(
            f"SRC {str(folder)!r} holds several sets of files ({', '.join(starts)}); pack each by "
            "itself:",
            details="\n".join(commands),
        )
    return tuple(folder / name for name in names)


def _check_folder(folder: Path, what: str) -> None:
    if not folder.exists():
        raise UsageError(f"{what} {str(folder)!r} does not exist: give a folder")
    if not folder.is_dir():
        raise UsageError(f"{what} {str(folder)!r} is a file: give the folder it lies in")


def _with_masks(source: FolderSource, masks: Path, *, seen: Callable[[], None]) -> FolderSource:
    _check_folder(masks, "masks")
    ends = np.empty(len(source), np.uint8)
    for index in range(len(source)):
        key = source.key(index)
        number = _find_mask(os.path.join(os.fsencode(masks), _stem(key)))
        if number is None:
            raise UsageError(
                f"masks {str(masks)!r} has no mask for {os.fsdecode(key)!r}: it would be "
                f"{os.fsdecode(_stem(key) + b'.png')!r}, or the same with another extension"
            )
        ends[index] = number
        seen()
    return replace(source, mask_root=masks, mask_ends=ends)


def _stem(key: bytes) -> bytes:
    return os.path.splitext(key)[0]


def _find_mask(stem: bytes) -> int | None:
    """Return the number in `_MASK_ENDS` of the first mask that exists."""
    for number, end in enumerate(_MASK_ENDS):
        if os.path.isfile(stem + end.encode()):
            return number
    return None


# --- folders: of class folders, or flat; in torchvision's order


class _Extensions:
    """Which files are images, by their names; counts those that only --extensions would take."""

    def __init__(self, extensions: Sequence[str]) -> None:
        self.ends = tuple(extensions)
        self._others = tuple(end for end in FURTHER_EXTENSIONS if end not in self.ends)
        self._left = Counter[str]()

    def __contains__(self, name: str) -> bool:
        name = name.lower()
        if name.endswith(self.ends):
            return True
        if name.endswith(self._others):
            self._left[os.path.splitext(name)[1]] += 1
        return False

    def __str__(self) -> str:
        return ", ".join(self.ends)

    def left(self) -> str:
        """Say what was left out, "" where nothing was."""
        if not self._left:
            return ""
        said = ", ".join(counted(n, f"{end} file") for end, n in sorted(self._left.items()))
        wanted = " ".join((*self.ends, *sorted(self._left)))
        return f"left out, as ImageFolder does: {said}; --extensions {wanted} takes them"


def _read_folder(
    root: Path,
    extensions: _Extensions,
    class_order: ClassOrder,
    allow_empty: bool,
    *,
    seen: Callable[[], None],
) -> Table:
    """Find the images of `root`; `seen` is called for each.

    Raises UsageError for a folder that holds splits, empty classes or nothing, PackError for
    what cannot be read.
    """
    folders, loose = _scan(root, extensions, seen)
    classes = sorted_classes(folders, class_order)
    keys = _Keys(seen)
    notes: tuple[str, ...] = ()
    if classes:
        _refuse_splits(root, classes)
        if loose:
            found = counted(len(loose), "image")
            notes = (f"left out, of no class: {found} beside the class folders",)
        _add_classes(keys, root, classes, extensions, allow_empty)
    else:
        if class_order != "sorted":
            raise UsageError(
                f"class_order={class_order} numbers class folders, and SRC {str(root)!r} has none: "
                "leave it out"
            )
        loose.sort(reverse=True)
        while loose:  # frees each name as its bytes are kept
            keys.keep(os.fsencode(loose.pop()), -1)
    left = extensions.left()
    if not keys.labels:
        raise UsageError(f"SRC {str(root)!r} holds no images ({extensions}){left and '; '}{left}")
    if left:
        notes += (left,)
    return keys.table(tuple(classes), notes)


class _Keys:
    """Keys and labels as they come in, compact from the start."""

    def __init__(self, seen: Callable[[], None]) -> None:
        self.blob = bytearray()
        self.offsets = array("q", [0])
        self.labels = array("q")
        self._seen = seen

    def add(self, key: bytes, label: int) -> None:
        self._seen()
        self.keep(key, label)

    def keep(self, key: bytes, label: int) -> None:
        self.blob += key
        self.offsets.append(len(self.blob))
        self.labels.append(label)

    def table(self, classes: tuple[str, ...], notes: tuple[str, ...]) -> Table:
        return Table(
            classes=classes,
            labels=np.frombuffer(self.labels, np.int64),
            key_bytes=np.frombuffer(self.blob, np.uint8),
            key_offsets=np.frombuffer(self.offsets, np.int64),
            notes=notes,
        )


def _scan(
    folder: Path, extensions: _Extensions, seen: Callable[[], None]
) -> tuple[list[str], list[str]]:
    """Return the names of a folder's subfolders, and those of the images beside them."""
    folders, images = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.name)
                elif entry.name in extensions:
                    images.append(entry.name)
                    seen()
    except OSError as ex:
        raise _unreadable(ex) from ex
    return folders, images


def _unreadable(ex: OSError) -> PackError:
    return PackError(f"cannot read the folder {os.fsdecode(ex.filename)!r}: {ex.strerror}")


def _refuse_splits(root: Path, classes: list[str]) -> None:
    if all(_SPLIT.fullmatch(name) for name in classes):
        commands = "\n".join(
            f"  pack-h5 {shlex.quote(str(root / name))} {shlex.quote(name + '.h5')}"
            for name in classes
        )
        raise UsageError(
            f"SRC {str(root)!r} holds splits ({', '.join(classes)}), not classes; packed as it is, "
            "the split would become the label. Pack each split by itself:",
            details=commands,
        )


def _add_classes(
    keys: _Keys, root: Path, classes: list[str], extensions: _Extensions, allow_empty: bool
) -> None:
    empty = []
    for label, name in enumerate(classes):
        before = len(keys.labels)
        for key in _walk(root, name, extensions):
            keys.add(key, label)
        if len(keys.labels) == before:
            empty.append(name)
    if empty and not allow_empty:
        raise UsageError(
            f"no images ({extensions}) in the class folders {', '.join(empty)} of "
            f"{str(root)!r}: remove them, or keep them as classes with --allow-empty"
        )


def _walk(root: Path, name: str, extensions: _Extensions) -> Iterator[bytes]:
    """Yield the keys of one class in torchvision's order: sorted(os.walk(class folder))."""
    start = len(os.path.join(root, ""))
    for folder, files in sorted(_folders(os.path.join(root, name))):
        for file in sorted(files):
            if file in extensions:
                key = os.path.join(folder, file)[start:]
                yield os.fsencode(key.replace(os.sep, "/") if os.sep != "/" else key)


def _folders(top: str) -> Iterator[tuple[str, list[str]]]:
    def refuse(ex: OSError) -> None:
        raise _unreadable(ex) from ex

    for folder, subfolders, files in os.walk(top, onerror=refuse, followlinks=True):
        for name in subfolders:
            _refuse_loop(os.path.join(folder, name))
        yield folder, files


def _refuse_loop(folder: str) -> None:
    """Refuse a link to a folder above itself, whose images torchvision would take 40 times."""
    if not os.path.islink(folder):
        return
    target, here = os.path.realpath(folder), os.path.realpath(os.path.dirname(folder))
    if os.path.join(here, "").startswith(os.path.join(target, "")):
        raise UsageError(f"{folder!r} links to a folder above itself ({target!r}): remove the link")


# --- datasets


Label = int | list[float]
"""A class number, or numbers to predict."""
_PICKLED = 64 << 20  # bytes after which a dataset is believed to pickle


class DatasetSource:
    """Presents `dataset[i] == (image, label)` for 0 ≤ i < len(dataset) to packing.

    An image is a PIL image, a uint8 array (H, W, 3) or (H, W), or a uint8 tensor (C, H, W). A
    label is a class number, or numeric targets, or 1 and 0 for each of `dataset.classes`. Labels
    come with the images, in whatever process reads these, and are noted here; so `labels` is
    whole once packing is through. The key of an image is its number.
    """

    def __init__(self, dataset: Any, *, background: tuple[int, int, int]) -> None:
        self.dataset, self._background = dataset, background
        try:
            self._count = len(dataset)
        except TypeError as ex:
            raise UsageError(
                f"source={type(dataset).__name__} is neither a folder's path nor a dataset "
                "with a length: give one of them"
            ) from ex
        if not self._count:
            raise UsageError(f"source={type(dataset).__name__} holds no images")
        self.classes = tuple(str(name) for name in getattr(dataset, "classes", ()))
        self.targets: tuple[str, ...] = ()
        """A dataset's targets have no names."""
        self.labels: npt.NDArray[np.int64] | npt.NDArray[np.float32] | None = None
        self.fields: Mapping[str, FieldValues] = {}
        self.notes: tuple[str, ...] = ()
        self.pickles = True
        """Whether worker processes may read it: known after `check_pickles`."""

    def __len__(self) -> int:
        return self._count

    def key(self, index: int) -> bytes:
        """Return the image's number as text."""
        return b"%d" % index

    @property
    def key_offsets(self) -> npt.NDArray[np.int64]:
        """(N+1,) where each key begins in `key_bytes`."""
        return np.cumsum([0, *(len(self.key(index)) for index in range(len(self)))])

    @property
    def key_bytes(self) -> npt.NDArray[np.uint8]:
        """All keys back to back."""
        return np.frombuffer(b"".join(map(self.key, range(len(self)))), np.uint8)

    def digest(self, *, progress: bool = False) -> str:
        """Return a SHA-256 of what is known without reading an item: type and classes."""
        kind = type(self.dataset)
        said = "\0".join((f"{kind.__module__}.{kind.__qualname__}", *self.classes))
        return hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()

    def check_pickles(self) -> None:
        """See whether the dataset pickles: only then may worker processes read it."""
        sink = _Sink()
        try:
            pickle.Pickler(sink, 5, buffer_callback=lambda buffer: None).dump(self.dataset)
        except Exception as ex:  # whatever a dataset raises
            if sink.written <= _PICKLED:
                self.notes = (
                    f"packed in one process: {type(self.dataset).__name__} does not pickle ({ex})",
                )
                self.pickles = False

    def load(self, index: int) -> tuple[npt.NDArray[np.uint8], Label]:
        """Return image `index` as uint8 (H, W, 3), and its label."""
        try:
            sample = self.dataset[index]
        except Exception as ex:  # whatever a dataset raises for a bad image
            if is_out_of_memory(ex):
                raise
            raise DecodeError("cannot be loaded", f"{type(ex).__name__}: {ex}") from ex
        if not isinstance(sample, Sequence) or len(sample) != 2:
            raise UsageError(f"{self._item(index)} is {_kind(sample)}: (image, label) is needed")
        image, label = sample
        value = self._label(index, label)
        pixels = np.ascontiguousarray(self._to_rgb(index, image))
        if not pixels.size:
            raise DecodeError(DAMAGED, f"{pixels.shape[0]}x{pixels.shape[1]} pixels")
        return pixels, value

    def note(self, indices: npt.NDArray[Any], labels: Sequence[Label]) -> None:
        """Keep the labels of these images."""
        for index, label in zip(indices.tolist(), labels, strict=True):
            if self.labels is None:
                kind = np.int64 if isinstance(label, int) else np.float32
                self.labels = np.zeros((self._count, *np.shape(label)), kind)
            if np.shape(label) != self.labels.shape[1:]:
                raise UsageError(f"the label of {self._item(index)} has another form than others")
            self.labels[index] = label

    def _to_rgb(self, index: int, image: Any) -> npt.NDArray[np.uint8]:
        if isinstance(image, Image.Image):
            return image_to_rgb(image, self._background)
        import torch  # here: it takes a second, and pack-h5 --help needs none of it

        if isinstance(image, torch.Tensor):
            pixels = image.numpy(force=True)
            pixels = pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels
        else:
            pixels = np.asarray(image)
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
            raise UsageError(
                f"the image of {self._item(index)} is {_kind(image)}: a PIL image, a uint8 array "
                "(H, W, 3) or a uint8 tensor (3, H, W) is needed; leave out the transform"
            )
        return np.broadcast_to(pixels, (*pixels.shape[:2], 3))

    def _label(self, index: int, label: Any) -> Label:
        if isinstance(label, Image.Image) or np.ndim(label) > 1:
            raise UsageError(
                f"the label of {self._item(index)} is {_kind(label)}, a mask by its shape: a class "
                "number or a row of numeric targets is needed; masks are packed from folders, "
                "with masks="
            )
        value = _to_label(label)
        if value is None:
            raise UsageError(
                f"the label of {self._item(index)} is {_kind(label)}: a class number or numeric "
                "targets are needed"
            )
        most = len(self.classes) or 1 << 63
        if isinstance(value, int) and not -1 <= value < most:
            known = f"0 to {most - 1} of its classes" if self.classes else "0 and up"
            raise UsageError(
                f"the label of {self._item(index)} is {value}: −1 or a class number, {known}, "
                "is needed"
            )
        if self.classes and not isinstance(value, int) and len(value) != len(self.classes):
            raise UsageError(
                f"the label of {self._item(index)} has {len(value)} numbers for the "
                f"{len(self.classes)} classes: 1 or 0 for each, or one class number, is needed; a "
                "dataset of targets has no classes"
            )
        return value if isinstance(value, int) else value.tolist()

    def _item(self, index: int) -> str:
        return f"{type(self.dataset).__name__}[{index}]"


class _Sink:
    """Counts what is pickled, and ends it where it is enough."""

    written = 0

    def write(self, data: Any) -> None:
        self.written += len(data)
        if self.written > _PICKLED:
            raise OverflowError


def _to_label(label: Any) -> "int | np.ndarray[Any, Any] | None":
    """Return a class number as int, targets as float32 (K,), None for anything else."""
    try:
        return operator.index(label.item() if getattr(label, "ndim", None) == 0 else label)
    except TypeError:
        pass
    try:
        targets = np.asarray(label, dtype=np.float32).reshape(-1)
    except (TypeError, ValueError):
        return None
    return targets if len(targets) else None


def _kind(value: Any) -> str:
    if isinstance(value, Image.Image):
        return f"an image ({value.height}, {value.width})"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        return f"{type(value).__name__} of {dtype} {tuple(shape)}"
    return f"a {type(value).__name__}"
