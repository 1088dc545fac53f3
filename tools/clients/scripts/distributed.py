"""As torchrun starts it: two processes under gloo, DistributedDataParallel, DistributedSampler."""

import torch
import torch.distributed as dist
from shared import SIDE, arguments, report, seeded_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

args = arguments()
dist.init_process_group("gloo")
steps = [v2.Resize(SIDE), v2.CenterCrop(SIDE), v2.ToImage(), v2.ToDtype(torch.float32, True)]
dataset = ImageFolder(args.data, v2.Compose(steps))
sampler = DistributedSampler(dataset, seed=3)
loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=args.workers)
model = DistributedDataParallel(seeded_model(len(dataset.classes)))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
shares = [None, None]
dist.all_gather_object(shares, (list(sampler), losses))
if dist.get_rank() == 0:
    (first, mine), (second, others) = shares
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(len(dataset)))
    report(mine + others, order=first + second)
dist.destroy_process_group()
