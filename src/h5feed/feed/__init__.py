"""From the store to batches.

Imports nothing by itself: a loader's worker processes need a few modules of this room, without
torch, which takes seconds and 150 MB. The public names are `h5feed`'s.
"""
