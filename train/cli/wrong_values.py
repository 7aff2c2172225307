"""What jsonargparse says of a value of the wrong type, said as a user of the command line would."""

from __future__ import annotations

import re

WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
SAID = re.compile(
    r'Parser key "(?P<key>[^"]+)": (?P<kinds>(?:Expected a|Does not validate).*?) '
    r"(?:Given value type: \S+ '\w+'> Given|Got) value: (?P<value>.*)"
)
KIND = re.compile(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*?)\](?= |$|\.))")


def in_plain_words(message: str) -> str:
    """The message in plain words where it is of that kind, else as it is; in one line.

    >>> in_plain_words('Parser key "limit": Expected a <class \\'int\\'>. Got value: one')
    "--limit takes a whole number, not 'one'"
    """
    line = " ".join(message.split())
    said = SAID.fullmatch(line)
    kinds = KIND.findall(said["kinds"]) if said else []
    words = [
        word
        for name, choices in kinds
        if name != "NoneType"
        for word in (choices.replace("'", "").split(", ") if choices else [WORDS.get(name)])
    ]
    if not words or not all(words):
        return line
    *first, last = dict.fromkeys(words)
    return f"--{said['key']} takes {', '.join(first)}{' or ' if first else ''}{last}, not {said['value']!r}"
