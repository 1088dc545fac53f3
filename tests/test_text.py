import ast
import json
from pathlib import Path

import pytest

import h5feed
from h5feed.text import counted, printable, printable_json, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("dogs/ünï 1.jpg", "dogs/ünï 1.jpg"),
        ('it\'s "q" \\ 猫', 'it\'s "q" \\ 猫'),
        ("a\nb\r\x1b[31m\x9b", "a\\nb\\r\\x1b[31m\\x9b"),
        ("caf\udce9\u202e", "caf\\udce9\\u202e"),
    ],
)
def test_what_is_no_sign_is_escaped(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_a_long_text_is_cut():
    assert printable("abcdef", 6) == "abcdef"
    assert printable("abcdefg", 6) == "abcde…"


def test_json_is_escaped_and_reads_back():
    value = {"a\u202e": ["\x9b", "\udce9", "\U000e0001", "ü猫", "\n"]}
    text = printable_json(value)
    assert text.isprintable()
    assert json.loads(text) == value
    assert "ü猫" in text
    assert json.loads(printable_json(value, indent=1)) == value


def test_say_escapes_line_by_line(capsys):
    say("one\x1b[2J\ntwo\r")
    assert capsys.readouterr().out == "one\\x1b[2J\ntwo\\r\n"


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 classes"), (1, "1 class"), (2000, "2,000 classes")]
)
def test_things_are_counted_as_people_do(number, expected):
    assert counted(number, "class", "classes") == expected


def test_nothing_else_prints():
    """What is printed elsewhere than through `say` may hold anybody's control characters."""
    root = Path(h5feed.__file__).parent
    allowed = {root / "text.py"}
    found = [
        f"{path}:{node.lineno}"
        for path in set(root.rglob("*.py")) - allowed
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not found
