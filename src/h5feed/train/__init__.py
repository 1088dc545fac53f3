"""The reference trainer: every known speed-up as a switch, in a loop to be read and copied."""

from h5feed.train.config import TrainConfig
from h5feed.train.configfile import read_config, write_config
from h5feed.train.data import Data, Loader
from h5feed.train.export import Exported, export, load_trained
from h5feed.train.loop import train
from h5feed.train.recorder import LossError, Summary
from h5feed.train.tasks import Task

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
