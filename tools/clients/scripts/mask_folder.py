"""The dataset that segmentation scripts bring along: images, and masks of the same names."""

from pathlib import Path

import numpy as np
from PIL import Image
from torch.utils.data import Dataset


class MaskFolder(Dataset):
    """(image, mask) as arrays, through `transforms`."""

    def __init__(self, images, masks, transforms):
        self.images = sorted(Path(images).rglob("*.png"))
        self.masks = [Path(masks) / path.relative_to(images) for path in self.images]
        self.transforms = transforms

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = np.array(Image.open(self.images[index]).convert("RGB"))
        return self.transforms(image, np.array(Image.open(self.masks[index])))
