"""NVIDIA DALI on the CPU: a pipeline without a device.

fn.readers.file, fn.decoders.image_random_crop, fn.resize, fn.flip as in DALI's ResNet-50 example
(https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/use_cases/pytorch/resnet50/
pytorch-resnet50.html), and its PyTorch iterator. device_id=None makes a pipeline of CPU
operators. The raw variant reads .npy files with fn.readers.numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from _common import TorchLoader, labeled_files, serve, write_folder


def _pipeline(params: Mapping[str, Any], count: int) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    crop = params["crop"]
    files = labeled_files(params["data"])
    names, labels = [str(path) for path, _ in files], [label for _, label in files]
    assert len(names) == count
    reading = {"random_shuffle": True, "pad_last_batch": True, "name": "reader"}

    @pipeline_def
    def jpeg() -> Any:
        data, label = fn.readers.file(files=names, labels=labels, **reading)
        image = fn.decoders.image_random_crop(
            data, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0]
        )
        image = fn.resize(image, size=[crop, crop], interp_type=types.INTERP_LINEAR)
        return fn.flip(image, horizontal=fn.random.coin_flip()), label

    @pipeline_def
    def raw() -> Any:
        image = fn.readers.numpy(files=names, cache_header_information=True, **reading)
        image = fn.random_resized_crop(
            image, size=[crop, crop], random_area=[0.08, 1.0], interp_type=types.INTERP_LINEAR
        )
        return fn.flip(image, horizontal=fn.random.coin_flip())

    build = raw if params["variant"] == "raw" else jpeg
    return build(batch_size=params["batch_size"], num_threads=params["workers"], device_id=None)


class Adapter(TorchLoader):
    """DALIGenericIterator over a CPU pipeline."""

    layout = "NHWC"

    def __init__(self, params: Mapping[str, Any]) -> None:
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        raw = params["variant"] == "raw"
        loader = DALIGenericIterator(
            [_pipeline(params, len(labeled_files(params["data"])))],
            ["images"] if raw else ["images", "labels"],
            reader_name="reader",
            last_batch_policy=LastBatchPolicy.PARTIAL,
            auto_reset=True,
        )
        super().__init__(loader, params["data"])
        self.note = "no labels: fn.readers.numpy has none" if raw else ""

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield (images, labels) of one epoch."""
        iterator = iter(self.loader)
        try:
            for (batch,) in iterator:
                labels = batch.get("labels")
                yield batch["images"], None if labels is None else labels.reshape(-1)
        except GeneratorExit:
            # DALI cannot be reset in the middle of an epoch. At its end auto_reset has begun the
            # next one: to drain then would make a whole epoch that nobody gets.
            for _ in iterator:
                pass
            raise


if __name__ == "__main__":
    serve(Adapter, write_folder)
