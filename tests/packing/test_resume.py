import json
import os
import random
import re
import signal
import time
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from h5feed.errors import PackError, UsageError
from h5feed.packing import encode, journal, output, pack, run, sources, workers
from h5feed.packing.output import OutputPaths
from h5feed.store.check import check_file
from packing.folders import make_folder, make_image, make_masks, names, sha256

SIZE = 64
KILLS = 20


@pytest.fixture
def _small_steps(monkeypatch):
    """Blocks of a few images, saved without a pause: much to go wrong in a short run."""
    monkeypatch.setattr(workers, "_MOST_IMAGES", 4)
    monkeypatch.setattr(journal, "_SECONDS_BETWEEN_SYNCS", 0.0)


@pytest.fixture
def encoded(monkeypatch):
    """The indices that were encoded, in this process."""
    seen = []
    encode_item = encode._encode
    monkeypatch.setattr(encode, "_encode", lambda job, i: (seen.append(i), encode_item(job, i))[1])
    return seen


def in_child(work):
    """Start `work` in a forked process that leads a group of its own; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        work()
    finally:
        os._exit(0)


def alive(group):
    """Return the processes of a group that still run; zombies wait for init and write nothing."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, member = path.read_text().rpartition(")")[2].split()[:3]
            if int(member) == group and state != "Z":
                found.append(path.parent.name)
    return found


def wait_until(true):
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, "waited for a minute"
        time.sleep(0.001)


def stop_after(monkeypatch, count):
    """Let packing in this process fail as a full disk would, after `count` blocks."""
    write, left = output.PayloadFiles.write, iter(range(count))

    def limited(self, *args):
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        write(self, *args)

    monkeypatch.setattr(output.PayloadFiles, "write", limited)
    return lambda: monkeypatch.setattr(output.PayloadFiles, "write", write)


def interrupt(monkeypatch, folder, out, count, **options):
    let_go = stop_after(monkeypatch, count)
    with pytest.raises(PackError, match="No space left"):
        pack(folder, out, size=SIZE, num_workers=0, **options)
    let_go()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Several hundred images that take about a second, some of them broken."""
    root = tmp_path_factory.mktemp("many") / "images"
    for number in range(40):
        make_image(root / "a" / f"{number:02}.jpg", 480, 640, number)
    (root / "a" / "17.jpg").write_bytes(b"")
    for name in "bcdefghij":
        (root / name).symlink_to(root / "a")
    return root


@pytest.fixture(scope="module")
def whole(many, tmp_path_factory):
    """(SHA-256, seconds) of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "x.h5"
    began = time.monotonic()
    pack(many, out, size=SIZE, num_workers=2)
    return sha256(out), time.monotonic() - began


@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize("kill", range(KILLS))
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(many, whole, out, kill):
    expected, seconds = whole
    moment = random.Random(kill).random() * seconds
    child = in_child(lambda: pack(many, out, size=SIZE, num_workers=2))
    time.sleep(moment)
    if kill % 2:
        os.killpg(child, signal.SIGKILL)
    else:  # the coordinator alone: its workers must follow by themselves
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if out.exists():  # the last rename was quicker
        assert sha256(out) == expected
        assert check_file(out).is_sound
    finished = out.exists() and not OutputPaths.of(out).journal.exists()
    summary = pack(many, out, size=SIZE, num_workers=2, resume=True, overwrite=finished)
    assert sha256(out) == expected
    assert names(out.parent) == ["x.h5"]
    assert summary.items == 390
    assert alive(child) == []


@pytest.mark.usefixtures("_small_steps")
def test_what_is_done_is_not_done_again(folder, out, encoded, monkeypatch):
    interrupt(monkeypatch, folder, out, 4)
    done = max(encoded) + 1
    encoded.clear()
    summary = pack(folder, out, size=SIZE, num_workers=0, resume=True)
    # The block that failed to be written is the one thing that is repeated.
    assert encoded == list(range(summary.resumed, 24))
    assert 0 < done - 4 <= summary.resumed < done


def test_a_busy_worker_dies_with_the_coordinator(folder, out, monkeypatch):
    """It does not look at its pipe while it decodes; the system has to end it."""
    monkeypatch.setattr(sources, "read_file", lambda path, **limits: time.sleep(600))
    child = in_child(lambda: pack(folder, out, size=SIZE, num_workers=2))
    try:
        wait_until(lambda: len(alive(child)) == 3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wait_until(lambda: alive(child) == [])
    finally:
        for left in alive(child):
            os.kill(int(left), signal.SIGKILL)


def test_a_killed_run_keeps_nearly_all_that_was_done(many, whole, out, monkeypatch):
    """Killed late, a run must find most of its work in the journal."""
    monkeypatch.setattr(journal, "_SECONDS_BETWEEN_SYNCS", 0.0)
    child = in_child(lambda: pack(many, out, size=SIZE, num_workers=2))
    saved = OutputPaths.of(out).journal
    # An entry of one block is about 400 bytes.
    wait_until(lambda: saved.exists() and saved.stat().st_size > 4000)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not out.exists():
        assert pack(many, out, size=SIZE, num_workers=2, resume=True).resumed > 0
    assert sha256(out) == whole[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_death_at_the_last_rename(folder, out, encoded, monkeypatch, when):
    pack(folder, out, size=SIZE, num_workers=0)
    expected = sha256(out)
    out.unlink()
    finalize = output.finalize

    def die(*args, **kwargs):
        if when == "after":
            finalize(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(output, "finalize", die)
    os.waitpid(in_child(lambda: pack(folder, out, size=SIZE, num_workers=2)), 0)
    assert out.exists() == (when == "after")
    monkeypatch.setattr(output, "finalize", finalize)
    encoded.clear()
    summary = pack(folder, out, size=SIZE, num_workers=0, resume=True)
    assert summary.resumed == 24
    assert encoded == []
    assert sha256(out) == expected
    assert names(out.parent) == ["x.h5"]


@pytest.mark.usefixtures("_small_steps")
def test_interrupted_by_the_keyboard(folder, out, monkeypatch):
    seen = iter(range(12))
    read = sources.read_file

    def press(path, **limits):
        if next(seen, None) is None:
            raise KeyboardInterrupt
        return read(path, **limits)

    monkeypatch.setattr(sources, "read_file", press)
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted; \d+ of 24 images are kept in .*"):
        pack(folder, out, size=SIZE, num_workers=0)
    monkeypatch.setattr(sources, "read_file", read)
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).resumed >= 8


@pytest.mark.usefixtures("_small_steps")
def test_changed_options_do_not_resume(folder, out, monkeypatch):
    interrupt(monkeypatch, folder, out, 3)
    with pytest.raises(PackError, match=r"fit was 'stretch' and is 'crop'\. Give what"):
        pack(folder, out, size=SIZE, fit="crop", num_workers=0, resume=True)
    changed = "any_size was False and is True; size was .64. and is .32."
    with pytest.raises(PackError, match=changed):
        pack(folder, out, size=32, any_size=True, num_workers=0, resume=True)
    # Refusals have touched nothing.
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).resumed > 0


@pytest.mark.usefixtures("_small_steps")
def test_other_versions_do_not_resume(folder, out, monkeypatch):
    interrupt(monkeypatch, folder, out, 3)
    now = output.versions()
    monkeypatch.setattr(run, "versions", lambda: now | {"torch": "99"})
    with pytest.raises(PackError, match=r"torch was '.*' and is '99'"):
        pack(folder, out, size=SIZE, num_workers=0, resume=True)


@pytest.mark.usefixtures("_small_steps")
def test_a_changed_source_does_not_resume(folder, out, monkeypatch):
    interrupt(monkeypatch, folder, out, 3)
    os.utime(folder / "dogs" / "011.jpg", (1, 1))
    with pytest.raises(PackError, match=r"the source has changed \(24 images then, 24 now\)"):
        pack(folder, out, size=SIZE, num_workers=0, resume=True)
    (folder / "dogs" / "011.jpg").unlink()
    with pytest.raises(PackError, match=r"the source has changed \(24 images then, 23 now\)"):
        pack(folder, out, size=SIZE, num_workers=0, resume=True)
    assert pack(folder, out, size=SIZE, num_workers=0, overwrite=True).items == 23


@pytest.mark.usefixtures("_small_steps")
def test_limits_and_workers_may_change(folder, out):
    make_folder(folder, broken=(14, 18))
    pack(folder, out, size=SIZE, num_workers=2)
    expected = sha256(out)
    out.unlink()
    with pytest.raises(PackError, match=r"max_skipped=1 .* are kept in .*--resume goes on"):
        pack(folder, out, size=SIZE, num_workers=2, max_skipped=1)
    summary = pack(folder, out, size=SIZE, num_workers=1, max_skipped=2, resume=True)
    assert 0 < summary.resumed <= 18
    assert sha256(out) == expected


@pytest.mark.usefixtures("_small_steps")
def test_a_stricter_limit_counts_what_was_skipped_before(folder, out, monkeypatch):
    make_folder(folder, broken=(1, 2))
    interrupt(monkeypatch, folder, out, 3)
    with pytest.raises(PackError, match=r"max_skipped=1 images .* cats/002\.jpg"):
        pack(folder, out, size=SIZE, num_workers=0, max_skipped=1, resume=True)
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).items == 22


@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_journal_costs_its_last_entry(folder, out, monkeypatch, cut):
    pack(folder, out, size=SIZE, num_workers=0)
    expected = sha256(out)
    out.unlink()
    interrupt(monkeypatch, folder, out, 5)
    saved = OutputPaths.of(out).journal
    os.truncate(saved, saved.stat().st_size - cut)
    summary = pack(folder, out, size=SIZE, num_workers=0, resume=True)
    assert 0 < summary.resumed < 18
    assert sha256(out) == expected


@pytest.mark.usefixtures("_small_steps")
def test_a_flipped_bit_in_the_journal_costs_what_follows(folder, out, monkeypatch):
    interrupt(monkeypatch, folder, out, 5)
    saved = OutputPaths.of(out).journal
    data = bytearray(saved.read_bytes())
    data[-300] ^= 1
    saved.write_bytes(data)
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).resumed < 18
    assert check_file(out).is_sound


@pytest.mark.usefixtures("_small_steps")
def test_what_followed_a_torn_entry_is_gone_for_good(folder, out, monkeypatch):
    """Entries behind a damaged one must not come back to life once that is written anew."""
    interrupt(monkeypatch, folder, out, 6)
    saved = OutputPaths.of(out).journal
    whole = saved.stat().st_size
    data = bytearray(saved.read_bytes())
    data[data.index(b'"start": 4')] ^= 1
    saved.write_bytes(data)
    interrupt(monkeypatch, folder, out, 1, resume=True)
    assert saved.stat().st_size < whole
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).resumed < 12
    assert check_file(out).is_sound


def cut(path, count):
    os.truncate(path, path.stat().st_size - count)


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.usefixtures("_small_steps")
@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        ("", lambda path: cut(path, 1)),
        ("", lambda path: cut(path, 4096)),
        ("", lambda path: os.truncate(path, 0)),
        ("", lambda path: flip(path, path.stat().st_size // 2)),
        (".masks", lambda path: cut(path, 1)),
        (".masks", lambda path: flip(path, 5000)),
        (".masks", Path.unlink),
    ],
)
def test_pixels_that_are_lost_are_packed_again(folder, out, monkeypatch, capsys, ending, damage):
    """What the journal says is compared with what is there, down to the last bit."""
    masks = make_masks(folder, out.parent.parent / "masks")
    pack(folder, out, size=SIZE, num_workers=0, masks=masks)
    expected = sha256(out)
    out.unlink()
    interrupt(monkeypatch, folder, out, 5, masks=masks)
    damage(out.with_name(f"x.h5.partial{ending}"))
    summary = pack(folder, out, size=SIZE, num_workers=0, masks=masks, resume=True, progress=True)
    assert summary.resumed < 18
    assert sha256(out) == expected
    assert names(out.parent) == ["x.h5"]
    said = rf"x\.h5\.partial does not hold what its journal says from image {summary.resumed} on"
    assert re.search(said, capsys.readouterr().err)


# --- journals that no run has written


def frames(data):
    """Return a journal's entries: [facts, bytes of rows] of each, the header first."""
    found, at = [], 0
    while at < len(data):
        _, text, rows, _ = journal._FRAME.unpack_from(data, at)
        at += journal._FRAME.size + text + rows
        found.append([json.loads(data[at - rows - text : at - rows]), data[at - rows : at]])
    return found


def joined(entries):
    """Return the journal of these entries, its checksums right."""
    data = b""
    for facts, rows in entries:
        text = facts if isinstance(facts, bytes) else json.dumps(facts).encode()
        check = zlib.crc32(text + rows)
        data += journal._FRAME.pack(b"h5fj", len(text), len(rows), check) + text + rows
    return data


def forge(entries, random):
    """Change one thing in one entry."""
    entry = random.choice(entries)
    facts = entry[0]
    name = random.choice(list(facts))
    odd = [
        None,
        [],
        {},
        "",
        "\x1b[31m",
        True,
        -1,
        1.5,
        2**31,
        2**63,
        10**400,
        [[]],
        [-1],
        ["x", 0, 0],
    ]
    rows = bytearray(entry[1])
    if rows and random.random() < 0.5:
        rows[random.randrange(len(rows))] ^= 1 << random.randrange(8)
        entry[1] = bytes(rows[: random.choice([len(rows), len(rows) - 1, len(rows) // 2])])
    elif random.random() < 0.1:
        entry[0] = random.choice(
            [b"[" * 100_000, b"{", b"3", b"[]", b"null", b"\xff", b'{"a":1e999}']
        )
    elif random.random() < 0.1:
        del facts[name]
    elif random.random() < 0.1:
        facts["new"] = 1
    elif random.random() < 0.2:
        entries.remove(entry)
    else:
        facts[name] = random.choice(odd)


@pytest.fixture
def interrupted(folder, out, monkeypatch):
    """A run that was interrupted; return what it left (bytes by path), and the whole file's SHA."""
    make_folder(folder, broken=(2, 9))
    monkeypatch.setattr(workers, "_MOST_IMAGES", 4)
    options = {"fit": "pad", "store": "jpeg"}
    pack(folder, out, size=SIZE, num_workers=0, **options)
    expected = sha256(out)
    out.unlink()
    interrupt(monkeypatch, folder, out, 4, **options)

    def resume(change):
        for path, data in left.items():
            path.write_bytes(data)
        paths.journal.write_bytes(change(left[paths.journal]))
        return pack(folder, out, size=SIZE, num_workers=0, resume=True, overwrite=True, **options)

    paths = OutputPaths.of(out)
    left = {path: path.read_bytes() for path in (paths.partial, paths.journal)}
    return resume, expected


def test_a_damaged_journal_resumes_to_the_same_bytes_or_is_one_sentence(interrupted, out):
    resume, expected = interrupted
    said = set()
    for seed in range(80):
        draw = random.Random(seed)

        def damage(data, draw=draw):
            data = bytearray(data)
            # Half of them in the header's first bytes, and in those of what follows it.
            at = draw.choice([0, data.index(b"h5fj", 4)]) + draw.randrange(16)
            at = draw.choice([at, draw.randrange(len(data))])
            data[at] ^= 1 << draw.randrange(8)
            return bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])

        try:
            resume(damage)
            assert sha256(out) == expected, seed
            assert names(out.parent) == ["x.h5"]
        except PackError as ex:
            said.add(str(ex))
    assert said == {
        f"{out}.partial.journal has no whole header (damaged, or of another version of h5feed): "
        "--overwrite starts again"
    }


def test_a_forged_journal_resumes_to_the_same_bytes_or_is_one_sentence(interrupted, out):
    resume, _ = interrupted
    said = Counter()
    for seed in range(120):

        def change(data, seed=seed):
            entries = frames(data)
            forge(entries, random.Random(seed))
            return joined(entries)

        try:
            resume(change)
        except PackError as ex:
            said[re.sub(r"[\d,]+", "N", str(ex).removeprefix(f"{out}.partial.journal "))] += 1
            continue
        report = check_file(out)
        assert report.is_sound, (seed, report)
        with h5py.File(out) as file:
            provenance = json.loads(file.attrs["provenance"])
        assert provenance["counts"]["packed"] == report.items == 22, (seed, provenance["counts"])
    assert len([text for text in said if text.startswith("has an entry behind image N ")]) == 1, (
        said
    )
    odd = [text for text in said if "--overwrite" not in text or not text.isprintable()]
    assert odd == []
    assert sum(said.values()) > 60, said


def test_a_forged_size_that_no_reader_would_take_is_never_called_done(interrupted, out):
    resume, _ = interrupted

    def change(data):
        entries = frames(data)
        kind = [("index", "<u4"), ("crc32", "<u4"), ("source_shape", "<i4", (2,))]
        kind += [("bytes", "<i8"), ("shape", "<i4", (2,)), ("box", "<i4", (4,))]
        rows = np.frombuffer(entries[1][1], kind).copy()
        rows["shape"][0] = (32, 128)
        entries[1][1] = rows.tobytes()
        return joined(entries)

    with pytest.raises(
        PackError,
        match=r"^the packed file would not be valid \(.* has sizes other than 64x64; .*\): "
        "--overwrite starts again$",
    ):
        resume(change)
    assert not out.exists()


@pytest.mark.parametrize(
    "header", [{"journal": 2}, {"journal": "1"}, {"new": "later versions know"}]
)
def test_a_journal_of_another_version_is_one_sentence(interrupted, header):
    resume, _ = interrupted

    def change(data):
        entries = frames(data)
        entries[0][0] |= header
        return joined(entries)

    with pytest.raises(
        PackError,
        match=r"x\.h5\.partial\.journal has no header that this version writes \(damaged, or of "
        r"another version of h5feed\): --overwrite starts again$",
    ):
        resume(change)


def test_resume_with_nothing_to_resume_begins(folder, out):
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).resumed == 0
    with pytest.raises(UsageError, match="exists: give another name, or --overwrite"):
        pack(folder, out, size=SIZE, num_workers=0, resume=True)
    assert names(out.parent) == ["x.h5"]


@pytest.fixture
def just_renamed(folder, out, monkeypatch):
    """OUT of a run that died when it had renamed OUT.partial; return its SHA-256."""
    with monkeypatch.context() as patch:
        patch.setattr(OutputPaths, "discard", lambda *args: None)
        pack(folder, out, size=SIZE, num_workers=0)
    assert names(out.parent) == ["x.h5", "x.h5.partial.journal"]
    return sha256(out)


@pytest.mark.parametrize("what", ["text", "another packed file", "part of it"])
def test_a_foreign_out_is_not_taken_for_the_end_of_a_run(folder, out, just_renamed, what):
    if what == "text":
        out.write_bytes(b"precious")
    elif what == "part of it":
        cut(out, 1)
    else:
        other = out.parent.parent / "other.h5"
        pack(folder, other, size=SIZE, fit="crop", num_workers=0)
        other.rename(out)
    before = sha256(out)
    with pytest.raises(UsageError, match="exists: give another name, or --overwrite"):
        pack(folder, out, size=SIZE, num_workers=0, resume=True)
    assert sha256(out) == before != just_renamed
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True, overwrite=True).resumed == 0
    assert sha256(out) == just_renamed
    assert names(out.parent) == ["x.h5"]


def test_a_finished_out_that_was_damaged_since_is_not_called_done(folder, out, just_renamed):
    flip(out, 20_000)
    with pytest.raises(PackError, match=r"was finished and is damaged \(1 of 24 images\): --ov"):
        pack(folder, out, size=SIZE, num_workers=0, resume=True)
    flip(out, 20_000)
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).resumed == 24
    assert sha256(out) == just_renamed
    assert names(out.parent) == ["x.h5"]


def test_an_out_that_went_away_is_packed_again(folder, out, just_renamed):
    out.unlink()
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).resumed == 0
    assert sha256(out) == just_renamed


@pytest.mark.parametrize("content", [b"", b"h5fj"])
def test_killed_before_the_header_was_whole(folder, out, content):
    OutputPaths.of(out).partial.write_bytes(b"")
    OutputPaths.of(out).journal.write_bytes(content)
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True).resumed == 0


@pytest.mark.usefixtures("_small_steps")
def test_an_existing_out_is_whole_until_it_is_replaced(folder, out, monkeypatch):
    out.write_bytes(b"precious")
    interrupt(monkeypatch, folder, out, 3, overwrite=True)
    assert out.read_bytes() == b"precious"
    with pytest.raises(UsageError, match="exists: give another name, or --overwrite"):
        pack(folder, out, size=SIZE, num_workers=0, resume=True)
    assert pack(folder, out, size=SIZE, num_workers=0, resume=True, overwrite=True).resumed > 0
    assert check_file(out).is_sound


@pytest.mark.usefixtures("_small_steps")
def test_keep_and_masks_resume_too(folder, out, monkeypatch):
    """Fields of items of their own sizes, and a second payload file."""
    masks = make_masks(folder, out.parent.parent / "masks")
    options = {"fit": "keep", "masks": masks}
    pack(folder, out, size=SIZE, num_workers=2, **options)
    expected = sha256(out)
    out.unlink()
    interrupt(monkeypatch, folder, out, 4, **options)
    assert "x.h5.partial.masks" in names(out.parent)
    assert pack(folder, out, size=SIZE, num_workers=2, resume=True, **options).resumed > 0
    assert sha256(out) == expected
    assert names(out.parent) == ["x.h5"]


@pytest.mark.usefixtures("_small_steps")
def test_beginning_anew_without_masks_leaves_none_behind(folder, out, monkeypatch):
    interrupt(monkeypatch, folder, out, 4, masks=make_masks(folder, out.parent.parent / "masks"))
    assert "x.h5.partial.masks" in names(out.parent)
    pack(folder, out, size=SIZE, num_workers=0, overwrite=True)
    assert names(out.parent) == ["x.h5"]
