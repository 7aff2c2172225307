"""Generates the project's own corpus of ShareGPT conversations from seeded templates, and a tokenizer for it."""

# ruff: noqa: E501 (rows of tables are not wrapped)
from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Turns = list[tuple[str, str]]  # (question, answer) pairs of one conversation
# One first prompt in twelve never occurs in `conversations`, whatever the seed; `questions` uses only those.
HELD_OUT_SHARE = 12

# fmt: off
NAMES = [
    "Maria", "Tom", "Aisha", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Keiko",
    "Liam", "Mona", "Noah", "Olga", "Pedro", "Rosa", "Sam", "Tara", "Umar", "Vera", "Wei", "Yusuf", "Zoe",
]
THINGS = [
    "apples", "oranges", "pencils", "books", "stickers", "marbles", "cookies", "stamps", "shells", "coins", "candles",
    "cards", "buttons", "ribbons", "plums", "notebooks", "postcards", "tomatoes", "eggs", "tickets",
]
GOODS = ["lamps", "chairs", "mugs", "scarves", "hats", "plates", "towels", "baskets", "cushions", "bowls", "brushes", "kites"]
BOXES = ["boxes", "bags", "baskets", "crates", "packets", "jars"]

# question; steps of (sentence, calculation); summary; the sentence a follow-up changes; ranges of the numbers.
# a, b, c and d are the given numbers; x, y and z are the results of the first, second and third step.
STORIES = [
    ("{name} has {a} {boxes} with {b} {things} in each of them. {name} gives {c} {things} to {friend}. How many {things} "
     "are left?", [("First find how many {things} there are in the {a} {boxes}.", "{a} * {b}"),
                   ("Then take away the {c} {things} that {friend} gets.", "{x} - {c}")],
     "So {name} has {y} {things} left.", ("b", "each of the {boxes} held {b} {things}"), [(2, 9), (3, 12), (2, 20)]),
    ("{name} collected {a} {things} on Monday, {b} on Tuesday and {c} on Wednesday. {name} wants to share them equally "
     "with {friend}. How many {things} does each of them get?",
     [("Add the {things} from Monday and Tuesday.", "{a} + {b}"), ("Add the {things} from Wednesday.", "{x} + {c}"),
      ("Divide the total by two people.", "{y} / 2")],
     "So {name} and {friend} get {z} {things} each.", ("c", "{name} collected {c} {things} on Wednesday"),
     [(5, 30), (5, 30), (4, 30)]),
    ("A shop sells {goods} for {a} dollars each. {name} buys {b} of them and pays with {c} dollars. How much change does "
     "{name} get?", [("Work out the price of {b} {goods} at {a} dollars each.", "{a} * {b}"),
                     ("Subtract the price from the {c} dollars that were paid.", "{c} - {x}")],
     "So {name} gets {y} dollars back.", ("b", "{name} bought {b} {goods}"), [(2, 12), (2, 8), (40, 100)]),
    ("{name} drives for {a} hours at {b} kilometers per hour. After a break, {name} drives another {c} kilometers. How "
     "far does {name} travel in total?",
     [("The first part takes {a} hours at {b} kilometers per hour.", "{a} * {b}"),
      ("Add the {c} kilometers after the break.", "{x} + {c}")],
     "So {name} travels {y} kilometers altogether.", ("a", "{name} drove for {a} hours before the break"),
     [(2, 6), (40, 90), (10, 60)]),
    ("{name} earns {a} dollars an hour and works {b} hours a day for {c} days. Then {name} spends {d} dollars on {goods}. "
     "How much money is left?", [("Find the pay for one day.", "{a} * {b}"), ("Multiply by the {c} days.", "{x} * {c}"),
                                 ("Subtract the money spent on {goods}.", "{y} - {d}")],
     "So {name} has {z} dollars left.", ("d", "{name} spent {d} dollars"), [(8, 15), (2, 6), (2, 5), (10, 60)]),
    ("A garden has {a} rows with {b} plants in each row. {name} adds {c} more plants, but {d} plants dry out in the "
     "summer. How many plants are alive at the end?",
     [("Count the plants in the {a} rows.", "{a} * {b}"), ("Add the {c} new plants.", "{x} + {c}"),
      ("Take away the {d} plants that dried out.", "{y} - {d}")],
     "So {z} plants are alive at the end of the summer.", ("a", "the garden had {a} rows"),
     [(3, 9), (4, 12), (3, 15), (2, 12)]),
    ("{name} reads {a} pages every day. {friend} reads {b} pages more than that each day. How many pages does {friend} "
     "read in {c} days?", [("Find how many pages {friend} reads in one day.", "{a} + {b}"),
                           ("Multiply by the {c} days.", "{x} * {c}")],
     "So {friend} reads {y} pages in {c} days.", ("c", "they read for {c} days"), [(8, 30), (2, 12), (3, 9)]),
    ("{name} bakes {a} trays of cookies, and every tray holds {b} cookies. The cookies are packed into bags of {c}. How "
     "many full bags does {name} need?", [("Find the number of cookies on all the trays.", "{a} * {b}"),
                                          ("Divide by the {c} cookies that go into one bag.", "{x} / {c}")],
     "So {name} needs {y} bags for the cookies.", ("a", "{name} baked {a} trays"), [(2, 9), (6, 16), (2, 8)]),
    ("There are {a} {things} in one of the {boxes} and twice as many in another. {name} and {friend} take {b} {things} "
     "each. How many {things} remain?",
     [("The second one holds twice as many.", "2 * {a}"), ("Add both amounts.", "{a} + {x}"),
      ("The two of them take {b} each.", "{y} - 2 * {b}")],
     "So {z} {things} remain.", ("b", "they took {b} {things} each"), [(8, 30), (2, 10)]),
]
ASKS = ["{}", "{} Please show the steps.", "Here is a small problem. {}", "Can you help me with this? {}",
        "Solve this step by step. {}", "{} Explain how you get there."]
OPENINGS = ["Let us work through this step by step.", "We can solve this one step at a time.", "Here is how to solve it.",
            "Sure, let us go through the numbers."]

# a larger unit, a smaller unit, how many of these make one of those, what is measured, sentences that give an amount
UNITS = [
    ("kilometer", "meter", 1000, "distance", ["The road to the lake is {} long.", "{name} walked {} today."]),
    ("meter", "centimeter", 100, "length", ["A ribbon is {} long.", "The wall of the kitchen is {} wide."]),
    ("centimeter", "millimeter", 10, "length", ["{name} drew a line of {}.", "A leaf is {} long."]),
    ("yard", "foot", 3, "length", ["The fence behind the house is {} long.", "{name} bought {} of cloth."]),
    ("foot", "inch", 12, "length", ["The table is {} long.", "A young tree is {} tall."]),
    ("hour", "minute", 60, "time", ["The film lasts {}.", "{name} worked in the garden for {}."]),
    ("minute", "second", 60, "time", ["The song lasts {}.", "{name} held the pose for {}."]),
    ("day", "hour", 24, "time", ["The trip by train takes {}.", "The bread dough rests for {}."]),
    ("week", "day", 7, "time", ["The holiday lasts {}.", "{name} stayed with {friend} for {}."]),
    ("kilogram", "gram", 1000, "weight", ["The bag of flour weighs {}.", "{name} carried {} of potatoes."]),
    ("liter", "milliliter", 1000, "volume", ["The bottle holds {}.", "{name} poured {} of water."]),
    ("pound", "ounce", 16, "weight", ["The parcel weighs {}.", "{name} bought {} of cheese."]),
]

GROUPS = {
    "fruits": ["apple", "banana", "cherry", "grape", "kiwi", "lemon", "mango", "orange", "peach", "pear", "plum", "melon", "fig", "apricot", "lime"],
    "animals": ["ant", "bear", "camel", "deer", "eagle", "fox", "goat", "horse", "lion", "mouse", "otter", "rabbit", "snail", "tiger", "wolf", "zebra"],
    "colors": ["blue", "brown", "green", "gray", "orange", "pink", "purple", "red", "silver", "white", "yellow", "black", "gold", "violet"],
    "tools": ["hammer", "saw", "drill", "wrench", "pliers", "ladder", "shovel", "rake", "brush", "chisel", "file", "level", "clamp"],
    "words": ["river", "window", "candle", "forest", "mirror", "button", "garden", "silver", "pocket", "ladder", "music", "paper", "stone", "bridge"],
}

# subject, what it is, where it is found, what feeds or makes it, what stands out, why people care
FACTS = [line.split(" | ") for line in """
The honey bee | a small flying insect | in gardens, meadows and orchards | it collects nectar and pollen from flowers | it tells other bees where to find food by dancing | it helps fruit trees and vegetables to set seed
The elephant | the largest animal on land | in the grasslands and forests of Africa and Asia | it eats grass, leaves and bark for many hours a day | it uses its trunk to drink, to lift and to greet | it opens paths and spreads the seeds of many plants
The owl | a bird that hunts at night | in forests, barns and old towers | it eats mice, insects and small birds | its soft feathers let it fly without a sound | it keeps the number of mice on farms low
The salmon | a strong fish with silver scales | in cold rivers and in the open sea | it eats smaller fish and tiny sea animals | it swims back to the river where it was born | it brings food from the sea to bears, birds and people
The frog | a small animal with wet skin | near ponds, streams and damp woods | it catches insects with a long sticky tongue | it begins its life in water as a tadpole | it shows us by its health whether the water is clean
The camel | a large animal that can live with little water | in dry and sandy lands | it eats thorny plants that other animals leave alone | it stores fat in its hump and uses it when food is rare | it carries people and goods where cars cannot go
The penguin | a bird that cannot fly but swims very well | on cold coasts in the south of the world | it dives for fish and small shrimps | parents take turns to keep the egg warm | it tells scientists how the cold seas are changing
The earthworm | a soft animal without legs | in the moist soil of fields and gardens | it eats dead leaves and tiny bits of soil | its tunnels let air and rain reach the roots | it turns waste into rich soil for plants
Wood | a natural material | in the trunks and branches of trees | it grows a new ring every year | it is light and strong at the same time | it is used for houses, furniture, paper and heat
Glass | a hard and clear material | in windows, bottles and screens | it is made by melting sand at a high heat | it lets light through but keeps wind and rain out | it can be melted and shaped again many times
Iron | a heavy and strong metal | in the rocks of the earth | it is melted out of ore in very hot ovens | it turns red with rust when it stays wet | it is made into steel for bridges, cars and tools
Cotton | a soft and white fiber | in warm countries with enough rain | it grows around the seeds of a small plant | it takes up water and lets the skin breathe | it is spun into thread for shirts, sheets and towels
Paper | a thin and flat material | in schools, offices and homes | it is pressed from wet fibers of wood | it can be folded, cut and written on | it keeps words and pictures for a very long time
Clay | a fine and heavy kind of earth | near rivers and in deep layers of soil | it forms when rocks break down over many years | it is soft when wet and hard after it is fired | it is used for bricks, pots and tiles
Rubber | a material that stretches and springs back | in tires, boots and balls | it is made from the milky juice of a tree or from oil | it does not let water through | it gives wheels a good grip on the road
Rain | water that falls from the clouds | in almost every part of the world | it forms when tiny drops in a cloud join and grow heavy | it can fall as a light drizzle or a heavy shower | it fills rivers and gives plants the water they need
Snow | frozen water that falls in soft flakes | on high mountains and in cold winters | it forms when water in a cloud freezes into crystals | each flake has six sides or six arms | it covers the ground and keeps the roots of plants warm
Wind | air that moves from one place to another | over land and sea all around the world | it starts when the sun warms some places more than others | it can be a gentle breeze or a dangerous storm | it carries seeds, moves ships and makes electric power
Fog | a cloud that touches the ground | in valleys, near lakes and on the coast | it forms when damp air cools down | it makes distant things hard to see | it tells drivers and sailors to slow down
A rainbow | a bow of colors in the sky | on the side of the sky away from the sun | it appears when sunlight passes through drops of rain | its colors always come in the same order | it shows that white light is a mix of many colors
Thunder | the loud sound that follows lightning | in storms with tall and dark clouds | it begins when lightning heats the air very quickly | it reaches us later than the light does | it warns people to go inside in time
The hammer | a simple tool with a heavy head | in nearly every workshop and tool box | it turns the swing of the arm into a strong blow | a longer handle gives a harder hit | it drives nails and shapes metal
The ladder | a tool made of two rails and many steps | in houses, farms and libraries | it carries our weight from step to step | it must stand at a safe angle on firm ground | it lets us reach high places without a crane
The compass | a small tool that shows directions | on ships, in planes and in the bags of hikers | it has a magnetic needle that turns freely | the needle always points to the north | it helps people to find their way without stars or signs
The thermometer | a tool that measures heat | in kitchens, hospitals and weather stations | it holds a liquid or a sensor that reacts to heat | the liquid rises when it gets warmer | it tells us about fever, frost and safe cooking
The bicycle | a vehicle with two wheels and pedals | in cities and villages all over the world | it moves when the rider turns the pedals and the chain | it stays upright more easily when it rolls faster | it saves money, keeps people fit and makes no smoke
The clock | a machine that shows the time | on walls, towers and wrists | it counts a movement that always takes equally long | its short hand shows the hours and its long hand the minutes | it helps people to meet and to plan their day
""".strip().splitlines()]
EXPLAIN = ["What is {}?", "Please explain what {} is.", "Tell me about {}.", "Can you describe {}?", "I want to learn about {}.",
           "Write a short text about {}.", "How would you explain {} to somebody?", "Give me some facts about {}."]
STYLES = ["", " Use simple words.", " A few sentences are enough.", " It is for a child in school.", " Keep it short and clear.",
          " I need it for my class.", " Please be friendly.", " I have never heard of it."]

# names; what it returns; parameter; type; result type; lines (code, what the line does); example argument: numbers, words, text
FUNCTIONS = [
    (["sum_even", "add_even_numbers", "total_of_evens"], "the sum of the even numbers in a list", "numbers", "list[int]", "int",
     [("total = 0", "starts the total at zero"), ("for number in {p}:", "goes through the list"),
      ("    if number % 2 == 0:", "checks that the number is even"), ("        total += number", "adds it to the total"),
      ("return total", "gives back the total")]),
    (["largest", "find_largest", "biggest_number"], "the largest number in a list", "numbers", "list[int]", "int",
     [("best = {p}[0]", "takes the first number as the best so far"), ("for number in {p}:", "goes through the list"),
      ("    if number > best:", "checks for a larger number"), ("        best = number", "keeps the larger number"),
      ("return best", "gives back the best number")]),
    (["count_above", "how_many_above", "count_large"], "how many numbers in a list are greater than {k}", "values", "list[int]",
     "int", [("count = 0", "starts the count at zero"), ("for value in {p}:", "goes through the list"),
             ("    if value > {k}:", "checks that the value is greater than {k}"),
             ("        count += 1", "adds one to the count"), ("return count", "gives back the count")]),
    (["scale", "multiply_all", "scaled_values"], "a new list with every number multiplied by {k}", "values", "list[int]",
     "list[int]", [("result = []", "starts with an empty list"), ("for value in {p}:", "goes through the list"),
                   ("    result.append(value * {k})", "appends the value multiplied by {k}"),
                   ("return result", "gives back the new list")]),
    (["keep_long", "long_words", "words_longer_than"], "the words of a list that have more than {k} letters", "words", "list[str]",
     "list[str]", [("result = []", "starts with an empty list"), ("for word in {p}:", "goes through the words"),
                   ("    if len(word) > {k}:", "checks the length of the word"),
                   ("        result.append(word)", "keeps the long word"), ("return result", "gives back the long words")]),
    (["count_vowels", "number_of_vowels", "vowel_count"], "the number of vowels in a text", "text", "str", "int",
     [("count = 0", "starts the count at zero"), ("for letter in {p}:", "goes through the letters"),
      ('    if letter in "aeiou":', "checks that the letter is a vowel"), ("        count += 1", "adds one to the count"),
      ("return count", "gives back the count")]),
    (["is_palindrome", "reads_both_ways", "same_backwards"], "whether a text reads the same backwards", "text", "str", "bool",
     [("backwards = {p}[::-1]", "turns the text around"), ("return {p} == backwards", "compares both texts")]),
    (["first_letters", "initials", "starting_letters"], "the first letters of the words in a list", "words", "list[str]",
     "list[str]", [("letters = []", "starts with an empty list"), ("for word in {p}:", "goes through the words"),
                   ("    letters.append(word[0])", "appends the first letter"), ("return letters", "gives back the letters")]),
    (["average", "mean_value", "find_average"], "the average of a list of numbers", "numbers", "list[int]", "float",
     [("total = sum({p})", "adds all the numbers"), ("count = len({p})", "counts the numbers"),
      ("return total / count", "divides the total by the count")]),
]
REQUESTS = ["Write a Python function that returns {}.", "How do I write a function in Python that returns {}?",
            "I need a small Python function {name} that returns {}.", "Show me Python code for a function that returns {}.",
            "Please write {name}, a Python function that returns {}.", "Can you write a function for {name}? It should return {}."]
# fmt: on


def conversations(count: int, seed: int) -> list[dict]:
    """Generate ShareGPT records, none of which starts with a held-out prompt.

    Args:
        count: Number of records.
        seed: Seed of the random choices. The same count and seed give the same records.
    """
    rng = random.Random(f"conversations {seed}")
    records = []
    for n in range(count):
        kind = rng.choice(list(KINDS))
        turns = _draw(rng, kind, held_out=False)[: rng.choices([1, 2, 3], [15, 70, 15])[0]]
        messages = [
            {"from": who, "value": text} for pair in turns for who, text in zip(("human", "gpt"), pair, strict=True)
        ]
        records.append({"id": f"embedded-{seed}-{n}", "conversations": messages})
    return records


def questions(count: int = 40, seed: int = 2024) -> list[dict]:
    """Generate two-turn questions in MT-Bench form whose first turns never occur in `conversations`, whatever its seed.

    Args:
        count: Number of questions.
        seed: Seed of the random choices.

    Raises:
        ValueError: The templates do not give so many different questions.
    """
    rng = random.Random(f"questions {seed}")
    rows: list[dict] = []
    first_turns = set()
    for _ in range(4 * count + 200):
        if len(rows) == count:
            break
        category = list(KINDS)[len(rows) % len(KINDS)]
        turns = [question for question, _ in _draw(rng, category, held_out=True)[:2]]
        if turns[0] not in first_turns:
            first_turns.add(turns[0])
            rows.append({"question_id": len(rows) + 1, "category": category, "turns": turns})
    if len(rows) < count:
        raise ValueError(
            f"the templates give only {len(rows)} different held-out questions, not {count}; ask for fewer"
        )
    return rows


def texts(records: Iterable[dict]) -> Iterator[str]:
    """Iterate over the turns with the words of the Vicuna template around them, so that these get short tokens too."""
    from data.conversation import VICUNA_SYSTEM

    for record in records:
        yield VICUNA_SYSTEM
        for turn in record["conversations"]:
            yield f" {'USER' if turn['from'] == 'human' else 'ASSISTANT'}: {turn['value']}"


def train_tokenizer(records: Iterable[dict], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with the special tokens of LLaMA and the Vicuna template.

    Args:
        records: ShareGPT records to train on.
        vocab_size: Number of tokens, at least 259 (256 bytes and three special tokens).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from data.conversation import TEMPLATES

    backend = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(records), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES["vicuna_v1.1"]
    return tokenizer


def _draw(rng: random.Random, kind: str, held_out: bool) -> Turns:
    """Draw three turns of a kind until the first prompt is, or is not, held out for `questions`."""
    while True:
        turns = KINDS[kind](rng)
        if (crc32(turns[0][0].encode()) % HELD_OUT_SHARE == 0) == held_out:
            return turns


def _solve(story: tuple, values: dict) -> tuple[list[tuple[str, str, int]], dict] | None:
    """Compute the steps of a story; return None if a result is not a positive integer."""
    values, steps = dict(values), []
    for result, (sentence, calculation) in zip("xyz", story[1], strict=False):
        expression = calculation.format(**values)
        value = eval(expression)  # safe: digits and operators from the table above
        if value != int(value) or value <= 0:
            return None
        values[result] = int(value)
        steps.append((sentence.format(**values), expression, int(value)))
    return steps, values


def _worked(opening: str, story: tuple, steps: list, values: dict) -> str:
    lines = "\n".join(f"{sentence}\n{expression} = {value}" for sentence, expression, value in steps)
    return f"{opening}\n\n{lines}\n\n{story[2].format(**values)} The answer is {steps[-1][2]}."


def _arithmetic(rng: random.Random) -> Turns:
    story = rng.choice(STORIES)
    _, _, _, (changed, change), ranges = story
    low, high = ranges["abcd".index(changed)]
    solved, others = None, []
    while not (solved and others):
        name, friend = rng.sample(NAMES, 2)
        words = {"name": name, "friend": friend, "things": rng.choice(THINGS), "goods": rng.choice(GOODS)}
        given: dict[str, str | int] = {**words, "boxes": rng.choice(BOXES)}
        given |= {n: rng.randint(*r) for n, r in zip("abcd", ranges, strict=False)}
        solved = _solve(story, given)
        others = [n for n in range(low, high + 1) if n != given[changed] and _solve(story, {**given, changed: n})]
    steps, values = solved
    other_solution = _solve(story, {**given, changed: rng.choice(others)})
    assert other_solution is not None, "every entry of `others` has a solution"
    new_steps, new_values = other_solution
    change = change.format(**new_values)
    old, factor = steps[-1][2], rng.randint(2, 5)
    first = (rng.choice(ASKS).format(story[0].format(**values)), _worked(rng.choice(OPENINGS), story, steps, values))
    what_if = (
        rng.choice(["What if {}?", "And what would the answer be if {}?", "Now suppose that {}. What changes?"]).format(
            change
        ),
        _worked(f"Now {change}. The other numbers stay the same.", story, new_steps, new_values),
    )
    lines = "\n".join(f"{sentence}\n{expression} = {value}, which is right." for sentence, expression, value in steps)
    check = (
        rng.choice(
            [
                "Can you check the first result?",
                "Please check the first answer.",
                "Was the first result correct? Check every step.",
            ]
        ),
        f"Let us check every step of the first problem once more.\n\n{lines}\n\nAll the steps are correct. The answer is {old}.",
    )
    several = (
        rng.choice(["What is {} times the first result?", "How much is {} times as much as at first?"]).format(factor),
        f"The first result was {old}. To get {factor} times as much, we multiply it by {factor}.\n\n{old} * {factor} = "
        f"{old * factor}\n\nSo the new result is {factor} times as large as the one that we found first. "
        f"The answer is {old * factor}.",
    )
    return [first, *rng.sample([what_if, check, several], 2)]


def _amount(number: int, unit: str) -> str:
    return f"{number} {unit if number == 1 else _plural(unit)}"


def _a(unit: str) -> str:
    return f"{'an' if unit in ('hour', 'ounce', 'inch') else 'a'} {unit}"


def _plural(unit: str) -> str:
    return {"foot": "feet", "inch": "inches"}.get(unit, unit + "s")


def _conversion(rng: random.Random) -> Turns:
    large, small, factor, measure, sentences = rng.choice(UNITS)
    name, friend = rng.sample(NAMES, 2)

    def draw() -> tuple[int, int]:
        return rng.randint(2, 40), rng.choice([0, rng.randint(1, factor - 1)])

    def both(whole: int, rest: int) -> str:
        return _amount(whole, large) + (f" and {_amount(rest, small)}" if rest else "")

    def to_small(whole: int, rest: int) -> str:
        total = whole * factor + rest
        add = f"\nThen add the {_amount(rest, small)}.\n{whole * factor} + {rest} = {total}" if rest else ""
        return (
            f"One {large} is {factor} {_plural(small)}, so we multiply the number of {_plural(large)} by {factor}.\n\n"
            f"{whole} * {factor} = {whole * factor}{add}\n\nSo {both(whole, rest)} is the same {measure} as "
            f"{_amount(total, small)}. The {measure} itself does not change, only the unit does."
        )

    def to_large(whole: int, rest: int) -> str:
        total = whole * factor + rest
        return (
            f"One {large} is {factor} {_plural(small)}, so we look how often {factor} fits into {total}.\n\n"
            f"{whole} * {factor} = {whole * factor}\n{total} - {whole * factor} = {rest}\n\nThat makes "
            f"{_amount(whole, large)}, and {_amount(rest, small) if rest else 'nothing'} is left over. "
            f"So {_amount(total, small)} is the same {measure} as {both(whole, rest)}."
        )

    one, two, three = draw(), draw(), draw()
    sentence = rng.choice(sentences).format
    if rng.random() < 0.6:
        amount, unit, first = both(*one), _plural(small), to_small(*one)
    else:
        amount, unit, first = _amount(one[0] * factor + one[1], small), _plural(large), to_large(*one)
    ask = rng.choice(
        [f"Convert {amount} to {unit} and show the steps.", f"How do I convert {amount} to {unit}?"]
        + [f"{sentence(amount, name=name, friend=friend)} How much is that in {unit}?"] * 2
    )
    back = _amount(two[0] * factor + two[1], small)
    why = (
        f"{_a(large)[0].upper()}{_a(large)[1:]} is larger than {_a(small)}: one {large} holds {factor} {_plural(small)}. When we change to the smaller unit we need "
        f"more of them, so we multiply by {factor} and the number grows. When we change to the larger unit we need fewer of "
        f"them, so we divide by {factor} and the number becomes smaller."
    )
    rest = [
        (f"And how many {_plural(small)} are {both(*three)}?", to_small(*three)),
        (f"Now the other way: what is {back} in {_plural(large)}?", to_large(*two)),
        (f"Why do we use the number {factor} here?", why),
    ]
    return [(ask, first), *rng.sample(rest, 2)]


def _lists(rng: random.Random) -> Turns:
    group = rng.choice(list(GROUPS))
    items = rng.sample(GROUPS[group], rng.randint(4, 8))
    letter, length = rng.choice("aeiourlt"), rng.randint(4, 5)

    def bullets(chosen: list[str]) -> str:
        return "\n".join(f"- {item}" for item in chosen) if chosen else "- none of them"

    def matching(chosen: list[str]) -> str:
        return f"{len(chosen)} of the {len(items)} {group} match."

    by_letter, by_length = [i for i in items if letter in i], [i for i in items if len(i) > length]
    ordered, shortest = sorted(items), sorted(items, key=len)
    sizes = ", ".join(f"{item} has {len(item)}" for item in items)
    tasks = [
        ("sort {} in alphabetical order", f"Here are the {group} in alphabetical order:\n\n{bullets(ordered)}\n\nI compared the first "
         f"letters, and the next letters where the first ones are the same. The list begins with {ordered[0]} and ends with {ordered[-1]}."),
        ("write {} in reverse order", f"Here are the {group} in reverse order:\n\n{bullets(items[::-1])}\n\nI started with {items[-1]}, the last "
         f"item of the list, and went back one item at a time until I reached {items[0]}, which was the first one."),
        ("sort {} from the shortest to the longest", f"Let us count the letters first: {sizes}.\n\nSorted from the shortest to the longest:\n\n"
         f"{bullets(shortest)}\n\nItems of the same length stay in the order in which you gave them."),
        (f"find all that contain the letter {letter} in {{}}", f"I went through the list and looked for the letter {letter} in each item. These {group} "
         f"contain it:\n\n{bullets(by_letter)}\n\n{matching(by_letter)} The others do not have the letter {letter} anywhere."),
        (f"keep only those with more than {length} letters in {{}}", f"Let us count the letters first: {sizes}.\n\nThese have more than {length} "
         f"letters:\n\n{bullets(by_length)}\n\n{matching(by_length)} I left out the shorter ones."),
        ("count {}", f"Let us number the {group} one by one:\n\n" + "\n".join(f"{n}. {item}" for n, item in enumerate(items, 1))
         + f"\n\nThe list has {len(items)} items. The first one is {items[0]} and the last one is {items[-1]}."),
    ]  # fmt: skip
    (task, answer), *more = rng.sample(tasks, 3)
    given = f"{task.format(f'these {group}')}: {', '.join(items)}."
    ask = rng.choice(
        [given[0].upper() + given[1:], f"Please {given}", f"Can you {given[:-1]}?", f"I have a list. Please {given}"]
    )
    return [(ask, answer), *[(f"Now {task.format('the first list')}, please.", answer) for task, answer in more]]


def _explanation(rng: random.Random) -> Turns:
    row, other = rng.sample(FACTS, 2)
    subject, what, where, how, special, value = row
    name, other_name = (s[0].lower() + s[1:] for s in (subject, other[0]))
    place = rng.choice(["You can find it", "It is found", "People meet it"])
    extra = rng.choice(
        ["It is also good to know that", "One thing that stands out is that", "What many people notice is that"]
    )
    reason = rng.choice(["It matters because", "We value it because", "It is important because"])
    first = f"{subject} is {what}. {place} {where}. In short, {how}. {extra} {special}. {reason} {value}."
    why = (
        f"There is a good reason: {value}. Without {name}, this would be much harder, and many people would miss it. "
        f"It also helps to remember that {how}. That is why we should know a little about {name}."
    )
    compare = (
        f"Both are part of everyday life, but they are quite different. {subject} is {what}, while {other_name} is {other[1]}. "
        f"You can find the first {where}, and the second {other[2]}. As for the first, {special}. As for the second, {other[4]}."
    )
    points = f"Here are the main points about {name}:\n\n- It is {what}.\n- It is found {where}.\n- As we saw, {how}.\n- Also, {special}."
    rest = [
        (rng.choice(["Why is that important?", "Why should I care about it?", "What is it good for?"]), why),
        (rng.choice(["How is it different from {}?", "Compare it with {}.", "And how does {} compare?"]).format(other_name), compare),
        (rng.choice(["List the main points.", "Can you give me that as a list?", "Please sum it up in a few points."]),
         f"{points}\n\nIf you remember only one thing, let it be this: {value}."),
    ]  # fmt: skip
    return [(rng.choice(EXPLAIN).format(name) + rng.choice(STYLES), first), *rng.sample(rest, 2)]


def _code(rng: random.Random) -> Turns:
    names, returns, parameter, hint, result, table = rng.choice(FUNCTIONS)
    name, new_name = rng.sample(names, 2)
    k = rng.randint(2, 9)
    parameter = rng.choice([parameter, "items" if "list" in hint else "sentence"])
    returns = returns.format(k=k)
    body = [(line.format(p=parameter, k=k), does.format(k=k)) for line, does in table]

    def example() -> object:
        numbers, words = (
            [rng.randint(1, 20) for _ in range(rng.randint(3, 5))],
            rng.sample(GROUPS["words"] + GROUPS["fruits"], 3),
        )
        return {"list[int]": numbers, "list[str]": words, "str": rng.choice([words[0], "level", "noon", "radar"])}[hint]

    def source(called: str, signature: str) -> str:
        return "\n".join([f"def {called}({signature}:", *(f"    {line}" for line, _ in body)])

    def block(called: str, signature: str, argument: object) -> str:
        return f"```python\n{source(called, signature)}\n\n\nprint({called}({argument!r}))\n```"

    def value(argument: object) -> object:
        scope: dict[str, Any] = {}
        exec(source(name, f"{parameter})"), scope)  # safe: code from the table above
        return scope[name](argument)

    one = two = example()
    while two == one:
        two = example()
    plain, hinted = f"{parameter})", f"{parameter}: {hint}) -> {result}"
    first = (
        f"Here is a function that returns {returns}:\n\n{block(name, plain, one)}\n\nThe function first {body[0][1]}. At the end it "
        f"{body[-1][1]}. The example prints {value(one)!r}."
    )
    lines = "\n".join(f"- `{line.strip()}` {does}." for line, does in body)
    rest = [
        (f"Please rename the function to {new_name}.", f"Of course. Only the name changes, and the call has to use the new name "
         f"as well:\n\n{block(new_name, plain, one)}\n\nIt still returns {returns}, so the example prints {value(one)!r} as before."),
        (rng.choice(["Can you add type hints?", "Please add type hints."]), f"Sure. The parameter is of type `{hint}` and the result is of "
         f"type `{result}`:\n\n{block(name, hinted, one)}\n\nType hints do not change what the function does. They help readers and tools."),
        (rng.choice(["Explain it line by line.", "What does each line do?"]), f"Let us go through the function line by line:\n\n- `def {name}({plain}:` "
         f"names the function and its parameter.\n{lines}\n\nTogether these lines return {returns}."),
        (f"What does it print for {two!r}?", f"For this input we call the same function with another argument, like this:\n\n```python\nprint({name}({two!r}))\n```\n\nThe function "
         f"again returns {returns}. For {two!r} that is {value(two)!r}, so the call prints {value(two)!r}."),
    ]  # fmt: skip
    ask = rng.choice(REQUESTS).format(returns, name=f"`{name}`")
    return [(ask, first), *rng.sample(rest, 2)]


KINDS = {
    "arithmetic": _arithmetic,
    "conversion": _conversion,
    "lists": _lists,
    "explanation": _explanation,
    "code": _code,
}
