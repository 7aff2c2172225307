import pytest

from data.conversation import TEMPLATES, Conversation, encode, encode_prompt, parse, resolve_template
from data.loss_mask import masked_text

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
CHAT = Conversation(
    "chat",
    (
        ("user", "How many legs has a spider?"),
        ("assistant", "Eight.\n\nInsects have 6."),
        ("user", "And  two spiders?"),
        ("assistant", " 16 in total"),
    ),
)
CHATML = (
    "{%- for message in messages -%}{{- '[' + message['role'] + ']\\n' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)


def unmarked(template: str) -> str:
    for mark in ("{%- generation -%}", "{%- endgeneration -%}"):
        template = template.replace(mark, "")
    return template


def fastchat_add_colon_two(messages, system=SYSTEM, seps=(" ", "</s>")):
    """Render messages by the rule of FastChat's SeparatorStyle.ADD_COLON_TWO."""
    text = system + seps[0]
    for n, (role, message) in enumerate(messages):
        text += f"{role.upper()}: {message}{seps[n % 2]}" if message is not None else f"{role.upper()}:"
    return text


def llama2_official(messages, system=None):
    """Render messages by Meta's rule: the system text is in the first user turn, every pair has its own BOS and EOS."""
    texts = [message for _, message in messages]
    if system:
        texts[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{texts[0]}"
    pairs = [texts[n : n + 2] for n in range(0, len(texts), 2)]
    return "".join(f"<s>[INST] {pair[0]} [/INST]" + "".join(f" {answer} </s>" for answer in pair[1:]) for pair in pairs)


def rendered(tokenizer, template, messages, **options):
    dicts = [{"role": role, "content": text} for role, text in messages]
    return tokenizer.apply_chat_template(dicts, chat_template=TEMPLATES[template], tokenize=False, **options)


def spans(ids, mask):
    """Return the runs of tokens inside the loss mask."""
    runs, previous = [], 0
    for token, seen in zip(ids, mask, strict=True):
        if seen:
            runs = [*runs[:-1], [*runs[-1], token]] if previous else [*runs, [token]]
        previous = seen
    return runs


def test_the_vicuna_template_renders_fastchats_prompt(tokenizer):
    assert rendered(tokenizer, "vicuna_v1.1", CHAT.messages) == "<s>" + fastchat_add_colon_two(CHAT.messages)
    prompt = (*CHAT.messages[:3], ("assistant", None))
    assert rendered(
        tokenizer, "vicuna_v1.1", CHAT.messages[:3], add_generation_prompt=True
    ) == "<s>" + fastchat_add_colon_two(prompt)


def test_the_vicuna_template_renders_a_system_message(tokenizer):
    expected = "<s>" + fastchat_add_colon_two(CHAT.messages, system="Be brief.")
    assert rendered(tokenizer, "vicuna_v1.1", (("system", "Be brief."), *CHAT.messages)) == expected


def test_the_llama2_template_renders_metas_prompt(tokenizer):
    assert rendered(tokenizer, "llama2_chat", CHAT.messages) == llama2_official(CHAT.messages)
    with_system = (("system", "Be brief."), *CHAT.messages)
    assert rendered(tokenizer, "llama2_chat", with_system) == llama2_official(CHAT.messages, system="Be brief.")
    assert rendered(tokenizer, "llama2_chat", CHAT.messages[:3], add_generation_prompt=True) == llama2_official(
        CHAT.messages[:3]
    )


@pytest.mark.parametrize(("template", "before_eos"), [("vicuna_v1.1", ""), ("llama2_chat", " ")])
def test_the_mask_covers_the_answers_and_their_eos_and_nothing_else(tokenizer, template, before_eos):
    ids, mask = encode(CHAT, tokenizer, template, None)
    assert [tokenizer.decode(run) for run in spans(ids, mask)] == [
        f" {text}{before_eos}</s>" for role, text in CHAT.messages if role == "assistant"
    ]


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_a_mask_shifted_by_one_would_be_noticed(tokenizer, template):
    ids, mask = encode(CHAT, tokenizer, template, None)
    answers = [tokenizer.decode(run) for run in spans(ids, mask)]
    for shifted in ([*mask[1:], 0], [0, *mask[:-1]]):
        assert [tokenizer.decode(run) for run in spans(ids, shifted)] != answers
    assert [run[-1] for run in spans(ids, mask)] == [tokenizer.eos_token_id] * 2


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_a_template_without_generation_marks_gives_the_same_mask(tokenizer, template, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "unmarked", unmarked(TEMPLATES[template]))
    assert encode(CHAT, tokenizer, "unmarked", None) == encode(CHAT, tokenizer, template, None)


def test_text_that_a_template_adds_after_eos_is_outside_the_mask(tokenizer, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "chatml", CHATML)
    ids, mask = encode(CHAT, tokenizer, "chatml", None)
    assert [tokenizer.decode(run) for run in spans(ids, mask)] == ["Eight.\n\nInsects have 6.</s>", " 16 in total</s>"]


def test_an_answer_that_shares_a_token_with_the_prompt_is_found(tokenizer, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "chatml", CHATML)
    for answer in ("\nEight", "  Eight", "\n\n\nEight"):
        ids, mask = encode(Conversation("", (("user", "Hi"), ("assistant", answer))), tokenizer, "chatml", None)
        (run,) = spans(ids, mask)
        assert tokenizer.decode(run).endswith("Eight</s>")
        assert tokenizer.decode(run).strip("\n ") == "Eight</s>"


def test_the_answers_of_a_template_that_rewrites_its_prompt_are_found(tokenizer, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "counting", "{{- messages | length -}}" + CHATML)
    ids, mask = encode(CHAT, tokenizer, "counting", None)
    assert [tokenizer.decode(run) for run in spans(ids, mask)] == ["Eight.\n\nInsects have 6.</s>", " 16 in total</s>"]


def test_a_template_that_rewrites_its_prompt_with_the_answers_is_refused(tokenizer, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "counting", "{{- messages | map(attribute='content') | join | length -}}" + CHATML)
    with pytest.raises(ValueError, match="does not extend its own prompt"):
        encode(CHAT, tokenizer, "counting", None)


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_a_prompt_is_a_prefix_of_the_conversation_with_its_answer(tokenizer, template):
    for turn in (1, 3):
        prompt = encode_prompt(CHAT.messages[:turn], tokenizer, template)
        ids, mask = encode(Conversation("", CHAT.messages[: turn + 1]), tokenizer, template, None)
        assert ids[: len(prompt)] == prompt
        assert all(mask[len(prompt) :]) and not mask[len(prompt) - 1]


@pytest.mark.slow
def test_a_conversation_has_one_bos(tokenizer, llama_tokenizer):
    for each in (tokenizer, llama_tokenizer):
        assert encode(CHAT, each, "vicuna_v1.1", None)[0].count(each.bos_token_id) == 1
        assert encode_prompt(CHAT.messages[:1], each, "llama2_chat").count(each.bos_token_id) == 1


def test_encode_cuts_at_max_length(tokenizer):
    ids, mask = encode(CHAT, tokenizer, "vicuna_v1.1", None)
    assert encode(CHAT, tokenizer, "vicuna_v1.1", 50) == (ids[:50], mask[:50])


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_the_real_llama_tokenizer_gives_the_same_mask_both_ways(llama_tokenizer, template, monkeypatch):
    monkeypatch.setitem(TEMPLATES, "unmarked", unmarked(TEMPLATES[template]))
    ids, mask = encode(CHAT, llama_tokenizer, template, None)
    assert encode(CHAT, llama_tokenizer, "unmarked", None) == (ids, mask)
    answers = [llama_tokenizer.decode(run).removesuffix("</s>").strip() for run in spans(ids, mask)]
    assert answers == [text.strip() for role, text in CHAT.messages if role == "assistant"]
    prompt = encode_prompt(CHAT.messages[:3], llama_tokenizer, template)
    assert ids[: len(prompt)] == prompt


def test_templates_are_chosen_by_name(tokenizer):
    assert resolve_template("vicuna_v1.1", tokenizer) == TEMPLATES["vicuna_v1.1"]
    assert resolve_template("tokenizer", tokenizer) == tokenizer.chat_template
    with pytest.raises(ValueError, match=r"'alpaca'.*vicuna_v1.1, llama2_chat"):
        resolve_template("alpaca", tokenizer)


SWITCH = (
    "\n{%- for message in messages %}{{ '[' + message.role + ']' + message.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '[assistant]' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{%- endif %}{%- endif %}"
)


@pytest.mark.parametrize("text", [SWITCH, SWITCH.strip(), SWITCH.replace("enable_thinking", "thinking")])
def test_the_thinking_switch_is_the_templates_own(tokenizer, monkeypatch, text):
    monkeypatch.setattr(tokenizer, "chat_template", text)
    prompts = {}
    for option, value in (("", None), (":thinking=on", True), (":thinking=off", False)):
        switch = {} if value is None else {"enable_thinking": value, "thinking": value}
        expected = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Why?"}], add_generation_prompt=True, return_dict=False, **switch
        )
        prompts[option] = encode_prompt([("user", "Why?")], tokenizer, f"tokenizer{option}")
        assert prompts[option] == expected
    assert prompts[""] == prompts[":thinking=on"] != prompts[":thinking=off"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vicuna_v1.1:thinking=off", r"no thinking switch \(enable_thinking\): write vicuna_v1.1 without thinking=off"),
        ("tokenizer:thinking=maybe", "unknown option 'thinking=maybe' .* write tokenizer:thinking=on or"),
        ("alpaca:thinking=on", "unknown chat template 'alpaca'"),
    ],
)
def test_a_thinking_switch_that_is_not_there_is_refused(tokenizer, name, said):
    with pytest.raises(ValueError, match=said):
        resolve_template(name, tokenizer)


def test_a_tokenizer_without_template_says_what_to_do(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"no chat template of its own; choose one of: vicuna_v1.1"):
        resolve_template("tokenizer", tokenizer)


def test_the_answers_are_shown_in_green_within_the_complete_text(tokenizer):
    ids, mask = encode(CHAT, tokenizer, "vicuna_v1.1", None)
    text = masked_text(ids, mask, tokenizer)
    assert text.plain == "<s>" + fastchat_add_colon_two(CHAT.messages)
    green = [text.plain[span.start : span.end] for span in text.spans if span.style == "bold green"]
    assert green == [" Eight.\n\nInsects have 6.</s>", "  16 in total</s>"]


def record_of(*turns):
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


@pytest.mark.parametrize(
    "record",
    [
        record_of(("human", "a"), ("gpt", "b")),
        record_of(("user", "a"), ("chatgpt", "b")),
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        record_of(("gpt", "left over"), ("human", "a"), ("bard", "b")),
    ],
)
def test_both_forms_of_records_are_read(record):
    assert parse(record, 5) == Conversation("5", (("user", "a"), ("assistant", "b")))


def test_id_and_system_message_are_kept():
    record = {"id": "x_0", **record_of(("system", "s"), ("gpt", "left over"), ("human", "a"), ("gpt", "b"))}
    assert parse(record, 5) == Conversation("x_0", (("system", "s"), ("user", "a"), ("assistant", "b")))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("text", "not a JSON object"),
        ({"conversations": []}, "no turns"),
        ({"text": "a"}, "no turns"),
        (record_of(("human", "a"), ("alien", "b")), "unknown speaker 'alien'"),
        (record_of(("human", "a"), ("gpt", " ")), "an assistant turn is empty"),
        (record_of(("human", "a"), ("gpt", None)), "a turn has no text"),
        (record_of(("human", "a"), ("gpt", "\ud83d")), "not valid Unicode"),
        (record_of(("human", "a"), ("human", "b"), ("gpt", "c")), "do not alternate"),
        (record_of(("human", "a"), ("system", "b"), ("gpt", "c")), "do not alternate"),
        (record_of(("human", "a")), "no assistant turn"),
        (record_of(("gpt", "a")), "no assistant turn"),
        ({"conversations": ["a"]}, "a turn is not a JSON object"),
    ],
)
def test_a_broken_record_gives_its_reason(record, reason):
    with pytest.raises(ValueError, match=reason):
        parse(record, 0)
