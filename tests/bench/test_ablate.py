import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.ablations import outcome, packed_config
from h5feed.bench import ablate as module
from h5feed.bench import tricks
from h5feed.bench.ablate import AblateOptions, Ablation, Row, ablate
from h5feed.bench.report import as_dict, as_markdown, as_text, from_dict, save_plot
from h5feed.bench.tricks import Published
from h5feed.errors import UsageError
from h5feed.train.config import read_config

THREE = ("H5Loader", "channels_last", "fused optimizer")


@pytest.fixture
def measured(monkeypatch):
    """Rounds that measure nothing: the rate of a row is told by its configuration."""
    seen = []

    def run(entries, schedule, tell):
        seen.extend((entry, read_config(Path(entry.params["config"]))) for entry in entries)
        return [
            outcome(entry, rate_of(read_config(Path(entry.params["config"])))) for entry in entries
        ]

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(tricks, "imagefolder_class", lambda: object)
    return seen


def rate_of(config):
    """100, doubled by H5Loader and half as much again by channels_last; the ceiling is 1,000."""
    if config.data.loader == "synthetic":
        return 1000.0
    rate = 200.0 if config.data.loader == "h5loader" else 100.0
    return rate * (1.5 if config.speed.channels_last else 1.0)


def rows_of(tmp_path, **options):
    config = packed_config(tmp_path)
    found = ablate(config, AblateOptions(only=THREE, final_steps=3, **options))
    return {row.name: row for row in found.rows}, found


def test_one_switch_more_each_then_one_less_each(tmp_path, measured):
    rows, _ = rows_of(tmp_path)
    assert list(rows) == [
        "the plain loop",
        "+ H5Loader",
        "+ channels_last",
        "+ fused optimizer",
        "all but H5Loader",
        "all but channels_last",
        "all but fused optimizer",
    ]
    assert rows["+ channels_last"].tricks == ("H5Loader", "channels_last")
    assert rows["all but channels_last"].tricks == ("H5Loader", "fused optimizer")


def test_what_a_trick_is_worth_is_a_ratio(tmp_path, measured):
    rows, _ = rows_of(tmp_path)
    assert rows["the plain loop"].ratio is None
    assert rows["+ H5Loader"].ratio == pytest.approx(2.0)
    assert rows["+ channels_last"].ratio == pytest.approx(1.5)
    assert rows["+ fused optimizer"].ratio == pytest.approx(1.0)
    assert rows["all but H5Loader"].ratio == pytest.approx(2.0)
    assert rows["all but fused optimizer"].ratio == pytest.approx(1.0)


def test_every_row_stands_beside_its_ceiling(tmp_path, measured):
    rows, _ = rows_of(tmp_path)
    row = rows["+ channels_last"]
    assert row.rate == pytest.approx(300.0)
    assert row.ceiling == pytest.approx(1000.0)
    assert row.input_bound == pytest.approx(0.7)
    assert row.spread == pytest.approx(0.1)
    assert row.epoch_seconds == pytest.approx(12 / 300)
    assert (row.memory_bytes, row.final_loss) == (10**8, 1.5)


def test_no_configuration_is_measured_twice(tmp_path, measured):
    rows_of(tmp_path)
    configs = [config for _, config in measured]
    assert len(configs) == len(set(configs))
    # 4 cumulative rows and 2 new ones without a trick; 4 ceilings: H5Loader has that of no loader
    assert len([c for c in configs if c.data.loader == "synthetic"]) == 4
    assert len(configs) == 10


def test_all_rows_take_turns_and_look_at_the_loss_after_as_many_steps(tmp_path, measured):
    rows_of(tmp_path)
    real = [entry for entry, config in measured if config.data.loader != "synthetic"]
    free = [entry for entry, config in measured if config.data.loader == "synthetic"]
    assert {entry.params["final_steps"] for entry in real} == {3}
    assert {entry.params["final_steps"] for entry in free} == {0}
    assert [entry.required for entry, _ in measured].count(True) == 1
    assert measured[0][0].required
    assert all(entry.expected.ceiling for entry in free)
    assert not any(entry.expected.ceiling for entry in real)


def test_the_folder_is_read_by_the_plain_loop_alone(tmp_path, measured):
    config = packed_config(tmp_path)
    options = AblateOptions(images=tmp_path / "folder", only=("packed", "H5Loader"))
    ablate(config, options)
    trains = {c.data.loader: c.train for _, c in measured}
    assert trains["imagefolder"] == tmp_path / "folder"
    assert trains["dataloader"] == trains["h5loader"] == trains["synthetic"] == config.train


def test_without_the_trick_of_packing_the_folder_is_not_read(tmp_path, measured):
    ablate(packed_config(tmp_path), AblateOptions(images=tmp_path, only=("H5Loader",)))
    assert {config.data.loader for _, config in measured} == {"dataloader", "h5loader", "synthetic"}


def test_what_torch_does_by_default_is_only_left_out(tmp_path, measured):
    options = AblateOptions(only=("channels_last", "gradients to None"))
    found = ablate(packed_config(tmp_path), options)
    assert [row.name for row in found.rows] == [
        "the plain loop",
        "+ channels_last",
        "all but channels_last",
        "all but gradients to None",
    ]
    undone = [entry.name for entry, config in measured if not config.optim.set_to_none]
    assert undone == ["all but gradients to None", "all but gradients to None, no data"]


def test_a_row_above_its_ceiling_is_in_doubt_where_the_spread_does_not_explain_it(
    tmp_path, measured, monkeypatch
):
    def rate(config):
        return {"h5loader": 150.0, "dataloader": 110.0, "synthetic": 100.0}[config.data.loader]

    monkeypatch.setitem(globals(), "rate_of", rate)
    rows, found = rows_of(tmp_path, leave_one_out=False)
    assert rows["the plain loop"].input_bound == pytest.approx(-0.1)
    assert rows["the plain loop"].doubts == ()  # windows overlap: 99 to 121, and 90 to 110
    assert rows["+ H5Loader"].doubts == (
        "its slowest window (135 img/s) is faster than any on data that costs nothing (110): one "
        "of the two was disturbed",
    )
    said = as_text(found)
    assert "In doubt: + H5Loader: its slowest window (135 img/s)" in said
    assert "in doubt" in said
    assert "-50%" not in said
    assert "-10%" not in said


def test_leaving_out_can_be_left_out(tmp_path, measured):
    rows, _ = rows_of(tmp_path, leave_one_out=False)
    assert {row.group for row in rows.values()} == {"cumulative"}


def test_with_all_tricks_checkpointing_stands_beside(tmp_path, measured):
    found = ablate(packed_config(tmp_path), AblateOptions(leave_one_out=False))
    assert found.rows[-1].name == "all and gradient checkpointing"
    assert found.rows[-1].group == "beside"


def test_a_row_that_failed_says_so_and_the_others_stand(tmp_path, measured, monkeypatch):
    whole = module.run

    def run(entries, schedule, tell):
        made = whole(entries, schedule, tell)
        return [
            replace(o, rates=(), error="no compiler") if "channels" in o.name else o for o in made
        ]

    monkeypatch.setattr(module, "run", run)
    rows, _ = rows_of(tmp_path, leave_one_out=False)
    assert rows["+ channels_last"].error == "no compiler"
    assert rows["+ channels_last"].rate is None
    assert rows["+ fused optimizer"].ratio is None
    assert rows["+ H5Loader"].ratio == pytest.approx(2.0)


def test_facts_say_where_and_how(tmp_path, measured):
    _, found = rows_of(tmp_path)
    assert found.facts["versions"]["torch"]
    assert found.facts["options"] == {"seconds": 2.0, "repeats": 3, "final_steps": 3}
    assert found.title.startswith("resnet9-small at 16 px, 12 images, batches of 4")
    assert found.is_smoke
    assert asdict(found)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seconds": 0.0}, "--seconds 0.0 is too small: it must be at least 0.05"),
        ({"repeats": 0}, "--repeats 0 is too small: it must be at least 1"),
        ({"final_steps": 0}, "--final-steps 0 is too small"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        AblateOptions(**options)


def test_only_must_leave_something(tmp_path, measured):
    with pytest.raises(UsageError, match="--only magic leaves no trick to measure"):
        ablate(packed_config(tmp_path), AblateOptions(only=("magic",)))


@pytest.fixture
def ablation():
    common = {"ceiling": 500.0, "memory_bytes": 2 * 10**8, "final_loss": 1.25}
    return Ablation(
        title="tiny at 32 px",
        rows=(
            Row(name="the plain loop", group="cumulative", tricks=(), rates=(90.0, 100.0, 110.0),
                input_bound=0.8, epoch_seconds=12.0, **common),
            Row(name="+ H5Loader", group="cumulative", tricks=("H5Loader",), rates=(250.0,),
                ratio=2.5, input_bound=0.5, **common),
            Row(name="+ AMP", group="cumulative", tricks=("H5Loader", "AMP"), rates=(300.0,),
                ratio=1.2, published=Published(figure="1.5×", hardware="V100", source="Huang")),
            Row(name="all but H5Loader", group="without", tricks=("AMP",), rates=(100.0,),
                ratio=3.0),
            Row(name="all but AMP", group="without", tricks=("H5Loader",), error="no bf16"),
        ),
        images=1000,
        batch_size=10,
        machine="2-core VM",
        facts={"versions": {"torch": "2"}},
        left_out=("TF32: needs a GPU",),
    )  # fmt: skip


def test_the_table_says_everything(ablation):
    lines = as_text(ablation).splitlines()
    plain = next(line for line in lines if line.startswith("the plain loop"))
    assert plain.split()[3:] == ["100", "±10%", "–", "12.0", "200", "1.250", "500", "80%", "–"]
    by_name = {line.split("  ")[0]: line for line in lines}
    assert by_name["+ H5Loader"].endswith("none found")
    assert by_name["+ AMP"].endswith("1.5×; V100 [1]")
    assert by_name["all but AMP"].endswith("failed: no bf16")
    assert "Measured on 2-core VM, torch 2." in lines
    assert lines[-1] == "Not measured: TF32: needs a GPU"
    assert "[1] Huang." in lines
    assert "Smoke" not in as_text(ablation)


def test_markdown_has_a_row_for_each_trick_and_what_leaving_it_out_costs(ablation):
    rows = [line for line in as_markdown(ablation).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert rows[3].startswith("| + H5Loader | 250 | – | 2.50× | 3.00× |")
    assert rows[4].startswith("| + AMP | 300 | – | 1.20× | failed |")
    assert rows[4].endswith("| 1.5×; V100 [1] |")


def test_what_torch_does_by_default_has_the_row_that_leaves_it_out(ablation):
    default = Row(name="all but None", group="without", tricks=("AMP",), rates=(90.0,), ratio=1.1)
    more = replace(ablation, rows=(*ablation.rows, default))
    rows = [line for line in as_markdown(more).splitlines() if line.startswith("| all but")]
    assert [row[:35] for row in rows] == ["| all but None | 90 | – | – | 1.10×"]


def test_json_brings_it_back(ablation):
    values = json.loads(json.dumps(as_dict(ablation)))
    assert values["rows"][0]["images_per_second"] == 100.0
    assert from_dict(Ablation, values) == ablation


def test_a_smoke_run_is_said_to_be_one(ablation):
    small = from_dict(Ablation, as_dict(ablation) | {"images": 20})
    assert "Smoke run: 20 images are fewer than 8 batches of 10" in as_text(small)


def test_it_draws(ablation, tmp_path):
    pytest.importorskip("matplotlib")
    save_plot(ablation, tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
