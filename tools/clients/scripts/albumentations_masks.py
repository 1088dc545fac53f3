"""As Albumentations' users write it: arrays in, image and mask through one pipeline."""

import albumentations
import torch
from albumentations.pytorch import ToTensorV2
from mask_folder import MaskFolder
from shared import SIDE, Segmenter, arguments, report, step
from torch.utils.data import DataLoader

args = arguments()
pipeline = albumentations.Compose(
    [
        albumentations.RandomCrop(SIDE, SIDE),
        albumentations.HorizontalFlip(p=0.5),
        albumentations.Normalize(),
        ToTensorV2(),
    ],
    seed=7,
)


def augment(image, mask):
    """Take and give (image, mask)."""
    made = pipeline(image=image, mask=mask)
    return made["image"], made["mask"].long()


dataset = MaskFolder(args.data, args.masks, transforms=augment)
model = Segmenter(4)
losses = []
for epoch in range(2):
    torch.manual_seed(epoch)
    for images, masks in DataLoader(dataset, 8, shuffle=True, num_workers=args.workers):
        losses.append(step(model, images, masks))
report(losses, order=[int(dataset[i][1].shape[0]) for i in range(len(dataset))])
