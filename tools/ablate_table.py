"""Turn an ablation's JSON into a page's table and a plot.

    train-h5 ablate TRAIN.h5 --images DIR --json > benchmarks/ablate.json
    python tools/ablate_table.py benchmarks/ablate.json --readme README.md

--readme replaces what stands between `<!-- ablate: begin -->` and `<!-- ablate: end -->`; without
it the table is printed. --plot draws the plot.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from _marks import put_into
from h5feed.bench.ablate import Ablation
from h5feed.bench.report import as_markdown, from_dict, save_plot

__all__ = ["main"]


def main(given: Sequence[str] | None = None) -> int:
    """Print the table or put it into its page, and draw the plot."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("json", type=Path, help="what train-h5 ablate --json printed")
    parser.add_argument("--readme", type=Path, help="the page to put the table into")
    parser.add_argument("--plot", type=Path, help="draw the plot here")
    options = parser.parse_args(given)
    ablation = from_dict(Ablation, json.loads(options.json.read_text()))
    if options.readme is None:
        print(as_markdown(ablation))
    else:
        put_into(options.readme, "ablate", as_markdown(ablation))
    if options.plot is not None:
        save_plot(ablation, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
