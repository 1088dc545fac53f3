"""NVIDIA DALI, where it is installed."""

from typing import Any

from h5feed.optional import require

__all__ = ["LastBatchPolicy", "dali", "fn", "types"]

dali: Any = require("nvidia.dali", "dali")
fn: Any = require("nvidia.dali.fn", "dali")
types: Any = require("nvidia.dali.types", "dali")
LastBatchPolicy: Any = require("nvidia.dali.plugin.base_iterator", "dali").LastBatchPolicy
