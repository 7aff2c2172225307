import unicodedata

import pytest

from data.files import SECRETS, escape_markdown, redacted, safe_line, safe_text

HARMFUL_BIDIRECTIONAL = ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")


def test_no_control_character_no_mark_of_direction_and_no_half_of_a_pair_is_left():
    every = "".join(map(chr, range(0x10000)))  # no higher plane has any of them
    safe = safe_text(every)
    assert len(safe) == len(every)
    for character in set(safe):
        assert unicodedata.category(character) not in ("Cc", "Cs") or character in "\t\n"
        assert unicodedata.bidirectional(character) not in HARMFUL_BIDIRECTIONAL
    safe.encode("utf-8")


def test_ordinary_text_is_unchanged():
    text = "Grüße, 你好, שלום, 👩‍👩‍👧 a\tb\n"
    assert safe_text(text) == text


def test_a_line_is_one_line():
    assert safe_line("a\r\nb\rc\x0bd\u2028e\x85f") == "a b c d e f"


def test_a_cell_of_a_table_stays_one_cell():
    assert escape_markdown("a|b\r| c\n<b>`x`") == r"a\|b \| c \<b\>\`x\`"


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("secret", ["sk-123456", "sk-12\n3456", " sk-123456\n"])
def test_a_secret_is_replaced_by_its_name(name, secret, monkeypatch):
    monkeypatch.setenv(name, secret)
    for text in (secret, f"b'Bearer {secret!r}'", f"Bearer {secret.strip()}!"):
        assert "3456" not in redacted(text) and f"[{name}]" in redacted(text)


def test_a_value_too_short_for_a_secret_is_not_searched(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert redacted("none of them") == "none of them"
