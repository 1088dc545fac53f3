"""All families of the campaign, each with its share of the time."""

from __future__ import annotations

import folders
import kills
import limits
import loading
import mutations
from cases import Family

__all__ = ["FAMILIES"]

FAMILIES: dict[str, tuple[Family, int]] = {
    "kill": (kills.kill, 4),
    "changed": (kills.changed_source, 2),
    "journal": (kills.damaged_journal, 3),
    "concurrent": (kills.concurrent, 2),
    "limits": (limits.limited_packing, 3),
    "disk": (limits.full_disk, 3),
    "reading": (limits.limited_reading, 2),
    "folder": (folders.hostile_folder, 4),
    "manifest": (folders.hostile_manifest, 3),
    "pixels": (mutations.mutated_pixels, 2),
    "metadata": (mutations.mutated_metadata, 3),
    "forged": (mutations.forged, 4),
    "resumed": (loading.resumed, 3),
    "leaks": (loading.leaks, 1),
    "soak": (loading.soak, 1),
    "written": (loading.written, 1),
    "replaced": (loading.replaced, 2),
    "truncated": (loading.truncated, 1),
}
