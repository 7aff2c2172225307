"""Generates the project's own corpus of ShareGPT conversations from seeded templates.

What the conversations are made of stands in ``words/*.txt``: words, stories, units, facts, functions and phrases. The
first 4,000 conversations and the questions ship with the package `data`.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any
from zlib import crc32

from data.files import write_text

Turns = list[tuple[str, str]]  # (question, answer) pairs of one conversation
# One first prompt in twelve never occurs in `conversations`, whatever the seed; `questions` uses only those.
HELD_OUT_SHARE = 12


def _read(name: str) -> str:
    return (Path(__file__).with_name("words") / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n")


WORDS = {key: line.split(", ") for key, line in (line.split(": ") for line in _read("words").split("\n"))}
GROUPS = {name: WORDS[name] for name in ("fruits", "animals", "colors", "tools", "words")}
# Question; steps of a sentence and a calculation; summary; the number that a follow-up changes, and how it says so;
# ranges of the numbers. a, b, c and d are the given numbers; x, y and z are the results of the steps.
STORIES = [block.split("\n") for block in _read("stories").split("\n\n")]
# Larger unit, smaller unit, how many of these make one of those, what is measured, sentences that give an amount.
UNITS = [line.split(" | ") for line in _read("units").split("\n")]
# Subject, what it is, where it is found, what feeds or makes it, what stands out, why people care.
FACTS = [line.split(" | ") for line in _read("facts").split("\n")]
# Names; what it returns; parameter, its type, type of the result; lines of code, each with what it does.
FUNCTIONS = [block.split("\n") for block in _read("functions").split("\n\n")]
# Choices of a question, one a line, or an answer.
PHRASES = dict(re.findall(r"^\[([\w ?!]+)\]\n(.*?)(?:\n\n(?=\[)|\Z)", _read("phrases"), re.MULTILINE | re.DOTALL))


def _ask(rng: random.Random, phrase: str, /, **values: object) -> str:
    lines = PHRASES[phrase].split("\n")
    return (lines[0] if len(lines) == 1 else rng.choice(lines)).format(**values)


def _pair(rng: random.Random, name: str, values: dict[str, Any]) -> tuple[str, str]:
    return _ask(rng, f"{name} ?", **values), PHRASES[f"{name} !"].format(**values)


def conversations(count: int, seed: int) -> list[dict]:
    """Generate ShareGPT records, the same for a count and a seed, none of which starts with a held-out prompt."""
    rng = random.Random(f"conversations {seed}")
    records = []
    for n in range(count):
        turns = _draw(rng, rng.choice(list(KINDS)), held_out=False)[: rng.choices([1, 2, 3], [15, 70, 15])[0]]
        said = [{"from": by, "value": text} for turn in turns for by, text in zip(("human", "gpt"), turn, strict=True)]
        records.append({"id": f"embedded-{seed}-{n}", "conversations": said})
    return records


def questions(count: int = 40, seed: int = 2024) -> list[dict]:
    """Generate two-turn questions in MT-Bench form whose first turns never occur in `conversations`, whatever its seed.

    Raises ValueError if the templates do not give so many different questions.
    """
    rng = random.Random(f"questions {seed}")
    rows: dict[str, dict] = {}
    for _ in range(4 * count + 201):
        if len(rows) == count:
            return list(rows.values())
        category = list(KINDS)[len(rows) % len(KINDS)]
        turns = [question for question, _ in _draw(rng, category, held_out=True)[:2]]
        rows.setdefault(turns[0], {"question_id": len(rows) + 1, "category": category, "turns": turns})
    raise ValueError(f"the templates give only {len(rows)} different held-out questions, not {count}; ask for fewer")


def _draw(rng: random.Random, kind: str, held_out: bool) -> Turns:
    """Draw three turns of a kind until the first prompt is, or is not, held out for `questions`."""
    while True:
        turns = KINDS[kind](rng)
        if (crc32(turns[0][0].encode()) % HELD_OUT_SHARE == 0) == held_out:
            return turns


def _solve(steps: list[str], values: dict[str, Any]) -> tuple[list[tuple[str, str, int]], dict[str, Any]] | None:
    """Compute the steps of a story; return None if a result is not a positive integer."""
    values, solved = dict(values), []
    for result, step in zip("xyz", steps, strict=False):
        sentence, expression = step.format(**values).split(" | ")
        value = eval(expression)  # safe: digits and operators from the corpus
        if value != int(value) or value <= 0:
            return None
        values[result] = int(value)
        solved.append((sentence, expression, int(value)))
    return solved, values


def _arithmetic(rng: random.Random) -> Turns:
    question, *story, summary, change, ranges = rng.choice(STORIES)
    changed, change = change.split(" | ")
    ends = {n: list(map(int, pair.split("-"))) for n, pair in zip("abcd", ranges.split(), strict=False)}
    low, high = ends[changed]
    solved, others = None, []
    while not (solved and others):
        name, friend = rng.sample(WORDS["names"], 2)
        given: dict[str, Any] = {"name": name, "friend": friend}
        given |= {kind: rng.choice(WORDS[kind]) for kind in ("things", "goods", "boxes")}
        given |= {n: rng.randint(*pair) for n, pair in ends.items()}
        solved = _solve(story, given)
        others = [n for n in range(low, high + 1) if n != given[changed] and _solve(story, {**given, changed: n})]
    steps, values = solved
    other_solution = _solve(story, {**given, changed: rng.choice(others)})
    assert other_solution is not None, "every entry of `others` has a solution"

    def worked(opening: str, steps: list, values: dict) -> str:
        lines = "\n".join(f"{sentence}\n{expression} = {value}" for sentence, expression, value in steps)
        said = {"opening": opening, "lines": lines, "summary": summary.format(**values), "result": steps[-1][2]}
        return PHRASES["arithmetic first !"].format(**said)

    result, factor = steps[-1][2], rng.randint(2, 5)
    ask = _ask(rng, "arithmetic first ?", question=question.format(**values))
    answer = worked(_ask(rng, "arithmetic opening"), steps, values)
    said: dict[str, Any] = dict(result=result, factor=factor, product=result * factor)
    said["change"] = change.format(**other_solution[1])
    said["reworked"] = worked(PHRASES["arithmetic what if"].format(**said), *other_solution)
    said["checked"] = "\n".join(f"{text}\n{expression} = {value}, which is right." for text, expression, value in steps)
    rest = [_pair(rng, f"arithmetic {kind}", said) for kind in ("what if", "check", "times")]
    return [(ask, answer), *rng.sample(rest, 2)]


def _plural(unit: str) -> str:
    return {"foot": "feet", "inch": "inches"}.get(unit, unit + "s")


def _conversion(rng: random.Random) -> Turns:
    large, small, number, measure, *sentences = rng.choice(UNITS)
    factor = int(number)
    name, friend = rng.sample(WORDS["names"], 2)
    a_large, a_small = (f"{'an' if unit in ('hour', 'ounce', 'inch') else 'a'} {unit}" for unit in (large, small))
    names: dict[str, Any] = dict(large=large, larges=_plural(large), smalls=_plural(small), measure=measure)
    names |= dict(factor=factor, a_small=a_small, A_large=a_large[0].upper() + a_large[1:])

    def amount_of(number: int, unit: str) -> str:
        return f"{number} {unit if number == 1 else _plural(unit)}"

    def draw() -> dict[str, Any]:
        whole, rest = rng.randint(2, 40), rng.choice([0, rng.randint(1, factor - 1)])
        total, rest_small, whole_large = whole * factor + rest, amount_of(rest, small), amount_of(whole, large)
        drawn = names | {"whole": whole, "rest": rest, "total": total, "product": whole * factor}
        drawn |= {"rest_small": rest_small, "whole_large": whole_large, "total_small": amount_of(total, small)}
        drawn |= {"both": f"{whole_large} and {rest_small}" if rest else whole_large}
        drawn |= {"add": PHRASES["conversion rest"].format(**drawn) if rest else ""}
        return drawn | {"rest_or_nothing": rest_small if rest else "nothing"}

    one, two, three = draw(), draw(), draw()
    sentence = rng.choice(sentences)
    if rng.random() < 0.6:
        amount, unit, answer = one["both"], names["smalls"], PHRASES["conversion to small !"].format(**one)
    else:
        amount, unit, answer = one["total_small"], names["larges"], PHRASES["conversion to large !"].format(**one)
    said = sentence.format(amount, name=name, friend=friend)
    ask = _ask(rng, "conversion first ?", amount=amount, unit=unit, sentence=said)
    later = {"to small": three, "to large": two, "why": names}
    return [(ask, answer), *rng.sample([_pair(rng, f"conversion {kind}", said) for kind, said in later.items()], 2)]


def _lists(rng: random.Random) -> Turns:
    group = rng.choice(list(GROUPS))
    items = rng.sample(GROUPS[group], rng.randint(4, 8))
    letter, length = rng.choice("aeiourlt"), rng.randint(4, 5)

    def bullets(chosen: list[str]) -> str:
        return "\n".join(f"- {item}" for item in chosen) or "- none of them"

    ordered = sorted(items)
    by_letter, by_length = [i for i in items if letter in i], [i for i in items if len(i) > length]
    said: dict[str, Any] = {"group": group, "letter": letter, "length": length, "first": items[0], "last": items[-1]}
    said |= {"num": len(items), "num_letter": len(by_letter), "num_long": len(by_length)}
    said |= {"least": ordered[0], "greatest": ordered[-1]}
    said |= {"sizes": ", ".join(f"{item} has {len(item)}" for item in items)}
    said |= {"ordered": bullets(ordered), "reversed": bullets(items[::-1]), "shortest": bullets(sorted(items, key=len))}
    said |= {"with_letter": bullets(by_letter), "long": bullets(by_length)}
    said |= {"numbered": "\n".join(f"{n}. {item}" for n, item in enumerate(items, 1)), "list": "{}"}
    tasks = [_pair(rng, f"lists {kind}", said) for kind in ("sort", "reverse", "by length", "letter", "long", "count")]
    (task, answer), *more = rng.sample(tasks, 3)
    given = f"{task.format(f'these {group}')}: {', '.join(items)}."
    ask = _ask(rng, "lists first ?", Given=given[0].upper() + given[1:], given=given, question=given[:-1])
    return [(ask, answer), *[(f"Now {task.format('the first list')}, please.", answer) for task, answer in more]]


def _explanation(rng: random.Random) -> Turns:
    row, other = rng.sample(FACTS, 2)
    said = dict(zip(("subject", "what", "where", "how", "special", "value"), row, strict=True))
    said |= {"other_what": other[1], "other_where": other[2], "other_special": other[4]}
    said |= {"name": row[0][0].lower() + row[0][1:], "other_name": other[0][0].lower() + other[0][1:]}
    said |= {kind: _ask(rng, f"explanation {kind}") for kind in ("place", "extra", "reason")}
    rest = [_pair(rng, f"explanation {kind}", said) for kind in ("why", "compare", "points")]
    ask, answer = _pair(rng, "explanation first", said)
    return [(f"{ask} {_ask(rng, 'explanation style')}".rstrip(), answer), *rng.sample(rest, 2)]


def _code(rng: random.Random) -> Turns:
    names, returns, types, *lines = rng.choice(FUNCTIONS)
    parameter, hint, result = types.split(" | ")
    name, new_name = rng.sample(names.split(", "), 2)
    k = rng.randint(2, 9)
    parameter = rng.choice([parameter, "items" if "list" in hint else "sentence"])
    body = [line.format(p=parameter, k=k).split(" # ") for line in lines]

    def example() -> object:
        numbers = [rng.randint(1, 20) for _ in range(rng.randint(3, 5))]
        words = rng.sample(GROUPS["words"] + GROUPS["fruits"], 3)
        text = rng.choice([words[0], "level", "noon", "radar"])
        return {"list[int]": numbers, "list[str]": words, "str": text}[hint]

    def source(called: str, signature: str) -> str:
        return "\n".join([f"def {called}({signature}:", *(f"    {line}" for line, _ in body)])

    def block(called: str, signature: str) -> str:
        return PHRASES["code block"].format(source=source(called, signature), name=called, argument=repr(one))

    def value(argument: object) -> str:
        scope: dict[str, Any] = {}
        exec(source(name, f"{parameter})"), scope)  # safe: code from the corpus
        return repr(scope[name](argument))

    one = two = example()
    while two == one:
        two = example()
    plain, hinted = f"{parameter})", f"{parameter}: {hint}) -> {result}"
    said = {"name": name, "new_name": new_name, "returns": returns.format(k=k), "parameter": parameter}
    said |= {"hint": hint, "result": result, "begins": body[0][1], "ends": body[-1][1]}
    said |= {"value": value(one), "other": repr(two), "other_value": value(two)}
    said |= {"plain": block(name, plain), "renamed": block(new_name, plain), "hinted": block(name, hinted)}
    said |= {"lines": "\n".join(f"- `{line.strip()}` {does}." for line, does in body)}
    rest = [_pair(rng, f"code {kind}", said) for kind in ("rename", "hints", "explain", "print")]
    return [_pair(rng, "code first", said), *rng.sample(rest, 2)]


KINDS = dict(arithmetic=_arithmetic, conversion=_conversion, lists=_lists, explanation=_explanation, code=_code)


def corpus(out: str, count: int = 12000, seed: int = 0) -> None:
    """Write conversations of the project's own corpus as JSON lines.

    Args:
        out: File to write.
        count: Number of conversations.
        seed: Seed of the templates' choices.
    """
    write_text(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in conversations(count, seed)))
