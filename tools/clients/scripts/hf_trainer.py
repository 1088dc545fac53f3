"""After Hugging Face's image classification guide: dict samples, Trainer, its own collate."""

import tempfile

import torch
from datasets import load_dataset
from shared import SIDE, arguments, report, seeded_model
from torchvision.transforms import v2
from transformers import Trainer, TrainingArguments

args = arguments()
transform = v2.Compose(
    [v2.Resize(SIDE), v2.CenterCrop(SIDE), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
)


def prepare(rows):
    """Make the columns that the model takes, as `with_transform` asks for them."""
    return {
        "pixel_values": [transform(image.convert("RGB")) for image in rows["image"]],
        "labels": rows["label"],
    }


class Classifier(torch.nn.Module):
    """A model as transformers has them: loss and logits from keyword arguments."""

    def __init__(self):
        super().__init__()
        self.layers = seeded_model(4)

    def forward(self, pixel_values, labels=None):
        """Return the loss and the logits."""
        logits = self.layers(pixel_values)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


dataset = load_dataset("imagefolder", data_dir=args.data).with_transform(prepare)["train"]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=Classifier(),
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=16,
            max_steps=4,
            logging_steps=1,
            remove_unused_columns=False,
            dataloader_num_workers=args.workers,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=dataset,
    )
    trainer.train()
    predictions = trainer.predict(dataset)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
report(losses, order=predictions.label_ids.tolist())
