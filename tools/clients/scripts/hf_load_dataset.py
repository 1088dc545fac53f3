"""Hugging Face datasets over the packed file, with no line of h5feed: load_dataset("hdf5")."""

import datasets
from shared import arguments, report

args = arguments()
features = datasets.Features(
    {"images": datasets.Array3D((64, 64, 3), "uint8"), "labels": datasets.Value("int64")}
)
rows = datasets.load_dataset("hdf5", data_files=args.data, features=features, split="train")
report([], order=rows["labels"][:])
