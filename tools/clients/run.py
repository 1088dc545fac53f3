"""Clients of ImageFolder that others write: each runs as it is, and with its dataset line swapped.

    python tools/clients/run.py                     all: benchmarks/clients.json, docs/clients.md
    python tools/clients/run.py --only timm_train   one, and only print what came of it
    python tools/clients/run.py --python OTHER      with the packages of another environment

Each script in `scripts/` is small and written after the real interface. It trains a few steps on
the CPU over a folder, by ImageFolder or what its library brings; then the tool changes its dataset
line and its import, as `CLIENTS` says and in no other way, and it runs over the packed file. Losses
and the order of labels are compared. `scripts/requirements.txt` names the clients' packages.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from h5feed import H5Dataset, __version__, pack

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parent
ROOT = TOOLS.parent

SIDE = 64
"""Short side of every image; kept by `--fit keep`, so that nothing is resized."""
_FOLDER = ("from torchvision.datasets import ImageFolder", "from h5feed import H5Dataset")
_MASKS = ("from mask_folder import MaskFolder", "from h5feed import H5Dataset")
_CLOSE = 0.05
"""Losses may differ so much where pixels do, by 1 of 255."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A script, and what the swap makes of it: two texts replaced, and nothing else."""

    name: str
    what: str
    package: str
    imports: tuple[str, str]
    """The import as it was, and with h5feed's in its place or after it."""
    line: tuple[str, str] = ("ImageFolder(", "H5Dataset(")
    masks: bool = False
    processes: int = 1
    class_order: str = "sorted"

    def original(self) -> str:
        """Return the script as it is."""
        return (HERE / "scripts" / f"{self.name}.py").read_text()

    def swapped(self) -> str:
        """Return the script with its import and its dataset line changed."""
        text = self.original()
        for before, after in (self.imports, self.line):
            if before not in text:
                raise SystemExit(f"{self.name}.py lacks {before!r}, which the swap replaces")
            text = text.replace(before, after)
        return text

    def changed(self) -> tuple[list[str], list[str]]:
        """Return the swapped script's lines that are no lines of the original: others, imports."""
        was = self.original().splitlines()
        new = [line for line in self.swapped().splitlines() if line not in was]
        imports = [line for line in new if line.startswith(("import ", "from "))]
        return [line for line in new if line not in imports], imports


CLIENTS = [
    Client(
        name="torchvision_train",
        what="references/classification/train.py: presets, samplers, MixUp",
        package="torchvision",
        imports=("import torchvision\n", "import torchvision\nimport h5feed\n"),
        line=("torchvision.datasets.ImageFolder(", "h5feed.H5Dataset("),
    ),
    Client(
        name="imagenet_main",
        what="pytorch/examples, imagenet/main.py",
        package="torch",
        imports=("from torchvision import datasets", "from h5feed import H5Dataset"),
        line=("datasets.ImageFolder(", "H5Dataset("),
    ),
    Client(
        name="timm_train",
        what="train.py: create_loader, PrefetchLoader, FastCollateMixup, RandAugment",
        package="timm",
        imports=(
            "from timm.data.dataset_factory import create_dataset",
            "from h5feed import H5Dataset",
        ),
        line=('create_dataset("", root=args.data)', "H5Dataset(args.data)"),
        class_order="natural",
    ),
    Client(
        name="hf_trainer",
        what="Trainer over an image folder, its own collate",
        package="transformers",
        imports=("from datasets import load_dataset", "from h5feed import H5Dataset"),
        line=(
            'load_dataset("imagefolder", data_dir=args.data).with_transform(prepare)["train"]',
            'H5Dataset(args.data, transform, keys=("pixel_values", "labels"))',
        ),
    ),
    Client(
        name="accelerate_loop",
        what="examples/cv_example.py: prepare, skip_first_batches",
        package="accelerate",
        imports=_FOLDER,
    ),
    Client(
        name="lightning_fit",
        what="Trainer.fit over DataLoaders",
        package="lightning",
        imports=_FOLDER,
    ),
    Client(
        name="ffcv_imagenet",
        what="ffcv-imagenet's growing resolution, in a DataLoader",
        package="torch",
        imports=_FOLDER,
    ),
    Client(
        name="airbench",
        what="cifar10-airbench: all images as one tensor",
        package="torch",
        imports=("import torchvision\n", "import h5feed\n"),
        line=("torchvision.datasets.ImageFolder(", "h5feed.H5Dataset("),
    ),
    Client(
        name="torchdata_stateful",
        what="StatefulDataLoader, stopped and resumed in mid-epoch",
        package="torchdata",
        imports=_FOLDER,
    ),
    Client(
        name="samplers",
        what="WeightedRandomSampler, SubsetRandomSampler, DistributedSampler",
        package="torch",
        imports=_FOLDER,
    ),
    Client(
        name="wrappers",
        what="a subclass with paths, random_split, Subset, ConcatDataset",
        package="torch",
        imports=_FOLDER,
        line=("WithPaths(ImageFolder)", "WithPaths(H5Dataset)"),
    ),
    Client(
        name="distributed",
        what="torchrun, two processes under gloo: disjoint shares",
        package="torch",
        imports=_FOLDER,
        processes=2,
    ),
    Client(
        name="albumentations_masks",
        what="Compose over image and mask",
        package="albumentations",
        imports=_MASKS,
        line=(
            "MaskFolder(args.data, args.masks, transforms=augment)",
            'H5Dataset(args.data, transforms=augment, output="numpy")',
        ),
        masks=True,
    ),
    Client(
        name="kornia_masks",
        what="AugmentationSequential over batches of images and masks",
        package="kornia",
        imports=_MASKS,
        line=(
            "MaskFolder(args.data, args.masks, transforms=to_tensors)",
            'H5Dataset(args.data, transforms=to_tensors, output="numpy")',
        ),
        masks=True,
    ),
    Client(
        name="torchvision_masks",
        what="transforms.v2 over image and mask",
        package="torchvision",
        imports=_MASKS,
        line=(
            "MaskFolder(args.data, args.masks, transforms=wrapped)",
            "H5Dataset(args.data, transforms=augment)",
        ),
        masks=True,
    ),
]
READERS = {
    "hdf5_readers": ("h5py and pandas over the packed file, a column below /user", "pandas"),
    "hf_load_dataset": ('load_dataset("hdf5") over the packed file', "datasets"),
}
"""Scripts that open the packed file without h5feed: name, what they are, package."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """The images of all clients, as folders and packed."""

    images: Path
    """JPEG files in class folders."""
    pngs: Path
    masks: Path
    packed: Path
    """A folder of packed files."""

    def path(self, store: str, class_order: str = "sorted") -> Path:
        """Return the packed file of a kind: "original", "keep", "raw" or "masks"."""
        return self.packed / f"{store}-{class_order}.h5"


def make_material(folder: Path, count: int = 64) -> Material:
    """Pack `count` JPEGs of four classes, whose natural order is not the sorted one."""
    samples = ROOT / "data_samples" / "images"
    sources = sorted(path for path in samples.rglob("*") if path.is_file())[:count]
    found = Material(
        images=folder / "images",
        pngs=folder / "pngs",
        masks=folder / "masks",
        packed=folder / "packed",
    )
    found.packed.mkdir(parents=True)
    for number, source in enumerate(sources):
        name = f"{('class1', 'class2', 'Class3', 'class10')[number % 4]}/{number:04}"
        with Image.open(source) as opened:
            image = opened.convert("RGB")
        scale = SIDE / min(image.size)
        image = image.resize([max(SIDE, round(side * scale)) for side in image.size])
        places = (found.images / f"{name}.jpg", found.pngs / f"{name}.png")
        for place in (*places, found.masks / f"{name}.png"):
            place.parent.mkdir(parents=True, exist_ok=True)
        image.save(places[0], quality=92)
        image.save(places[1])
        Image.fromarray(np.asarray(image).argmax(2).astype(np.uint8)).save(
            found.masks / f"{name}.png"
        )
    keep: dict[str, Any] = {"size": SIDE, "fit": "keep", "num_workers": 0}
    for order in ("sorted", "natural"):
        original = found.path("original", order)
        pack(found.images, original, store="original", class_order=order, num_workers=0)
        pack(found.images, found.path("keep", order), class_order=order, **keep)  # type: ignore[arg-type]
    pack(found.images, found.path("raw"), size=SIDE, num_workers=0)
    pack(found.pngs, found.path("masks"), masks=found.masks, **keep)
    return found


def arguments_of(client: Client, material: Material, store: str | None) -> list[str]:
    """Return the arguments of a script: over the folder, or over a packed file of `store`."""
    if store is not None:
        return [str(material.path(store, client.class_order))]
    if client.masks:
        return [str(material.pngs), "--masks", str(material.masks)]
    return [str(material.images)]


def stores_of(client: Client) -> list[str]:
    """Return what a client's packed files may be; masks are not stored beside original bytes."""
    return ["masks"] if client.masks else ["original", "keep"]


def run_script(
    text: str, given: Sequence[str], *, python: str, workers: int, processes: int = 1
) -> dict[str, Any]:
    """Run a script by itself; return what it reported. Raises SystemExit with what it said."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "client.py"
        script.write_text(text)
        paths = [HERE / "scripts", ROOT / "src", TOOLS / "site"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HF_HOME": folder,
            "HF_HUB_OFFLINE": "1",
            "NO_ALBUMENTATIONS_UPDATE": "1",
            "OMP_NUM_THREADS": "1",
        }
        starter = []
        if processes > 1:
            starter = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={processes}",
            ]
        command = [python, *starter, str(script), *given, "--workers", str(workers)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(given)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def compared(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Say how a swapped client's numbers stand to the original's."""
    if found["order"] != wanted["order"] or len(found["losses"]) != len(wanted["losses"]):
        return "another order"
    off = np.abs(np.subtract(found["losses"], wanted["losses"])).max()
    if off == 0:
        return "identical"
    return f"within {off:.0e}" if off <= _CLOSE else f"differs by {off:.2g}"


def try_client(client: Client, material: Material, *, python: str, workers: int) -> dict[str, Any]:
    """Run a client as it is and swapped over each store; return its row."""

    def run(text: str, store: str | None) -> dict[str, Any]:
        given = arguments_of(client, material, store)
        return run_script(text, given, python=python, workers=workers, processes=client.processes)

    wanted = run(client.original(), None)
    lines, imports = client.changed()
    row: dict[str, Any] = {
        "what": client.what,
        "package": client.package,
        "lines": len(lines),
        "imports": len(imports),
        "line": lines[0].strip(),
        "steps": len(wanted["losses"]),
    }
    for store in stores_of(client):
        row[store] = compared(run(client.swapped(), store), wanted)
    return row


def try_reader(name: str, material: Material, *, python: str) -> dict[str, Any]:
    """Let a script read the packed file that knows nothing of h5feed; return its row."""
    path = material.path("raw")
    text = (HERE / "scripts" / f"{name}.py").read_text()
    found = run_script(text, [str(path)], python=python, workers=0)
    what, package = READERS[name]
    read = "reads it" if found["order"] == list(H5Dataset(path).targets) else "reads it wrong"
    return {"what": what, "package": package, "lines": 0, "imports": 0, "raw": read}


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return the packages' versions in that environment."""
    code = "import sys, importlib.metadata as m; print(*(m.version(n) for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{done.stderr.splitlines()[-1]}: install what scripts/requirements.txt names, beside "
            "this program"
        )
    return dict(zip(packages, done.stdout.split(), strict=True))


def table(found: dict[str, Any]) -> str:
    """Return the table of docs/clients.md."""
    lines = [
        "| client | package | changed lines | `--store original` | `--fit keep` |",
        "|---|---|---:|---|---|",
    ]
    for row in found["clients"].values():
        changed = f"{row['lines']} + {row['imports']} import" if row["imports"] else "0"
        original, keep = row.get("original", "–"), row.get("keep", row.get("masks", row.get("raw")))
        version = found["versions"][row["package"]]
        lines.append(
            f"| {row['what']} | {row['package']} {version} | {changed} | {original} | {keep} |"
        )
    return "\n".join([*lines, "", f"h5feed {found['h5feed']}, {found['date']}."])


def main(given: Sequence[str] | None = None) -> int:
    """Run the clients that were asked for; write the table where that is all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="names of clients")
    parser.add_argument("--python", default=sys.executable, help="whose packages are used")
    parser.add_argument("--workers", type=int, default=2, help="of the DataLoaders")
    options = parser.parse_args(given)
    chosen = [client for client in CLIENTS if options.only is None or client.name in options.only]
    readers = [name for name in READERS if options.only is None or name in options.only]
    packages = sorted({c.package for c in chosen} | {READERS[name][1] for name in readers})
    found: dict[str, Any] = {
        "h5feed": __version__,
        "versions": versions(options.python, packages),
        "clients": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        material = make_material(Path(folder))
        for client in chosen:
            row = try_client(client, material, python=options.python, workers=options.workers)
            found["clients"][client.name] = row
            print(client.name, row, flush=True)
        for name in readers:
            found["clients"][name] = try_reader(name, material, python=options.python)
            print(name, found["clients"][name], flush=True)
    wrong = [
        name
        for name, row in found["clients"].items()
        if any(
            str(value).startswith(("differs", "another", "reads it w")) for value in row.values()
        )
    ]
    if options.only is None:
        found["date"] = datetime.date.today().isoformat()
        (ROOT / "benchmarks" / "clients.json").write_text(json.dumps(found, indent=1) + "\n")
        sys.path.insert(0, str(TOOLS))
        from pages import put_into  # here: it imports this module, for `table`

        put_into(ROOT / "docs" / "clients.md", "clients", table(found))
    print("\n".join(f"{name}: its numbers are others" for name in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
