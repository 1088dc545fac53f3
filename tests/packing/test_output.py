"""What packing writes and where: disks that fail at any call, links where files should be."""

import errno
import os
import re
import resource
import stat

import pytest

from h5feed.errors import PackError, UsageError
from h5feed.packing import journal, pack, workers
from h5feed.packing.output import OutputPaths
from packing.folders import make_folder, make_masks, names, sha256

SIZE = 32
KEPT = r"(\d+) of 8 images are kept in {out}\.partial: the same command with --resume goes on"


class FailingDisk:
    """Lets the calls that write to OUT's folder fail, from number `first` on."""

    def __init__(self, monkeypatch, first, code, *, once):
        self.count, self._first, self._code, self._once = 0, first, code, once
        self.failed = ""
        """The file that the first call was about."""
        self._system = {name: getattr(os, name) for name in ("pwrite", "ftruncate", "fdatasync")}
        for name in self._system:
            monkeypatch.setattr(os, name, lambda *args, name=name: self._call(name, *args))
        self._open = os.open
        monkeypatch.setattr(os, "open", self._make)

    def _fail(self, path):
        number, self.count = self.count, self.count + 1
        if number == self._first:
            self.failed = os.fspath(path)
        if number == self._first or (number > self._first and not self._once):
            raise OSError(self._code, os.strerror(self._code))

    def _call(self, name, *args):
        self._fail(os.readlink(f"/proc/self/fd/{args[0]}"))
        return self._system[name](*args)

    def _make(self, path, flags, *args, **kwargs):
        if flags & os.O_CREAT and not os.path.exists(path):
            try:
                self._fail(path)
            except OSError as ex:
                ex.filename = os.fspath(path)  # as the system's has it
                raise
        return self._open(path, flags, *args, **kwargs)


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Options for eight images with masks, in blocks of two."""
    monkeypatch.setattr(workers, "_MOST_IMAGES", 2)
    # One sync, at the end, so that the calls come in the same order every time.
    monkeypatch.setattr(journal, "_SECONDS_BETWEEN_SYNCS", 1e9)
    folder = make_folder(tmp_path / "few", per_class=4, broken=(3,))
    return {
        "source": folder,
        "size": SIZE,
        "masks": make_masks_of_whole(folder, tmp_path),
        "num_workers": 0,
    }


def make_masks_of_whole(folder, tmp_path):
    """Make masks of images of which one is broken."""
    make_folder(tmp_path / "unbroken", per_class=4)
    return make_masks(tmp_path / "unbroken", tmp_path / "masks")


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_whichever_call_fails_it_is_one_sentence_and_resumes(few, out, monkeypatch, code, once):
    pack(out=out, **few)
    expected = sha256(out)
    out.unlink()
    said = set()
    for first in range(100):
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, first, code, once=once)
            try:
                pack(out=out, **few)
            except PackError as ex:
                text = str(ex)
            else:
                break
        assert disk.failed.startswith(f"{out}.partial")
        shape = re.compile(
            rf"cannot write {re.escape(disk.failed)}: {os.strerror(code)}"
            rf"(|; nothing was kept|; {KEPT.format(out=re.escape(str(out)))})"
        )
        match = shape.fullmatch(text)
        assert match, text
        said.add(match[2] or match[1])
        if not match[2]:
            assert names(out.parent) == []
            continue
        assert pack(out=out, resume=True, **few).resumed == int(match[2])
        assert sha256(out) == expected
        assert names(out.parent) == ["x.h5"]
        out.unlink()
    assert first == disk.count > 20
    assert said >= {"", "; nothing was kept", "8"}
    assert sha256(out) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_limit_of_size_anywhere_is_one_sentence_and_resumes(few, out, workers):
    few = few | {"num_workers": workers}
    end = pack(out=out, **few).bytes_out
    expected = sha256(out)
    out.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Payload, then the end: what HDF5 makes is a few kB behind the pixels.
    for limit in (0, 100, 14_000, 20_000, 30_000, *range(end - 6_000, end, 1_500), end - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(PackError, match=r"^cannot write \S+: File too large; ") as caught:
                pack(out=out, **few)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not out.exists()
        if str(caught.value).endswith("nothing was kept"):
            assert names(out.parent) == []
        else:
            assert pack(out=out, resume=True, **few).resumed > 0
            assert sha256(out) == expected
            out.unlink()


# --- links


@pytest.mark.parametrize("dangling", [True, False])
@pytest.mark.parametrize("ending", ["", ".masks"])
def test_a_link_under_a_name_of_packing_is_not_written_through(few, out, ending, dangling):
    target, link = out.with_name("target"), out.with_name(f"x.h5.partial{ending}")
    link.symlink_to(target)
    if not dangling:
        target.write_bytes(b"precious")
    if ending == "":
        with pytest.raises(UsageError, match=r"x\.h5\.partial exists: .* --overwrite starts again"):
            pack(out=out, **few)
    pack(out=out, overwrite=True, **few)
    assert names(out.parent) == (["x.h5"] if dangling else ["target", "x.h5"])
    assert not out.is_symlink()
    if not dangling:
        assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_in_the_journals_place_is_refused(few, out, dangling):
    target = out.with_name("target")
    OutputPaths.of(out).journal.symlink_to(target)
    if not dangling:
        target.write_bytes(b"precious")
    for more in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(
            PackError,
            match=r"^cannot write \S+x\.h5\.partial\.journal: it is a link, not a plain file: "
            r"remove it$",
        ):
            pack(out=out, **more, **few)
    assert target.exists() != dangling
    assert dangling or target.read_bytes() == b"precious"


def test_a_pipe_in_the_journals_place_is_refused_and_not_waited_for(few, out):
    os.mkfifo(OutputPaths.of(out).journal)
    with pytest.raises(PackError, match=r"journal: it is not a plain file: remove it$"):
        pack(out=out, **few)


def test_a_link_to_the_payload_is_not_resumed(few, out, monkeypatch):
    """An entry is enough: the payload behind the link has the right bytes."""
    paths = OutputPaths.of(out)
    with monkeypatch.context() as patch:
        FailingDisk(patch, 12, errno.ENOSPC, once=True)
        with pytest.raises(PackError, match="are kept"):
            pack(out=out, **few)
    moved = paths.partial.rename(out.parent / "moved")
    before = moved.read_bytes()
    paths.partial.symlink_to(moved)
    said = r"^cannot resume from \S+x\.h5\.partial: it is a link, not a plain file: remove it$"
    with pytest.raises(PackError, match=said):
        pack(out=out, resume=True, **few)
    assert moved.read_bytes() == before


def test_overwriting_a_link_replaces_what_it_leads_to(few, out, tmp_path):
    """As `cp` and a shell's `>` do; the work is done beside the target, on its disk."""
    (tmp_path / "disk").mkdir()
    target = tmp_path / "disk" / "y.h5"
    target.write_bytes(b"old")
    out.symlink_to("../disk/y.h5")
    with pytest.raises(UsageError, match=r"OUT \S+x\.h5 exists: give another name, or --overwrite"):
        pack(out=out, **few)
    assert target.read_bytes() == b"old"
    summary = pack(out=out, overwrite=True, **few)
    assert summary.out == str(out)
    assert out.is_symlink()
    assert stat.S_ISREG(target.lstat().st_mode)
    assert target.stat().st_size == summary.bytes_out
    assert (names(out.parent), names(target.parent)) == (["x.h5"], ["y.h5"])


def test_a_link_to_nothing_is_followed_only_when_told_to(few, out, tmp_path):
    target = tmp_path / "y.h5"
    out.symlink_to(target)
    said = r"OUT \S+x\.h5 is a link to \S+y\.h5, which does not exist: give another name, or --ove"
    with pytest.raises(UsageError, match=said):
        pack(out=out, **few)
    assert not target.exists()
    pack(out=out, overwrite=True, **few)
    assert out.is_symlink()
    assert target.is_file()


@pytest.mark.parametrize("options", [{}, {"overwrite": True}])
def test_an_out_that_can_be_no_file_is_refused(few, out, options):
    out.symlink_to(out.name)
    with pytest.raises(UsageError, match="is a link that leads to itself: give another name"):
        pack(out=out, **options, **few)
    out.unlink()
    os.mkfifo(out)
    with pytest.raises(UsageError, match="is a device or a pipe: give the name of a file"):
        pack(out=out, **options, **few)
    assert names(out.parent) == ["x.h5"]
