"""Text from outside that can be written: half a surrogate pair is no character, and no file or tokenizer takes it.

Python makes such halves of bytes that are not UTF-8 (names of files, `errors="surrogateescape"`), and of JSON that was
cut in the middle of an emoji's two escapes.
"""

from __future__ import annotations


def writable(text: str) -> str:
    """Return a text with a question mark for each half of a surrogate pair.

    >>> writable("sm\\udce9ll")
    'sm?ll'
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
