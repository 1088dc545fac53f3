"""For PYTHONPATH: lets every Python process import a torchvision built for CUDA beside a CPU torch.

    PYTHONPATH=tools/site bench-h5 photos.h5 --images IMAGES

Such a torchvision looks up two operators at import that it lacks; loading images calls neither.
"""

import torch

library = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for op in ("nms", "qnms"):
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
