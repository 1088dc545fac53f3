"""After accelerate's examples/cv_example.py: prepare, skip_first_batches, gather_for_metrics."""

import torch
from accelerate import Accelerator, skip_first_batches
from shared import SIDE, arguments, report, seeded_model
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

args = arguments()
transform = transforms.Compose([transforms.RandomResizedCrop(SIDE), transforms.ToTensor()])
dataset = ImageFolder(args.data, transform)
accelerator = Accelerator(cpu=True)
loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=args.workers)
model = seeded_model(len(dataset.classes))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, order = [], []
for batches in (loader, skip_first_batches(loader, 2)):
    for images, labels in batches:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        order += accelerator.gather_for_metrics(labels).tolist()
report(losses, order=order)
