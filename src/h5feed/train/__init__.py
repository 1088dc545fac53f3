"""The reference trainer: every known speed-up as a switch, in a loop to be read and copied."""

from h5feed.train.config import TrainConfig
from h5feed.train.configfile import read_config, write_config
from h5feed.train.data import Data, Loader
from h5feed.train.loop import train
from h5feed.train.recorder import LossError, Summary
from h5feed.train.tasks import Task
from h5feed.train.trained import load_trained

__all__ = [
    "Data",
    "Loader",
    "LossError",
    "Summary",
    "Task",
    "TrainConfig",
    "load_trained",
    "read_config",
    "train",
    "write_config",
]
