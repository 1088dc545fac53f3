"""The commands: one thin file each, no logic."""
