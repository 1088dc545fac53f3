import json
from dataclasses import replace

import pytest

from h5feed.bench.report import (
    Comparison,
    as_dict,
    as_markdown,
    as_text,
    from_dict,
    markdown_table,
    sweep_as_markdown,
    sweep_as_text,
    text_table,
)
from h5feed.bench.rounds import Cold, Outcome, suspicions

SLOW = Outcome(
    name="folder",
    ceiling=False,
    rates=(90.0, 100.0, 120.0),
    cpu_seconds_per_1000=1.5,
    private_bytes=300_000_000,
    startup_seconds=0.5,
    disk_bytes=2_000_000,
    cold=Cold(rate=50.0, read_bytes_per_image=100.0, resident_before=0.0),
)
FAST = Outcome(name="H5Loader", ceiling=False, rates=(800.0, 810.0, 790.0), note="quick")
BARE = Outcome(name="bare", ceiling=True, rates=(1000.0,))
REPORT = Comparison(
    title="a test",
    outcomes=(SLOW, FAST, BARE),
    images=1000,
    batch_size=100,
    machine="2-core thing",
    left_out=("DALI: not installed",),
)


def rows(text):
    return {line.split("  ")[0].strip("| "): line for line in text.splitlines()}


def test_the_rate_at_which_pythons_lock_binds_says_what_cores_the_figures_are_good_for():
    known = {"python_seconds": 5e-5, "workers": 2}
    text = as_text(replace(REPORT, facts=known))
    assert "held 50.0 µs an image: H5Loader's threads make at most 20,000 img/s" in text
    assert "with the cores up to 50 at most" in text  # 2 workers make 800
    assert "lock" not in as_text(replace(REPORT, facts=known, outcomes=(SLOW, BARE)))
    assert "lock" not in as_text(REPORT)


def test_text_has_a_row_per_loader_with_its_figures():
    text = as_text(REPORT)
    lines = rows(text)
    assert lines["folder"].split() == [
        "folder",
        "100",
        "15%",
        "1.0",
        "50",
        "0",
        "0.50",
        "1.50",
        "300",
        "2.0",
    ]
    assert "8.0" in lines["H5Loader"]
    assert "H5Loader: quick" in text.splitlines()
    assert "1,000" in lines["[bare]"]
    assert "Not measured: DALI: not installed" in lines


@pytest.mark.parametrize("kind", ["loading", "training"])
def test_text_fits_a_terminal(kind):
    """The widest figures that any machine will bring, and the longest name."""
    wide = replace(
        SLOW,
        name="make_dataloader(H5Dataset)",
        rates=(110_000.0, 120_000.0, 990_000.0),
        cold=replace(SLOW.cold, rate=100_000.0, read_bytes_per_image=1_500_000.0),
        cpu_seconds_per_1000=12.34,
        private_bytes=20_000_000_000,
        startup_seconds=123.45,
        disk_bytes=1_500_000_000,
        note="no labels, and a rather long story about what it does in another way than all others",
    )
    base = replace(SLOW, name="ImageFolder + DataLoader")
    known = {"pack_seconds": 1e4, "break_even_epochs": {wide.name: 1234.5}}
    report = replace(REPORT, kind=kind, outcomes=(base, wide, BARE), facts=known)
    assert max(map(len, as_text(report).splitlines())) <= 100


def test_a_column_that_nobody_fills_is_left_out():
    assert "| cold img/s |" in as_markdown(REPORT)
    without = replace(REPORT, outcomes=(replace(SLOW, cold=None), FAST))
    assert "| cold img/s |" not in as_markdown(without)


def test_headline_names_the_gain_over_the_fastest_that_is_not_ours():
    small = Outcome(name="256-px JPEGs, v2 on tensors", ceiling=False, rates=(400.0,))
    ours = replace(FAST, name="H5Dataset + DataLoader", rates=(500.0,))
    more = replace(REPORT, outcomes=(SLOW, small, ours, FAST, BARE))
    assert more.headline() == (
        "H5Loader: 800 img/s, 8.0 × folder (100 img/s), 2.0 × 256-px JPEGs, v2 on tensors "
        "(400 img/s); 80% of [bare]."
    )


def test_headline_compares_the_fastest_with_the_first_and_the_ceiling():
    assert REPORT.headline() == "H5Loader: 800 img/s, 8.0 × folder (100 img/s); 80% of [bare]."


@pytest.mark.parametrize(("images", "smoke"), [(399, True), (400, False)])
def test_a_small_set_is_a_smoke_run(images, smoke):
    report = replace(REPORT, images=images)
    assert report.is_smoke == smoke
    assert report.headline().startswith("Smoke run: 399 images") == smoke
    assert as_dict(report)["smoke"] == smoke
    assert ("×" in as_text(report).partition("±:")[0]) != smoke


def test_markdown_is_a_table():
    lines = [line for line in as_markdown(REPORT).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[1].startswith("| --- | ---: |")
    assert lines[3].endswith("| quick |")


def test_json_brings_the_report_back():
    assert from_dict(Comparison, json.loads(json.dumps(as_dict(REPORT)))) == REPORT


def test_a_failed_loader_keeps_its_row_and_says_why():
    failed = Outcome(name="FFCV", ceiling=False, error="ImportError: no cv")
    text = as_text(replace(REPORT, outcomes=(SLOW, failed)))
    assert rows(text)["FFCV"].split() == ["FFCV", *"–" * 9]
    assert "FFCV: failed: ImportError: no cv" in text.splitlines()


def test_a_long_reason_is_cut_in_the_table_and_whole_in_the_json():
    failed = Outcome(name="FFCV", ceiling=False, error="no " * 100)
    report = replace(REPORT, outcomes=(SLOW, failed))
    assert " …" in as_text(report)
    assert as_dict(report)["outcomes"][1]["error"] == "no " * 100


def test_a_loader_that_computes_out_of_turn_is_named():
    busy = replace(FAST, idle=False)
    assert "goes on computing" in as_text(replace(REPORT, outcomes=(SLOW, busy)))


def test_half_cached_cold_run_says_so():
    warm = replace(SLOW, cold=replace(SLOW.cold, resident_before=0.5))
    said = as_text(replace(REPORT, outcomes=(warm,)))
    assert "folder: 50% of its files were cached when it began cold" in said
    assert "cached when" not in as_text(REPORT)


def test_utilization_is_compute_time_over_running_time():
    report = replace(REPORT, kind="training")
    assert report.utilization(SLOW) == pytest.approx(0.1)
    assert report.utilization(replace(FAST, rates=(1100.0,))) == 1.0
    assert report.utilization(BARE) is None
    assert "10%" in rows(as_text(report))["folder"]
    assert "90%" in rows(as_text(report))["folder"]


def test_a_sweep_ends_with_all_settings_in_one_table():
    reports = [
        replace(
            REPORT,
            batch_size=size,
            outcomes=tuple(replace(o, params={"workers": 2}) for o in (SLOW, FAST)),
        )
        for size in (64, 256)
    ]
    assert sweep_as_text(reports).endswith(
        """
img/s, batch × workers  64×2w  256×2w
──────────────────────  ─────  ──────
folder                    100     100
H5Loader                  800     800"""
    )
    assert "| img/s, batch × workers | 64×2w | 256×2w |" in sweep_as_markdown(reports)
    assert sweep_as_text(reports).count("Measured on 2-core thing.") == 2


def test_the_legend_speaks_of_what_is_there():
    assert "cold: " in as_text(REPORT)
    assert "In […]" in as_text(REPORT)
    plain = as_text(replace(REPORT, outcomes=(replace(SLOW, cold=None), FAST)))
    assert "cold: " not in plain
    assert "In […]" not in plain
    assert "AU: accelerator utilization" in as_text(replace(REPORT, kind="training"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cpu_per_image": (1e-3, 0.9e-3, 1.1e-3)}, []),
        (
            {"cpu_per_image": (1e-3, 2.6e-3, 1.1e-3)},
            ["window 2 of 3 took 2,600 µs of CPU an image, the median 1,100"],
        ),
        ({"cpu_per_image": (1e-5, 2.6e-5, 1e-5)}, []),  # a tick more or less
        ({"lost_share": 0.04}, []),
        (
            {"lost_share": 0.5},
            [
                "50% of its epochs' time goes by after the last batch: it may make batches that "
                "nobody gets"
            ],
        ),
    ],
)
def test_a_jump_of_cpu_and_lost_batches_are_suspicious(changed, said):
    outcome = replace(FAST, **changed)
    assert suspicions(outcome) == said
    text = " ".join(as_text(replace(REPORT, outcomes=(outcome,))).split())
    assert all(line in text for line in said)
    assert from_dict(Comparison, as_dict(replace(REPORT, outcomes=(outcome,)))).outcomes == (
        outcome,
    )


HEADS, ROWS = ["who", "n"], [["a", "1,000"], ["longer", "2"]]
ROWS3 = [["a", "0.5", "1"], ["longer", "10.0", "2"]]


def test_words_to_the_left_and_numbers_to_the_right():
    assert text_table(HEADS, ROWS, {0}) == [
        "who         n",
        "──────  ─────",
        "a       1,000",
        "longer      2",
    ]


def test_heads_wider_than_their_columns_stand_in_two_lines():
    assert text_table(["who", "1st batch s", "n"], ROWS3, {0}) == [
        "            1st",
        "who     batch s  n",
        "──────  ───────  ─",
        "a           0.5  1",
        "longer     10.0  2",
    ]
    assert text_table(["who", "in s", "n"], ROWS3, {0})[0] == "who     in s  n"


def test_markdown_says_the_same():
    assert markdown_table(HEADS, ROWS, {0}) == [
        "| who | n |",
        "| --- | ---: |",
        "| a | 1,000 |",
        "| longer | 2 |",
    ]
