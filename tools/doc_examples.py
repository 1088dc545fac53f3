"""For mkdocs: examples in docstrings (`>>>`) are code, wherever they stand.

mkdocstrings knows them in a section of their own only, and would show others as quotations.
"""

import re
from typing import Any

import griffe

__all__ = ["ExamplesAsCode"]

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!$).*)*", re.MULTILINE)


class ExamplesAsCode(griffe.Extension):
    """Put every example of every docstring between fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(r"```python\n\g<0>\n```", text)
