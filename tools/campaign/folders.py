"""Source folders and manifests that mean harm, or are merely strange."""

from __future__ import annotations

import io
import json
import os
import resource
import socket
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cases import Case, Wrong, limit_memory
from material import make_image
from PIL import Image

from h5feed.store import check_file, read_index

__all__ = ["hostile_folder", "hostile_manifest"]

MEMORY = 4 << 30  # bytes that each process of a run over small images may map more than it has
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
NAMES = (
    b"a\x1b[2Jb", "\u202egpj".encode(), b"\xff\xfe", b"a\nb", b"-rf", b" ", b"a" * 240,
    "ü\u0301".encode(), b"'\"$(x)`", b"con", b"%s%n", b"a\tb", b".hidden",
)  # fmt: skip


def hostile_folder(case: Case) -> None:
    """Pipes, loops, bombs, holes and odd names beside good images: the good ones are packed."""
    folder, out = case.folder / "images", case.folder / "x.h5"
    good = _good_images(case, folder)
    for _ in range(case.random.randint(1, 5)):
        add = case.random.choice(ADDITIONS)
        case.note(add.__name__)
        with suppress(FileExistsError):  # the same twice
            add(case, folder / case.random.choice(["a", "b"]))
    options = case.random.choice(
        [
            ("--size", 32),
            ("--size", 32, "--fit", "keep"),
            ("--store", "original", "--non-jpeg", "reencode"),
            ("--size", 32, "--masks", folder),
        ]
    )
    result = case.run(
        "pack-h5", folder, out, *options, "--workers", case.random.randint(0, 2), before=_careful
    )
    if result.status:
        if out.exists():
            raise Wrong("packing failed, and OUT is there")
        return
    if not (report := check_file(out)).is_sound:
        raise Wrong(f"packed a file that is not sound: {report.error}")
    index = read_index(out)
    keys = {index.key(i) for i in range(len(index))}
    if "--masks" not in options and (missing := good - keys):
        raise Wrong(f"good images are missing from the file: {sorted(missing)}")
    case.run("show-h5", out, "--sheet", case.folder / "sheet.png", before=_careful)


def hostile_manifest(case: Case) -> None:
    """Manifests of wrong types, encodings, paths and lengths: a sentence, or a sound file."""
    folder, out = case.folder / "images", case.folder / "x.h5"
    keys = sorted(_good_images(case, folder))
    ending = case.random.choice(["csv", "tsv", "jsonl"])
    data = (
        _json_lines(case, keys)
        if ending == "jsonl"
        else _table(case, keys, "," if ending == "csv" else "\t")
    )
    manifest = case.folder / f"labels.{ending}"
    manifest.write_bytes(_damage(case, data))
    if case.random.random() < 0.03:
        manifest.unlink()
        os.mkfifo(manifest)
    result = case.run(
        "pack-h5",
        folder,
        out,
        "--manifest",
        manifest,
        "--size",
        32,
        "--workers",
        0,
        before=_careful,
    )
    if result.status and out.exists():
        raise Wrong("packing failed, and OUT is there")
    if result.status == 0:
        if not check_file(out).is_sound:
            raise Wrong("packed a file that is not sound")
        case.run("show-h5", out)


def _good_images(case: Case, folder: Path) -> set[str]:
    """Make some images in two class folders; return their keys."""
    keys = set()
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for number in range(case.random.randint(1, 4)):
            kind = case.random.choice([("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP")])
            path = folder / name / f"good{number}.{kind[0]}"
            make_image(case.random.randint(20, 60), case.random.randint(20, 60), number).save(
                path, kind[1]
            )
            keys.add(f"{name}/{path.name}")
    return keys


def _careful() -> None:
    limit_memory(MEMORY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))


# What is added to a class folder -----------------------------------------------------------------


def _encoded(case: Case, kind: str | None = None) -> bytes:
    buffer = io.BytesIO()
    make_image(40, 50, case.random.randrange(99)).save(buffer, kind or case.random.choice(FORMATS))
    return buffer.getvalue()


def _flipped(case: Case, folder: Path) -> None:
    for number in range(5):
        kind = case.random.choice(FORMATS)
        data = bytearray(_encoded(case, kind))
        reach = case.random.choice([40, 200, len(data)])
        for _ in range(case.random.choice([1, 2, 10])):
            data[case.random.randrange(min(reach, len(data)))] = case.random.randrange(256)
        _write(folder, f"flipped{number}.{kind.lower()}", bytes(data))


def _cut(case: Case, folder: Path) -> None:
    data = _encoded(case)
    _write(folder, "cut.png", data[: case.random.randrange(len(data))])


def _wrong_ending(case: Case, folder: Path) -> None:
    _write(
        folder,
        f"wrong.{case.random.choice(['jpg', 'png', 'tif', 'webp', 'gif', 'bmp', 'ppm'])}",
        _encoded(case),
    )


def _noise(case: Case, folder: Path) -> None:
    magic = case.random.choice(
        [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"RIFF", b"II*\0", b"P6\n", b""]
    )
    _write(folder, "noise.jpg", magic + case.random.randbytes(case.random.choice([0, 10, 3000])))


def _bomb(case: Case, folder: Path) -> None:
    """A PNG, GIF, BMP or PPM of few bytes that claims a huge image."""
    height, width = case.random.choice(
        [(65_000, 65_000), (13_000, 13_000), (1, 2**31 - 1), (60_000, 1), (1, 10_000)]
    )
    chunk = struct.pack(">IIBBBBB", width, height, 8, case.random.choice([0, 2, 6]), 0, 0, 0)
    lines = zlib.compress(b"\0" * case.random.choice([10, 100_000]))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        map(_chunk, (b"IHDR", b"IDAT", b"IEND"), (chunk, lines, b""))
    )
    ppm = b"P6\n%d %d\n255\n" % (width, height)
    gif = (
        b"GIF89a"
        + struct.pack("<HH", width & 0xFFFF, height & 0xFFFF)
        + b"\x80\0\0"
        + bytes(6)
        + b",\0\0\0\0"
    )
    _write(folder, *case.random.choice([("bomb.png", png), ("bomb.ppm", ppm), ("bomb.gif", gif)]))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _many_scans(case: Case, folder: Path) -> None:
    """A progressive JPEG whose last scan comes a thousand times."""
    buffer = io.BytesIO()
    make_image(200, 200, 1).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data.rindex(b"\xff\xda")
    _write(folder, "scans.jpg", data[:last] + data[last:-2] * 1000 + data[-2:])


def _thin(case: Case, folder: Path) -> None:
    """An honest image of one row or column, to which proportions matter."""
    sides = case.random.choice([(1, 1), (1, 2000), (3000, 1), (2, 9000)])
    buffer = io.BytesIO()
    Image.new(case.random.choice(["RGB", "L", "RGBA", "P", "1", "I;16"]), sides[::-1]).save(
        buffer, "PNG"
    )
    _write(folder, "thin.png", buffer.getvalue())


def _fifo(case: Case, folder: Path) -> None:
    os.mkfifo(folder / "pipe.jpg")


def _socket(case: Case, folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # a socket's path may have a hundred characters
    try:
        Path("socket.jpg").unlink(missing_ok=True)
        socket.socket(socket.AF_UNIX).bind("socket.jpg")
    finally:
        os.chdir(here)


def _device(case: Case, folder: Path) -> None:
    (folder / "device.jpg").symlink_to(
        case.random.choice(["/dev/zero", "/dev/null", "/proc/self/mem", "/dev/stdin"])
    )


def _loop(case: Case, folder: Path) -> None:
    (folder / "loop").symlink_to(
        case.random.choice([folder, folder.parent, folder / "loop", Path("/nowhere")])
    )


def _link(case: Case, folder: Path) -> None:
    (folder / "link.jpg").symlink_to(
        case.random.choice(["link.jpg", "/etc/passwd", "../b", "nothing"])
    )


def _hole(case: Case, folder: Path) -> None:
    """A file of many bytes that takes no room."""
    with (folder / "hole.jpg").open("wb") as file:
        file.write(case.random.choice([b"", b"\xff\xd8\xff", _encoded(case)]))
        file.truncate(case.random.choice([1 << 24, 50 << 30]))


def _folder_as_image(case: Case, folder: Path) -> None:
    (folder / "folder.jpg").mkdir()


def _empty(case: Case, folder: Path) -> None:
    _write(folder, "empty.png", b"")


def _odd_name(case: Case, folder: Path) -> None:
    name = case.random.choice(NAMES)
    place = os.fsencode(folder.parent if case.random.random() < 0.3 else folder)
    if place == os.fsencode(folder.parent):  # a class of that name
        os.makedirs(os.path.join(place, name), exist_ok=True)
        place, name = os.path.join(place, name), b"image"
    with open(os.path.join(place, name + b".jpg"), "wb") as file:
        file.write(_encoded(case, "JPEG"))


def _deep(case: Case, folder: Path) -> None:
    place = folder.joinpath(*["d"] * case.random.choice([3, 40, 300]))
    place.mkdir(parents=True)
    _write(place, "deep.jpg", _encoded(case, "JPEG"))


def _empty_class(case: Case, folder: Path) -> None:
    (folder.parent / "empty").mkdir(exist_ok=True)


def _write(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)


ADDITIONS: list[Callable[[Case, Path], None]] = [
    _flipped, _flipped, _flipped, _cut, _wrong_ending, _noise, _bomb, _many_scans, _thin, _fifo,
    _socket, _device, _loop, _link, _hole, _folder_as_image, _empty, _odd_name, _odd_name, _deep,
    _empty_class,
]  # fmt: skip


# Manifests ---------------------------------------------------------------------------------------

CELLS = (
    "", "nan", "inf", "-1", "0", "3.5", "1e999", "9" * 400, "a", "\x1b[2J", "\u202e", "None",
    "true", "99999999999999999999", "-0", " 1 ", "1,5", '"', "\0", "/etc/passwd", "../../x", "a//b",
    "a/./b",
)  # fmt: skip
COLUMNS = (
    "label",
    "class",
    "target",
    "",
    "path",
    "Unnamed: 0",
    "id",
    "file",
    "age",
    "\x1b[2J",
    "label",
)


def _table(case: Case, keys: list[str], comma: str) -> bytes:
    columns = ["path", *case.random.sample(COLUMNS, case.random.randint(0, 3))]
    rows = [
        columns,
        *([key, *(str(case.random.randrange(3)) for _ in columns[1:])] for key in keys),
    ]
    for _ in range(case.random.choice([0, 1, 1, 2])):
        row = case.random.choice(rows)
        row[case.random.randrange(len(row))] = case.random.choice(CELLS)
    if case.random.random() < 0.2:
        case.random.choice(rows).append("more")
    return "\n".join(comma.join(row) for row in rows).encode() + b"\n"


def _json_lines(case: Case, keys: list[str]) -> bytes:
    strange = [None, True, [], {}, 1.5, -1, 2**70, "x", [1, "a"], [[1]], float("nan"), "\u202e"]
    names = case.random.sample(COLUMNS, case.random.randint(0, 2))
    lines = [
        json.dumps({"path": key} | {n: case.random.randrange(3) for n in names}) for key in keys
    ]
    for _ in range(case.random.choice([0, 1, 1, 2])):
        row = {"path": case.random.choice(keys)} | {n: case.random.choice(strange) for n in names}
        if case.random.random() < 0.2:
            row["path"] = case.random.choice(strange)
        lines[case.random.randrange(len(lines))] = json.dumps(row)
    if case.random.random() < 0.2:
        lines.insert(
            case.random.randrange(len(lines)),
            case.random.choice(["", "{", "[" * 10**6, '"x"', "{}" * 2, '{"path":1' * 5000]),
        )
    return "\n".join(lines).encode()


def _damage(case: Case, data: bytes) -> bytes:
    way = case.random.random()
    if way < 0.1:
        return b"\xef\xbb\xbf" + data
    if way < 0.15:
        return data.decode().encode("utf-16")
    if way < 0.2:
        return data.replace(b"\n", case.random.choice([b"\r", b"\r\n", b"\n\n"]))
    if way < 0.35 and data:
        changed = bytearray(data)
        changed[case.random.randrange(len(changed))] = case.random.randrange(256)
        return bytes(changed)
    if way < 0.4:
        return case.random.choice(
            [b"", b"\n", b"path", b"path\n", b"\0" * 1000, b'"' * 200_000, b"," * 200_000]
        )
    return data
