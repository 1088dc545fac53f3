"""After cifar10-airbench: all images as one tensor on the device, batches cropped and flipped."""

import torch
import torchvision
from shared import SIDE, arguments, report, seeded_model, step
from torchvision.transforms import v2

args = arguments()
to_tensor = v2.Compose([v2.PILToTensor(), v2.Resize(SIDE), v2.CenterCrop(SIDE)])
dset = torchvision.datasets.ImageFolder(args.data, transform=to_tensor)
images = torch.stack([image for image, _ in dset])
labels = torch.tensor(dset.targets)
images = (images.float() / 255).to(memory_format=torch.channels_last)
model = seeded_model(len(dset.classes))
losses = []
for epoch in range(2):
    padded = torch.nn.functional.pad(images, (2,) * 4, "reflect")
    flipped = padded if epoch % 2 else padded.flip(-1)
    for chosen in torch.randperm(len(labels)).split(16):
        losses.append(step(model, flipped[chosen, :, 1 : SIDE + 1, 1 : SIDE + 1], labels[chosen]))
report(losses, order=labels.tolist())
