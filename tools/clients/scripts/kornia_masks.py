"""As kornia's users write it: AugmentationSequential over batches of images and masks."""

import torch
from kornia.augmentation import AugmentationSequential, RandomCrop, RandomHorizontalFlip
from mask_folder import MaskFolder
from shared import SIDE, Segmenter, arguments, report, step
from torch.utils.data import DataLoader

args = arguments()


def to_tensors(image, mask):
    """Make float (C, H, W) and int64 (H, W) of arrays, all of one size for the batch."""
    image, mask = torch.from_numpy(image[:64, :64]), torch.from_numpy(mask[:64, :64])
    return image.permute(2, 0, 1) / 255, mask.long()


dataset = MaskFolder(args.data, args.masks, transforms=to_tensors)
augment = AugmentationSequential(
    RandomHorizontalFlip(p=0.5), RandomCrop((SIDE, SIDE)), data_keys=["input", "mask"]
)
model = Segmenter(4)
losses, order = [], []
for images, masks in DataLoader(dataset, 8, shuffle=True, num_workers=args.workers):
    images, masks = augment(images, masks[:, None].float())
    losses.append(step(model, images, masks[:, 0].round().long()))
    order.append(int(masks.sum()))
report(losses, order=order)
