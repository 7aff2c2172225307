"""Translates jsonargparse's messages about values of a wrong type into the words of the command line."""

from __future__ import annotations

import re

TYPE_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
WRONG_VALUE = re.compile(
    r'Parser key "(?P<key>[^"]+)": (?P<types>(?:Expected a|Does not validate).*?) '
    r"(?:Given value type: \S+ '\w+'> Given|Got) value: (?P<value>.*)"
)
EXPECTED_TYPE = re.compile(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*?)\](?= |$|\.))")


def in_plain_words(message: str) -> str:
    """Return a message about a wrong value in plain words, and any other message unchanged but on one line.

    >>> in_plain_words('Parser key "limit": Expected a <class \\'int\\'>. Got value: one')
    "--limit takes a whole number, not 'one'"
    """
    line = " ".join(message.split())
    wrong_value = WRONG_VALUE.fullmatch(line)
    if not wrong_value:
        return line
    expected: list[str] = []
    for type_name, choices in EXPECTED_TYPE.findall(wrong_value["types"]):
        if choices:
            expected += choices.replace("'", "").split(", ")
        elif type_name in TYPE_NAMES:
            expected.append(TYPE_NAMES[type_name])
        elif type_name != "NoneType":
            return line
    if not expected:
        return line
    *first, last = dict.fromkeys(expected)
    alternatives = f"{', '.join(first)} or {last}" if first else last
    return f"--{wrong_value['key']} takes {alternatives}, not {wrong_value['value']!r}"
