"""The DALI pipeline itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from h5feed.interop.dali._library import dali, fn, types
from h5feed.interop.dali.feed import Feed

__all__ = ["make_pipeline"]


def make_pipeline(
    feed: Feed,
    batch_size: int,
    *,
    threads: int,
    device_id: int | None,
    prefetch: int,
    workers: int,
) -> Any:
    """Return the pipeline over `feed`, not built yet.

    Its outputs: HWC images of each view, (H, W) masks of each field and view, labels (1,) int64 or
    (K,) float32, indices () int64 where the feed gives them. All but the indices lie on the
    device; `device_id` None makes a pipeline without a GPU. `workers` processes run the feed;
    with 0 the thread that runs the pipeline does.
    """
    return _graph(
        feed,
        device_id is not None,
        prefetch if workers else None,
        batch_size=batch_size,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch,
        exec_dynamic=True,
        py_num_workers=workers or 1,
        py_start_method="spawn",
    )


@dali.pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
def _graph(feed: Feed, on_gpu: bool, parallel: int | None) -> Any:
    ports = feed.ports
    nodes = fn.external_source(
        feed,
        num_outputs=len(ports),
        dtype=[getattr(types, port.dtype) for port in ports],
        ndim=[port.ndim for port in ports],
        layout=[port.layout for port in ports],
        batch=True,
        batch_info=True,
        no_copy=True,
        parallel=parallel is not None,
        prefetch_queue_depth=parallel,
    )
    count = len(feed.source.ports)
    images = feed.source.build(nodes[:count])
    rest = nodes[count:]
    outputs = []
    for image in images:
        made, rest = _changed(feed, image, rest)
        outputs.append(made)
    sent = len(feed.mask_names) * feed.pipeline.views + 1  # masks and labels
    outputs += [node.gpu() if on_gpu else node for node in rest[:sent]]
    return (*outputs, *rest[sent:])


def _changed(feed: Feed, image: Any, nodes: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the image after all steps of one view, and the nodes that are left."""
    rest = list(nodes)
    for step in feed.steps:
        count = len(step.part.ports)
        image = step.part.build(image, rest[:count])
        rest = rest[count:]
    return image, rest
