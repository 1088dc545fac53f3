"""torchdata's StatefulDataLoader: stopped in the middle of an epoch, and gone on from its state."""

import torch
from shared import SIDE, arguments, report, seeded_model, step
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

args = arguments()
steps = [v2.Resize(SIDE), v2.CenterCrop(SIDE), v2.ToImage(), v2.ToDtype(torch.float32, True)]
dataset = ImageFolder(args.data, v2.Compose(steps))
first = StatefulDataLoader(dataset, batch_size=8, shuffle=True, num_workers=args.workers)
model = seeded_model(len(dataset.classes))
batches = iter(first)
losses, order = [], []
for _ in range(3):
    images, labels = next(batches)
    losses.append(step(model, images, labels))
    order += labels.tolist()
state = first.state_dict()
left = [labels.tolist() for _, labels in batches]
second = StatefulDataLoader(dataset, batch_size=8, shuffle=True, num_workers=args.workers)
second.load_state_dict(state)
again = []
for images, labels in second:
    losses.append(step(model, images, labels))
    again.append(labels.tolist())
assert again == left
report(losses, order=order)
