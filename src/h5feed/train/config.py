"""What a training run is made of: one typed tree, which is the CLI and the run's config.json."""

import json
import math
import os
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional, arg

from h5feed.disk import replaced
from h5feed.errors import UsageError

__all__ = [
    "DataConfig",
    "DebugConfig",
    "DistributedConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "RecipeConfig",
    "RecipeName",
    "ScheduleConfig",
    "SpeedConfig",
    "TrainConfig",
    "above_zero",
    "at_least",
    "below_one",
    "flag",
    "read_config",
    "scale_lr",
    "write_config",
]

LoaderName = Literal["h5loader", "dali", "dataloader", "imagefolder", "synthetic"]
ScheduleName = Literal["constant", "onecycle", "cyclic", "cosine", "linear", "step"]
LossName = Literal["auto", "cross-entropy", "bce"]
Precision = Literal["auto", "torch", "fp32", "tf32", "bf16", "fp16"]
AutoAugmentName = Literal["none", "ra", "ta_wide", "imagenet", "cifar10", "svhn", "augmix"]
CropName = Literal["auto", "random-resized", "random-crop", "none"]
CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune"]
DebugTool = Literal["off", "anomaly", "profile", "gradcheck", "nvtx"]
ScalingRule = Literal["off", "linear", "sqrt"]
RecipeName = Literal["none", "torchvision-resnet50", "timm-a3", "cifar-airbench"]
OptimizerName = Literal["adamw", "sgd", "lars", "lamb", "novograd"]

_USUAL_DECAY: dict[OptimizerName, float] = {
    "adamw": 0.05,
    "sgd": 5e-4,
    "lars": 1e-4,
    "lamb": 0.01,
    "novograd": 1e-3,
}
"""Weight decay by optimizer, as their papers and timm's recipes have it: what is decoupled is
multiplied by the rate alone, and has to be larger than what is added to the gradient."""
_USUAL_WARMUP = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is trained."""

    model: str = "resnet18"
    """resnet9 (for 32 px), resnet9-small (a sixteenth of its work), resnet18, unet,
    torchvision:NAME, timm:NAME, or module:function, called with the number of outputs."""
    pretrained: bool = False
    """Start from the weights that torchvision or timm has for the model, normalize with their mean
    and std, and replace the head if the classes differ."""
    init: Path | None = None
    """Start from the weights of a checkpoint of train-h5, or of a state_dict (.pt, .safetensors);
    a head of another size is trained from scratch."""
    freeze: str = ""
    """Layers that are not trained: how many of them from the input, prefixes of weights' names
    (layer1,layer2), or backbone (all but the head). Batch norms in them keep their statistics."""
    drop_path: float | None = None
    """Stochastic depth (Huang et al. 2016): rate at which the last block is skipped, less for
    those before it. By default the model's own."""
    drop_biases: bool = False
    """Drop the bias of each layer that a batch norm follows: the norm subtracts it again."""
    grad_checkpointing: bool = False
    """Gradient checkpointing: keep only each block's input, and compute the rest again: saves
    memory, costs time."""

    def __post_init__(self) -> None:
        if self.drop_path is not None:
            below_one(self, "drop_path")
        if self.pretrained and self.init is not None:
            raise UsageError(
                f"--pretrained and --init {self.init} both say where weights come from: leave one "
                "of them out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """What is learned, and how it is scored."""

    task: str = "auto"
    """classification, multi-label (any number of classes an image, scored by mAP), regression,
    segmentation, or module:function that returns a Task; auto decides by what the file holds."""
    num_outputs: int = 0
    """Classes, or targets; 0 takes the number from the file."""
    loss: LossName = "auto"
    """For classes: cross-entropy, or bce, where each class is a yes-or-no question of its own
    (Wightman et al. 2021, arXiv:2110.00476, recipes A1 to A3), with the shares of --mixup and
    --cutmix as targets. auto takes bce for multi-label, which has no other."""
    bce_target_thresh: float | None = None
    """bce: shares above this count as a whole yes, the others as no (0.2 in timm's A2 and A3)."""
    label_smoothing: float = 0.0
    """Share of the target taken from the true class and spread over all (arXiv:1512.00567)."""
    ignore_index: int = 255
    """Class number in masks that is neither learned nor scored."""

    def __post_init__(self) -> None:
        at_least(self, 0, "num_outputs", "ignore_index")
        below_one(self, "label_smoothing")
        if self.bce_target_thresh is not None:
            below_one(self, "bce_target_thresh")
            if self.loss != "bce":
                raise UsageError(
                    f"--bce-target-thresh {self.bce_target_thresh} does nothing with --loss "
                    f"{self.loss}: give --loss bce, or --bce-target-thresh None"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """How images reach the model."""

    loader: LoaderName = "h5loader"
    """h5loader; dali (the same batches, made by NVIDIA DALI); dataloader (stock, over H5Dataset);
    imagefolder (stock, over torchvision's ImageFolder: TRAIN and --val are folders then);
    synthetic (one batch again and again: the ceiling)."""
    workers: int = -1
    """Threads of h5loader and dali (at least one), worker processes of the stock loaders; -1
    chooses."""
    pin_memory: bool = True
    """Stock loaders: batches in page-locked memory, so that copies to a GPU overlap (h5loader's
    always are)."""
    persistent_workers: bool = True
    """Stock loaders: keep worker processes from epoch to epoch."""
    prefetch: int = 2
    """Batches made ahead of the one in use (by each worker process)."""
    augment_on: Literal["auto", "cpu", "device"] = "auto"
    """Where h5loader crops and flips."""
    residency: Literal["stream", "device", "pinned", "auto"] = "stream"
    """Where h5loader keeps the images: in the file, all of them on the device, in page-locked
    memory that the device reads, or by their size."""
    size: int = 0
    """Side in pixels of the square images that the model sees; 0 takes the file's, up to 224."""
    crop: CropName = "auto"
    """random-resized (ImageNet's), random-crop (padded by an eighth: CIFAR's), or none;
    auto takes random-crop up to 64 px."""
    padding: int = -1
    """Pixels around each image before random-crop; -1 takes an eighth of its side."""
    padding_mode: Literal["constant", "reflect"] = "constant"
    """What random-crop pads with: black, or the image mirrored at its edges."""
    auto_augment: AutoAugmentName = "none"
    """A policy over changes of training images, by torchvision's names: ra (RandAugment, Cubuk et
    al. 2020), ta_wide (TrivialAugmentWide, Müller and Hutter 2021), imagenet, cifar10 or svhn
    (AutoAugment's, Cubuk et al. 2019), augmix (Hendrycks et al. 2020)."""
    ra_magnitude: int = 9
    """ra: how strong the changes are, of 0 to 30 (of timm's m0 to m10 three times the number)."""
    color_jitter: float = 0.0
    """Change brightness, contrast and saturation of training images by factors within 1 - this
    and 1 + this (0.4 in ImageNet's recipes); 0 turns it off."""
    random_erase: float = 0.0
    """Share of the training images that lose a random rectangle (Zhong et al. 2017,
    arXiv:1708.04896), filled with the mean color; 0 turns it off. Not for segmentation."""
    flip: bool = True
    """Mirror half of the images, left to right."""
    alternating_flip: bool = False
    """With --flip, mirror each image in every other epoch (arXiv:2404.00498); which half comes
    first is drawn once. h5loader only."""
    balance: bool = False
    """Draw images with replacement, each class as often as any other; the epoch's length stays.
    h5loader only, for one class an image."""
    aug_repeats: int = 1
    """Times that each image comes in a row, each time augmented anew (repeated augmentation, Hoffer
    et al. 2020); an epoch stays as long, so it sees a part of the images. h5loader only."""
    val_size: int = 0
    """Side in pixels of the images that are scored; 0 takes --size."""
    val_resize: int = 0
    """Short side to which images are resized before their middle is scored; 0 takes 8/7 of the
    side for photos (and where --crop is another, the whole image)."""

    def __post_init__(self) -> None:
        at_least(self, -1, "workers", "padding")
        at_least(self, 1, "prefetch", "aug_repeats")
        at_least(self, 0, "size", "color_jitter", "random_erase", "val_size", "val_resize")
        at_least(self, 0, "ra_magnitude")
        if self.ra_magnitude > 30:
            raise UsageError(
                f"--ra-magnitude {self.ra_magnitude} is too large: 30 is the strongest"
            )
        if self.random_erase > 1:
            raise UsageError(f"--random-erase {self.random_erase} is too large: it is a share")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeConfig:
    """What today's recipes add to the plain loop."""

    recipe: RecipeName = "none"
    """Fill the options with those of a published training; options given beside it override it.
    torchvision-resnet50: of torchvision's IMAGENET1K_V2 weights (80.9 %; pytorch.org/blog, Nov.
    2021, and torchvision's references). timm-a3: of "ResNet strikes back" (78.1 %,
    arXiv:2110.00476). cifar-airbench: of "94% on CIFAR-10 in 3.29 Seconds on a Single GPU"
    (arXiv:2404.00498). A run says what differs here."""
    mixup: float = 0.0
    """Alpha of mixup (Zhang et al. 2018); 0 turns it off."""
    cutmix: float = 0.0
    """Alpha of CutMix (Yun et al. 2019); 0 turns it off. With mixup, each batch takes one."""
    progressive: int = 0
    """Side in pixels of the first epoch's images, growing to the full size; 0 turns it off."""
    test_flip: bool = False
    """Score the mean of the outputs for each image and for its mirror image."""
    ema: float = 0.0
    """Decay per step of an average of the weights, which is then scored instead; 0 turns it off."""

    def __post_init__(self) -> None:
        at_least(self, 0, "mixup", "cutmix", "progressive")
        below_one(self, "ema")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How weights move."""

    optimizer: OptimizerName = "adamw"
    """adamw, or sgd with momentum; for large batches lars, lamb or novograd."""
    lr: float = 1e-3
    """Learning rate, at the schedule's highest."""
    lr_scaling: ScalingRule = "off"
    """How --lr, given for batches of --lr-batch, follows --batch-size: linear (for sgd) or sqrt
    (for the others); needs a warm-up."""
    lr_batch: int = 256
    """Batch size that --lr is meant for, with --lr-scaling."""
    nesterov: bool = True
    """sgd: Nesterov's momentum, rather than the plain one."""
    momentum: float = 0.9
    """Momentum of sgd and lars, first beta of the others; onecycle and cyclic move it around
    this, against the rate."""
    weight_decay: float | None = None
    """Decoupled for adamw and lamb, L2 for sgd and lars, added to the normalized gradient by
    novograd. By default 0.05 (adamw), 0.01 (lamb), 5e-4 (sgd), 1e-4 (lars), 1e-3 (novograd)."""
    layer_decay: float = 1.0
    """Factor on the rate from each layer to the one before it; the head has the full rate (BEiT,
    arXiv:2106.08254). 1 turns it off. Common for fine-tuning: 0.65 to 0.9."""
    decay_norms: bool = False
    """Let weight decay act on norms, biases, class tokens and position embeddings as well (He et
    al. 2019 leave them out), and on the weights that a model's own no_weight_decay() names."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """One kernel for all weights, one per operation, or one per weight and operation (adamw and
    sgd; the others take one per operation)."""
    set_to_none: bool = True
    """Set gradients to None after a step rather than to zeros."""
    clip_norm: float = 0.0
    """Largest norm of all gradients together; 0 turns it off."""
    clip_value: float = 0.0
    """Largest magnitude of each gradient; 0 turns it off."""

    def __post_init__(self) -> None:
        above_zero(self, "lr")
        at_least(self, 1, "lr_batch")
        above_zero(self, "layer_decay")
        if self.layer_decay > 1:
            raise UsageError(
                f"--layer-decay {self.layer_decay} is too large: 1 turns it off, and less lets "
                "layers near the input learn slower"
            )
        below_one(self, "momentum")
        at_least(self, 0, "clip_norm", "clip_value")
        if self.weight_decay is not None:
            at_least(self, 0, "weight_decay")

    @property
    def decay(self) -> float:
        """Weight decay: the one that was given, or the optimizer's usual one."""
        given = self.weight_decay
        return _USUAL_DECAY[self.optimizer] if given is None else given


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves, step by step."""

    schedule: ScheduleName = "cosine"
    """onecycle (Smith & Topin 2018), cyclic (triangular2, Smith 2017), cosine, linear or step
    after the warm-up, or constant."""
    warmup: float | None = None
    """Share of all steps over which the rate climbs from near 0 (onecycle: to its peak). By
    default 0.1; not for cyclic, which begins low."""
    cycles: int = 4
    """Ups and downs of cyclic."""
    step_every: float = 0.3
    """step: share of all steps after which the rate is multiplied by --step-factor, repeatedly."""
    step_factor: float = 0.1
    """step: factor on the rate."""

    def __post_init__(self) -> None:
        if self.warmup is not None:
            below_one(self, "warmup")
            if self.schedule == "cyclic":
                raise UsageError(
                    f"--warmup {self.warmup} does nothing with --schedule cyclic, whose rate "
                    "begins at a 25th of --lr and climbs: leave it out, or give --warmup None"
                )
        at_least(self, 1, "cycles")
        above_zero(self, "step_every", "step_factor")

    @property
    def climb(self) -> float:
        """Share of all steps over which the rate climbs: the one given, or the usual one."""
        return _USUAL_WARMUP if self.warmup is None else self.warmup


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedConfig:
    """What changes the speed and not the result, apart from rounding (and --accumulate)."""

    precision: Precision = "auto"
    """fp32 (true), tf32 (Ampere's matrix units), bf16 or fp16 autocast (fp16 with a gradient
    scaler), or torch, as torch leaves it (fp32, and tf32 in convolutions); auto takes bf16 on a
    GPU that has it, else fp32."""
    channels_last: bool = True
    """Weights and images in NHWC memory, which convolutions like."""
    compile: CompileMode = "off"
    """torch.compile of the model, in this mode, for training and scoring."""
    scoring_backend: str = "off"
    """Backend of torch.compile for scoring, in place of --compile's: inductor, tensorrt (which
    cannot train), ..."""
    cudnn_benchmark: bool = True
    """Let cuDNN try its algorithms once for each shape (CUDA only)."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time, on the same machine and versions
    (torch.use_deterministic_algorithms, and cuDNN without its autotuner): slower. An operation
    without such an algorithm is an error. Seeds are set without this, too."""
    accumulate: int = 1
    """Parts that each batch is computed in, one after the other, to save memory. A batch norm
    sees one part at a time."""

    def __post_init__(self) -> None:
        at_least(self, 1, "accumulate")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedConfig:
    """Several processes, one device each. Under torchrun, its processes are used."""

    gpus: int = 0
    """Processes to start, one a GPU (or several on the CPU); 0 for this process alone."""
    sync_batchnorm: bool = False
    """Batch norm over all processes' images (CUDA only)."""
    static_graph: bool = True
    """Promise DDP that every step uses the same weights, so that it plans once (not with
    --accumulate, where torch fails)."""
    bucket_view: bool = True
    """Let gradients live in DDP's buckets: one copy and some memory less."""
    fsdp: bool = False
    """Shard weights, gradients and momenta over the processes (FSDP2's fully_shard), for a model
    that does not fit on one device; its weights stay in NCHW. adamw or sgd, without --ema,
    --compile and fp16. Checkpoints are whole: any number of processes can resume from them."""

    def __post_init__(self) -> None:
        at_least(self, 0, "gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """What a run logs and saves."""

    debug: DebugTool = "off"
    """anomaly (where NaN came from), profile (trace.json and top-ops.txt), gradcheck (gradients
    against finite differences, once), nvtx (ranges for Nsight)."""
    log_every: int = 20
    """Steps between two readings of the loss, the only ones that wait for the device."""
    save_every: int = 0
    """Steps between two checkpoints; 0 saves after each epoch."""
    keep_last: int = 0
    """Keep the last so many checkpoints as step-NNNNNNNN.pt, beside last.pt and best.pt."""
    tensorboard: bool = True
    """Write TensorBoard's files too, when it is installed."""
    wandb: str = ""
    """Project of Weights & Biases to log to as well (extra wandb; WANDB_MODE=offline keeps it on
    this machine). A resumed run continues the same run there."""
    curves: bool = True
    """Draw curves.png and the last scoring at the end, if matplotlib is installed."""

    def __post_init__(self) -> None:
        at_least(self, 1, "log_every")
        at_least(self, 0, "save_every", "keep_last")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole training run.

    >>> optim = OptimConfig(optimizer="sgd", lr=0.1)
    >>> config = TrainConfig(train=Path("photos.h5"), epochs=30, optim=optim)
    >>> config.optim.decay  # sgd's usual one
    0.0005
    """

    train: Annotated[Positional[Path], arg(metavar="TRAIN")]
    """Packed file to train on (for --loader imagefolder, a folder of class folders)."""
    val: Path | None = None
    """Packed file (or folder) to score on after each epoch."""
    out: Path = Path("run")
    """Folder for config.json, metrics.jsonl, checkpoints and curves.png."""
    resume: bool = False
    """Continue from the last checkpoint in --out, also in mid-epoch. With more --epochs, the
    learning rate continues as in a run of that many epochs (it may rise again)."""
    overwrite: bool = False
    """Start anew even if --out holds a run already."""
    epochs: int = 10
    """Times that every image is seen."""
    batch_size: int = 128
    """Images per optimizer step, all processes and accumulated parts together."""
    seed: int = 0
    """Of weights, order and augmentation."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU when there is one."""
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        at_least(self, 1, "epochs", "batch_size")
        at_least(self, 0, "seed")
        if self.batch_size % self.speed.accumulate:
            raise UsageError(
                f"--batch-size {self.batch_size} cannot be computed in "
                f"--accumulate {self.speed.accumulate} equal parts: choose a multiple"
            )
        if self.optim.lr_scaling != "off" and self.schedule.warmup == 0:
            raise UsageError(
                f"--lr-scaling {self.optim.lr_scaling} with --warmup 0 diverges in the first "
                "steps: leave --warmup as it is, or set --lr yourself"
            )

    @property
    def peak_lr(self) -> float:
        """Learning rate at the schedule's highest, at this batch size."""
        optim = self.optim
        return scale_lr(optim.lr, optim.lr_scaling, self.batch_size, optim.lr_batch)


def scale_lr(lr: float, rule: ScalingRule, batch_size: int, reference: int) -> float:
    """Return the rate for `batch_size` that does what `lr` does for batches of `reference`.

    linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD. sqrt: Krizhevsky 2014
    (arXiv:1404.5997), and You et al. 2020 for LAMB. Both need a warm-up.

    >>> scale_lr(0.1, "linear", batch_size=1024, reference=256)
    0.4
    """
    ratio = batch_size / reference
    return lr * {"off": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def flag(name: str) -> str:
    """Return the option that sets the field `name`.

    >>> flag("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def at_least(options: object, least: float, *names: str) -> None:
    """Raise UsageError unless each of these fields is `least` or more; NaN is not.

    >>> at_least(TrainConfig(train=Path("photos.h5")), 20, "epochs")
    Traceback (most recent call last):
        ...
    h5feed.errors.UsageError: --epochs 10 is too small: it must be at least 20
    """
    for name in names:
        value = getattr(options, name)
        if not value >= least:
            raise UsageError(f"{flag(name)} {value} is too small: it must be at least {least:g}")


def above_zero(options: object, *names: str) -> None:
    """Raise UsageError unless each of these fields is above 0.

    >>> above_zero(OptimConfig(lr=0.1), "lr")
    """
    for name in names:
        value = getattr(options, name)
        if not value > 0:
            raise UsageError(f"{flag(name)} {value} is too small: it must be above 0")


def below_one(options: object, *names: str) -> None:
    """Raise UsageError unless each of these fields is a share: 0 or more, and less than 1.

    >>> below_one(RecipeConfig(ema=0.999), "ema")
    """
    for name in names:
        value = getattr(options, name)
        if not 0 <= value < 1:
            raise UsageError(f"{flag(name)} {value} is out of range: 0 turns it off, 1 is too much")


def write_config(config: TrainConfig, path: Path) -> None:
    """Write `config` as JSON that `read_config` reads back equal, its paths absolute.

    So the run can be resumed from another working directory.

    >>> write_config(TrainConfig(train=Path("photos.h5"), epochs=3), Path("config.json"))
    >>> read_config(Path("config.json")).epochs
    3
    """
    values = asdict(config)
    model = values["model"]
    for tree, name in ((values, "train"), (values, "val"), (values, "out"), (model, "init")):
        if tree[name] is not None:
            tree[name] = os.path.abspath(tree[name])
    with replaced(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())


def read_config(path: Path) -> TrainConfig:
    """Read a run's config.json; UsageError names the file and the entry that is wrong.

    >>> write_config(TrainConfig(train=Path("photos.h5"), batch_size=64), Path("config.json"))
    >>> read_config(Path("config.json")).batch_size
    64
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as ex:
        raise UsageError(f"--config {path} cannot be read as JSON: {ex}") from ex
    try:
        config = _convert(values, TrainConfig, "config")
    except UsageError as ex:
        raise UsageError(f"--config {path}: {ex}") from ex
    assert isinstance(config, TrainConfig)
    return config


def _convert(value: Any, kind: Any, name: str) -> Any:
    """`value`, as JSON gives it, as the annotated type `kind`."""
    if is_dataclass(kind):
        return _convert_tree(value, kind, name)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UsageError(f"{name}={value!r} is not one of {', '.join(get_args(kind))}")
        return value
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(part for part in get_args(kind) if part is not type(None))
        return None if value is None else _convert(value, inner, name)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        raise UsageError(f"{name}={value!r} is not a {kind.__name__}")
    return value


def _convert_tree(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}={value!r} is not a table of options")
    known = {entry.name for entry in fields(kind)}
    if unknown := sorted(set(value) - known):
        raise UsageError(f"{name} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    needed = (entry.name for entry in fields(kind) if _has_no_default(entry))
    if missing := [entry for entry in needed if entry not in value]:
        raise UsageError(f"{name} has no {missing[0]!r}, which it needs")
    hints = get_type_hints(kind)
    return kind(**{key: _convert(item, hints[key], f"{name}.{key}") for key, item in value.items()})


def _has_no_default(entry: "Field[Any]") -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING
