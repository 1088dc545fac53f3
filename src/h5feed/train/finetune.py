"""The network of a run: its weights, from a seed or elsewhere, its frozen layers, their order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from h5feed.errors import H5FeedError, UsageError
from h5feed.optional import require
from h5feed.train.checkpoint import read_saved
from h5feed.train.config import ModelConfig, TrainConfig
from h5feed.train.data import Data
from h5feed.train.models import Network, build_model, build_timm
from h5feed.train.tricks import checkpoint_blocks, drop_biases

__all__ = [
    "BuiltNetwork",
    "Weights",
    "build_network",
    "fit_weights",
    "freeze",
    "frozen_norms",
    "head_names",
    "parameter_layers",
    "pretrained_weights",
    "read_weights",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights from elsewhere, on the CPU, and what belongs to them."""

    state: Mapping[str, Tensor]
    """By the names of the model's own state; a prefix common to all does no harm."""
    source: str
    """Where they are from, as errors and notes say it."""
    mean: Sequence[float] | None = None
    """Of the pixels that they were trained on, per channel, 0 to 255; None: unknown."""
    std: Sequence[float] | None = None
    """Likewise."""
    dropped_biases: tuple[str, ...] = ()
    """Layers whose bias a run of ours had dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltNetwork:
    """A network, on the CPU, and what was done to it that its name does not say."""

    net: Network
    dropped_biases: list[str]
    """Layers that lost their bias."""
    notes: list[str]
    """One sentence each, for people."""


def build_network(config: TrainConfig, data: Data, *, fresh: bool = True) -> BuiltNetwork:
    """Build the network on the CPU, from the seed and the weights that it begins with.

    Those are left out unless it is `fresh`: a resumed run has its own. H5FeedError where they
    cannot be had, UsageError where they do not fit.
    """
    wanted, outputs = config.model, data.num_outputs
    torch.manual_seed(config.seed)
    model = build_model(wanted.model, outputs, drop_path=wanted.drop_path)
    dropped: list[str] = []
    notes: list[str] = []
    mean: Sequence[float] = data.mean
    std: Sequence[float] = data.std
    head: frozenset[str] = frozenset()
    if wanted.pretrained or wanted.init is not None or wanted.freeze:
        head = head_names(wanted.model, outputs, model)
    weights = _first_weights(wanted, outputs, fresh=fresh)
    if weights is not None:
        notes.append(fit_weights(model, weights, head))
        dropped += weights.dropped_biases
        mean, std = weights.mean or mean, weights.std or std
    if wanted.drop_biases:
        dropped += drop_biases(model, torch.randn(2, 3, data.size, data.size))
    if dropped:
        notes.append(
            f"dropped {len(dropped)} biases that a batch norm follows: {', '.join(dropped)}"
        )
    net = Network(model, mean, std)
    if wanted.freeze:
        frozen = freeze(model, wanted.freeze, head)
        net.keep_in_eval_mode(frozen_norms(model))
        notes.append(
            f"--freeze {wanted.freeze}: {len(frozen)} of {len(list(model.parameters()))} weight "
            f"tensors are frozen, and {len(net.frozen_norms)} batch norms keep their statistics"
        )
    if wanted.grad_checkpointing:
        checkpoint_blocks(model)
    return BuiltNetwork(net=net, dropped_biases=dropped, notes=notes)


def _first_weights(wanted: ModelConfig, outputs: int, *, fresh: bool) -> Weights | None:
    if wanted.init is not None and fresh:
        return read_weights(wanted.init)
    return pretrained_weights(wanted.model, outputs) if wanted.pretrained and fresh else None


def pretrained_weights(name: str, num_outputs: int) -> Weights:
    """Fetch the weights that torchvision or timm has for a model, or take them from its cache.

    Raises UsageError where there are none, H5FeedError where they cannot be had.
    """
    library, _, rest = name.partition(":")
    if library not in ("torchvision", "timm") or not rest:
        raise UsageError(
            f"--pretrained is for torchvision:NAME and timm:NAME, and --model is {name}: give "
            "weights with --init PATH"
        )
    try:
        fetch = _torchvision_weights if library == "torchvision" else _timm_weights
        return fetch(rest, num_outputs)
    except (ImportError, H5FeedError):
        raise
    except Exception as ex:  # the hubs raise OSError, RuntimeError, httpx's and more
        said = (str(ex).splitlines() or [""])[0] or type(ex).__name__
        raise H5FeedError(
            f"--pretrained: the weights of {name} could not be had ({said}): mend the network, or "
            "fetch them elsewhere and give the file with --init PATH"
        ) from ex


def _torchvision_weights(name: str, num_outputs: int) -> Weights:
    models = require("torchvision.models", "train")
    found = getattr(models.get_model_weights(name), "DEFAULT", None)
    if found is None:
        raise UsageError(
            f"--pretrained: torchvision has no weights for {name}: leave it out, or give weights "
            "with --init PATH"
        )
    preset = found.transforms()
    return Weights(
        state=found.get_state_dict(progress=False, check_hash=True),
        source=f"--pretrained {found}",
        mean=_to_255(getattr(preset, "mean", None)),
        std=_to_255(getattr(preset, "std", None)),
    )


def _timm_weights(name: str, num_outputs: int) -> Weights:
    """Let timm load its weights itself: many need its filters, and it makes the new head."""
    timm = require("timm", "train")
    model: Any = build_timm(name, num_outputs, None, pretrained=True)
    cfg = timm.data.resolve_model_data_config(model)
    full = model.pretrained_cfg
    state = model.state_dict()
    if full.get("num_classes") != num_outputs:  # what timm made anew is not of these weights
        heads = full.get("classifier") or ()
        names = (heads,) if isinstance(heads, str) else heads
        state = {
            key: value
            for key, value in state.items()
            if not key.startswith(tuple(f"{head}." for head in names))
        }
    tag = f".{full['tag']}" if full.get("tag") else ""
    return Weights(
        state=state,
        source=f"--pretrained {full['architecture']}{tag}",
        mean=_to_255(cfg["mean"]),
        std=_to_255(cfg["std"]),
    )


def _to_255(values: Iterable[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(255 * value for value in values)


_HOLDERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict", "net")
"""Where training scripts put the weights in their checkpoints, averaged ones first."""


def read_weights(path: Path) -> Weights:
    """Read a checkpoint of ours, a plain state_dict, or one that holds such (.pt, .safetensors).

    Nothing in it is executed. Raises UsageError where it holds no weights.

    >>> torch.save(build_model("resnet9-small", 2).state_dict(), "other.pt")
    >>> read_weights(Path("other.pt")).source
    '--init other.pt'
    """
    saved: Any
    if path.suffix == ".safetensors":
        saved = _read_safetensors(path)
    else:
        try:
            saved = read_saved(path)
        except FileNotFoundError as ex:
            raise UsageError(f"--init {path}: there is no such file") from ex
    facts: Mapping[str, Any] = {}
    if isinstance(saved, Mapping) and isinstance(saved.get("progress"), Mapping):
        facts = saved["progress"]
        saved = {**saved["net"], **saved.get("ema", {})}
    while isinstance(saved, Mapping):
        inner = next((saved[key] for key in _HOLDERS if isinstance(saved.get(key), Mapping)), None)
        if inner is None:
            break
        saved = inner
    state = {}
    if isinstance(saved, Mapping):
        state = {str(key): value for key, value in saved.items() if isinstance(value, Tensor)}
    if not state:
        raise UsageError(
            f"--init {path} holds no weights: give a checkpoint of train-h5, or a state_dict that "
            "torch.save wrote"
        )
    ours = "mean" in state and "std" in state and any(key.startswith("model.") for key in state)
    return Weights(
        state=state,
        source=f"--init {path}",
        mean=state["mean"].flatten().tolist() if ours else None,
        std=state["std"].flatten().tolist() if ours else None,
        dropped_biases=tuple(facts.get("dropped_biases", ())),
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    torch_format = require("safetensors.torch", "train")
    if not path.exists():
        raise UsageError(f"--init {path}: there is no such file")
    try:
        return torch_format.load_file(path)  # type: ignore[no-any-return]
    except Exception as ex:
        raise UsageError(f"--init {path} cannot be read as safetensors: {ex}") from ex


def fit_weights(model: nn.Module, weights: Weights, head: frozenset[str]) -> str:
    """Load `weights` into `model`, in place, and say in one sentence what was taken.

    A head of another size, or of none, stays as it is: new. Raises UsageError where another
    weight is missing or has another shape.

    >>> model = build_model("resnet9-small", 10)
    >>> weights = Weights(state=build_model("resnet9-small", 2).state_dict(), source="other.pt")
    >>> fit_weights(model, weights, head_names("resnet9-small", 10, model))
    'other.pt: 48 of 50 tensors taken, the head is new: head.bias, head.weight'
    """
    for name in weights.dropped_biases:
        model.get_submodule(name).register_parameter("bias", None)
    own = model.state_dict()
    state = _without_prefix(weights.state, [name for name in own if name not in head])
    fits = {name: name in state and state[name].shape == own[name].shape for name in own}
    whole_head = all(fits[name] for name in head & own.keys())
    taken = {name for name in own if name not in head or whole_head}
    taken -= {name for name in own if name.endswith("num_batches_tracked") and name not in state}
    for name in sorted(taken, key=list(own).index):
        if name not in state:
            raise UsageError(
                f"{weights.source} has no {name!r}, which --model needs; it has "
                f"{', '.join(list(weights.state)[:3])}, ...: give weights of the same model"
            )
        if not fits[name]:
            raise UsageError(
                f"{weights.source} has {name!r} of shape {tuple(state[name].shape)}, and --model "
                f"{tuple(own[name].shape)}: give weights of the same model"
            )
    model.load_state_dict({name: state[name] for name in taken}, strict=False)
    said = f"{weights.source}: {len(taken)} of {len(own)} tensors taken"
    if not whole_head:
        said += f", the head is new: {', '.join(sorted(head & own.keys()))}"
    if unused := sorted(state.keys() - own.keys()):
        said += f", {len(unused)} of the file not used ({', '.join(unused[:3])})"
    return said


def _without_prefix(state: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Take off what DDP, torch.compile, Lightning or `Network` put before every name."""
    prefix = ""
    for key in state if names and names[0] not in state else ():
        if key.endswith("." + names[0]):
            prefix = key[: -len(names[0])]
            break
    return {key[len(prefix) :]: state[key] for key in state if key.startswith(prefix)}


def head_names(name: str, num_outputs: int, model: nn.Module) -> frozenset[str]:
    """Return the weights and buffers of `model` whose number is that of its outputs.

    Found by building it once more for one output more, without memory where it can be: what has
    another shape then is the head.

    >>> sorted(head_names("resnet9", 10, build_model("resnet9", 10)))
    ['head.bias', 'head.weight']
    """
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                other = build_model(name, num_outputs + 1).state_dict()
        except Exception:  # a model that reads values while it is built, which meta has none of
            other = build_model(name, num_outputs + 1).state_dict()
    return frozenset(
        key
        for key, value in model.state_dict().items()
        if key in other and other[key].shape != value.shape
    )


def parameter_layers(model: nn.Module) -> list[list[str]]:
    """Return the names of all parameters by layer, from the input to the head.

    timm's models say themselves what a layer is (`group_matcher`). In others, each innermost
    element of their Sequentials, ModuleLists and ModuleDicts is one; what comes before the first
    belongs to a stem, what comes last is the head, and norms in between go with the layer before.

    >>> len(parameter_layers(build_model("resnet9", 10)))
    7
    """
    if isinstance(model, Network):
        return [[f"model.{name}" for name in layer] for layer in parameter_layers(model.model)]
    matcher: Any = getattr(model, "group_matcher", None)
    if callable(matcher):
        timm_models = require("timm.models", "train")
        grouped = timm_models.group_parameters(model, matcher(coarse=False))
        return [grouped[number] for number in sorted(grouped)]
    places = {name: _layer_of(model, name) for name, _ in model.named_parameters()}
    stem = any(is_block for _, is_block in places.values())
    layers: dict[str, list[str]] = {}
    last = ""
    for name, (place, is_block) in places.items():
        stem = stem and not is_block
        if stem:
            place = ""
        elif place not in layers and _is_norm(model.get_submodule(place)):
            place = last
        layers.setdefault(place, []).append(name)
        last = place
    return list(layers.values())


def _layer_of(model: nn.Module, name: str) -> tuple[str, bool]:
    """Return the module that the parameter `name` counts to, and whether it is a block."""
    path = name.split(".")[:-1]
    module, in_container = model, isinstance(model, nn.Sequential)
    for depth, part in enumerate(path, 1):
        module = module.get_submodule(part)
        holds_blocks = _holds_blocks(module)
        if not holds_blocks and (in_container or isinstance(module, nn.Sequential)):
            return ".".join(path[:depth]), True
        in_container = holds_blocks
    return ".".join(path), False


def _is_norm(module: nn.Module) -> bool:
    return all(weight.ndim <= 1 for weight in module.parameters())


def _holds_blocks(module: nn.Module) -> bool:
    """Whether it is a container of modules that have parts of their own."""
    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    return any(list(child.children()) for child in module.children())


def freeze(model: nn.Module, wanted: str, head: frozenset[str]) -> list[str]:
    """Stop training what `wanted` names, in place; returns the names of the frozen parameters.

    `wanted` is "backbone" (all but `head`), a number of layers from the input, as
    `parameter_layers` counts them, or beginnings of names, with commas between. Raises UsageError
    where it names nothing, or all there is.

    >>> model = build_model("resnet9", 10)
    >>> head = head_names("resnet9", 10, model)
    >>> frozen = freeze(model, "backbone", head)
    >>> [name for name, weight in model.named_parameters() if weight.requires_grad]
    ['head.weight', 'head.bias']
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    if wanted == "backbone":
        frozen = set(names) - head
    elif wanted.isdecimal():
        layers = parameter_layers(model)
        if not 0 < int(wanted) < len(layers):
            raise UsageError(
                f"--freeze {wanted} is not a number of layers to freeze: --model has "
                f"{len(layers)}, and the last must stay free"
            )
        frozen = {name for layer in layers[: int(wanted)] for name in layer}
    else:
        for prefix in wanted.split(","):
            found = {name for name in names if f"{name}.".startswith(f"{prefix}.")}
            if not found:
                parts = dict.fromkeys(name.partition(".")[0] for name in names)
                raise UsageError(
                    f"--freeze {prefix!r} begins no weight's name: --model has {', '.join(parts)}, "
                    "whose parts may be named too; or give backbone, or a number of layers"
                )
            frozen |= found
    if frozen == set(names):
        raise UsageError(f"--freeze {wanted} freezes every weight: nothing is left to train")
    for name, weight in model.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)
    return [name for name in names if name in frozen]


def frozen_norms(model: nn.Module) -> frozenset[str]:
    """Return the batch norms of `model`, by name, whose weights are all frozen.

    >>> model = build_model("resnet9-small", 10)
    >>> frozen = freeze(model, "body.0", frozenset())
    >>> frozen_norms(model)
    frozenset({'body.0.1'})
    """
    return frozenset(
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and list(module.parameters())
        and not any(weight.requires_grad for weight in module.parameters())
    )
