"""Optional doors, each importable only with its library."""
