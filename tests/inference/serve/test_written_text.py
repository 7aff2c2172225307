"""Stop strings are found wherever the borders of pieces are; the oracle reads the text character by character."""

import random

import pytest

from inference.serve.written_text import StopScanner, TokenTexts


def cut_by_characters(text, stops):
    """The text up to the first stop string that is complete, the longest if several end at the same character."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], end
    return text, None


@pytest.mark.parametrize("seed", range(5))
def test_a_text_ends_at_its_first_stop_string_however_it_is_divided(seed):
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choices("abc", k=rng.randrange(1, 14)))
        stops = ["".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        expected, end = cut_by_characters(text, stops)
        scanner, written, position = StopScanner(stops), "", 0
        while position < len(text) and not scanner.is_found:
            size = rng.randrange(1, 5)
            written += scanner.add(text[position : position + size])
            assert expected.startswith(written), "nothing of a stop string is shown"
            position += size
        assert scanner.is_found == (end is not None)
        assert written + scanner.finish() == expected, (text, stops)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back():
    scanner = StopScanner(["xyz"])
    assert [scanner.add(piece) for piece in ("a x", "b", "xy", "w")] == ["a ", "xb", "", "xyw"]


def test_tokens_are_shown_with_the_space_before_them(toy_tokenizer):
    texts = TokenTexts(toy_tokenizer)
    assert [texts.of(token) for token in (3, 4, 2)] == [" w3", " w4", " </s>"]
