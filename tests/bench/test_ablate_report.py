import json
from dataclasses import replace

import pytest

from h5feed.bench.ablate_report import as_dict, as_markdown, as_text, from_dict, save_plot
from h5feed.bench.ablation import Ablation, Row
from h5feed.bench.tricks import Published


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
    assert from_dict(values) == ablation


def test_a_smoke_run_is_said_to_be_one(ablation):
    small = from_dict(as_dict(ablation) | {"images": 20})
    assert "Smoke run: 20 images are too few for batches of 10" in as_text(small)


def test_it_draws(ablation, tmp_path):
    pytest.importorskip("matplotlib")
    save_plot(ablation, tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
