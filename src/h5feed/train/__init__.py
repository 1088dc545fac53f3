"""The reference trainer: every known speed-up as a switch, in a loop to be read and copied."""

from h5feed.train.config import TrainConfig, read_config, write_config
from h5feed.train.data import Data
from h5feed.train.export import Exported, export, load_trained
from h5feed.train.loaders import Loader
from h5feed.train.log import LossError, Summary
from h5feed.train.tasks import Task
from h5feed.train.trainer import train

__all__ = [
    "Data",
    "Exported",
    "Loader",
    "LossError",
    "Summary",
    "Task",
    "TrainConfig",
    "export",
    "load_trained",
    "read_config",
    "train",
    "write_config",
]
