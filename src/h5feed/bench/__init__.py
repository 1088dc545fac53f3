"""What it gains: loaders measured side by side on the same work.

`measure`, `process` and `system` import nothing but numpy and the standard library and only one
another, so that tools/peers can load this folder by its path inside a rival's own virtual
environment and count with the very same code.
"""
