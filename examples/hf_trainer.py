"""Hugging Face's Trainer over a packed file: samples are the dicts that it takes.

pack-h5 images train.h5
python examples/hf_trainer.py train.h5
"""

import argparse

import torch
from torchvision.transforms import v2
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from h5feed import H5Dataset

MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


def main(given: list[str] | None = None) -> float:
    """Train, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--hidden", type=int, default=192, help="192: ViT-Tiny")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", default="hf-run")
    args = parser.parse_args(given)

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(args.size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    ds = H5Dataset(
        args.train, transform, output="tensor", aspect="source", keys=("pixel_values", "labels")
    )
    config = ViTConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=3,
        intermediate_size=4 * args.hidden,
        image_size=args.size,
        num_labels=len(ds.classes),
        id2label=dict(enumerate(ds.classes)),
        label2id=ds.class_to_idx,
    )
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            dataloader_num_workers=args.workers,
            remove_unused_columns=False,  # they are named by keys=
            report_to="none",
        ),
        train_dataset=ds,
    )
    return float(trainer.train().training_loss)


if __name__ == "__main__":
    main()
