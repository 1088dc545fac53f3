import pytest

from h5feed.printable import printable


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
