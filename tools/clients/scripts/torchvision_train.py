"""After torchvision's references/classification/train.py: presets, samplers, MixUp, CutMix."""

import torch
import torchvision
from shared import SIDE, arguments, report, seeded_model, step
from torch.utils.data import default_collate
from torchvision.transforms import v2


class PresetTrain:
    """As presets.ClassificationPresetTrain with its default backend, PIL."""

    def __init__(self, *, crop_size, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)):
        self.transforms = v2.Compose(
            [
                v2.RandomResizedCrop(crop_size, antialias=True),
                v2.RandomHorizontalFlip(0.5),
                v2.TrivialAugmentWide(),
                v2.PILToTensor(),
                v2.ToDtype(torch.float, scale=True),
                v2.Normalize(mean=mean, std=std),
            ]
        )

    def __call__(self, image):
        """Return the image ready for the model."""
        return self.transforms(image)


args = arguments()
dataset = torchvision.datasets.ImageFolder(
    args.data,
    PresetTrain(crop_size=SIDE),
)
dataset_test = torchvision.datasets.ImageFolder(
    args.data,
    v2.Compose([v2.Resize(SIDE), v2.CenterCrop(SIDE), v2.ToImage(), v2.ToDtype(torch.float, True)]),
)
num_classes = len(dataset.classes)
mixup_or_cutmix = v2.RandomChoice(
    [v2.MixUp(alpha=0.2, num_classes=num_classes), v2.CutMix(alpha=1.0, num_classes=num_classes)]
)
data_loader = torch.utils.data.DataLoader(
    dataset,
    batch_size=16,
    sampler=torch.utils.data.RandomSampler(dataset),
    num_workers=args.workers,
    collate_fn=lambda batch: mixup_or_cutmix(*default_collate(batch)),
)
data_loader_test = torch.utils.data.DataLoader(
    dataset_test, batch_size=16, sampler=torch.utils.data.SequentialSampler(dataset_test)
)
model = seeded_model(num_classes)
losses = [step(model, images, targets) for images, targets in data_loader]
order = torch.cat([targets for _, targets in data_loader_test]).tolist()
report(losses, order=order)
