"""torchvision v2 over image and mask: tv_tensors, which it tells apart, and a joint transform."""

import torch
from mask_folder import MaskFolder
from shared import SIDE, Segmenter, arguments, report, step
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

args = arguments()
augment = v2.Compose(
    [
        v2.RandomCrop(SIDE),
        v2.RandomHorizontalFlip(),
        v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
    ]
)


def wrapped(image, mask):
    """Make tv_tensors of arrays, and augment them."""
    image = tv_tensors.Image(torch.from_numpy(image).permute(2, 0, 1))
    return augment(image, tv_tensors.Mask(torch.from_numpy(mask).long()))


dataset = MaskFolder(args.data, args.masks, transforms=wrapped)
model = Segmenter(4)
losses, order = [], []
for images, masks in DataLoader(dataset, 8, shuffle=True, num_workers=args.workers):
    losses.append(step(model, images, masks))
    order.append(int(masks.sum()))
report(losses, order=order)
