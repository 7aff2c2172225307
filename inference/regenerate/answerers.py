"""What answers the prompts: the base in this process, or an OpenAI-compatible server that hosts it."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from data.conversations import Message
from data.files import validated
from inference.openai_server import TIMEOUT, Completion, OpenAIServer, ServerError
from inference.options import GREEDY, SamplingOptions
from inference.regenerate.dialogue import AnswerCounts, Dialogue
from inference.verifier.attention import attention_kinds
from inference.verifier.base import Base, base_hash
from inference.verifier.cache import BufferCache
from inference.verifier.layers import cache_argument
from inference.verifier.sampling import KeyedSampler, draw_tokens, most_probable

NUM_SEEDS = 1 << 31  # every server takes a seed of 31 bits
MAX_RETRIES = 5
SHRINK = 0.75  # finished rows leave a batch once at most this share of its rows is unfinished


@dataclass(frozen=True)
class Request:
    """A turn that waits for its answer, or, without messages, a text that waits to be continued."""

    messages: list[Message]  # the last one from the user
    prompt: list[int]  # their token ids
    max_new_tokens: int
    sampling: SamplingOptions = GREEDY  # with a seed of its own
    stop: str = ""  # text at which a server ends the continuation of a text


class LocalAnswerer:
    """The base in this process; a reply is a list of token ids."""

    def __init__(self, base: Base, max_length: int) -> None:
        self.base, self.max_length = base, max_length  # tokens of a prompt and its answer

    @property
    def weights(self) -> str:
        """Identifies the weights in a journal."""
        return base_hash(self.base)

    def answer(self, requests: Sequence[Request], advance: Callable[[int], None]) -> list[list[int]]:
        """Decode all requests in one batch, or in two halves if the memory does not suffice.

        ``advance`` is called after each step with the number of new tokens.
        """
        limits = [request.max_new_tokens for request in requests]
        samplers = [request.sampling.sampler() for request in requests]
        keyed = [sampler for sampler in samplers if isinstance(sampler, KeyedSampler)]  # none if greedy
        try:
            return decode_batch(self.base, [request.prompt for request in requests], limits, keyed, advance)
        except torch.OutOfMemoryError as error:
            if len(requests) == 1:
                raise ValueError(
                    f"not enough memory for one prompt of {len(requests[0].prompt)} tokens and an answer of "
                    f"{limits[0]}: give a smaller --max_length or another --dtype"
                ) from error
        torch.cuda.empty_cache()  # outside the handler, where the error no longer keeps the tensors alive
        half = len(requests) // 2
        return self.answer(requests[:half], advance) + self.answer(requests[half:], advance)

    def read(self, reply: Any) -> list[int]:
        """Return a reply that a journal holds; raises ValueError if the base cannot have given it."""
        tokens = validated(list[int], reply)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self.base.model.config.vocab_size:
            raise ValueError("not an answer of this base")
        return tokens

    def add(self, dialogue: Dialogue, prompt: list[int], reply: list[int], counts: AnswerCounts) -> None:
        """Add the answer's tokens to its conversation."""
        dialogue.add_tokens(prompt, reply, self.base.eos, counts)


@torch.inference_mode()
def decode_batch(
    base: Base,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: Sequence[int],
    samplers: Sequence[KeyedSampler] = (),
    advance: Callable[[int], None] = lambda num_tokens: None,
) -> list[list[int]]:
    """Continue B prompts, each to its own length, and call ``advance`` with the number of new tokens of each step.

    Every row is what its prompt is continued by alone: greedily as by `Base.greedy`, sampled as by a session with the
    row's sampler. In float32 and float64 the other rows can change it only where two logits, or a sum of probabilities
    and the number drawn, are equal up to rounding. Raises ValueError if a layer of the base has no full attention.

    No prompt is empty. A row ends with its first EOS token, or is cut off at its limit of new tokens. The samplers
    differ in their seeds only; without any, decoding is greedy.
    """
    if (kinds := set(attention_kinds(base.model.config))) != {"full_attention"}:
        raise ValueError(f"{base.name} has layers without full attention ({', '.join(sorted(kinds))})")
    device, width = base.model.device, max(map(len, prompts))
    fed = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    attended = (torch.arange(width + max(max_new_tokens), device=device) >= width - lengths[:, None]).long()  # (B, C)
    positions = (torch.arange(width, device=device) - (width - lengths[:, None])).clamp(min=0)
    answers: list[list[int]] = [[] for _ in prompts]
    cache = BufferCache(base.model.config.num_hidden_layers, width + max(max_new_tokens))
    rows = list(range(len(prompts)))  # index of the prompt that each row of the current batch continues
    is_unfinished = [True] * len(prompts)
    # An index, as a slice of a prompt's states is not contiguous: the LM head would be copied for each row on a CPU.
    last = torch.tensor([-1], device=device)
    options: dict[str, Any] = {"use_cache": True, "logits_to_keep": last, **cache_argument(base.model, cache)}
    for end in range(width, width + max(max_new_tokens)):
        logits = base.model(fed, attention_mask=attended[:, :end], position_ids=positions, **options).logits
        if samplers:
            numbers = [samplers[row].uniform(len(prompts[row]) + len(answers[row])) for row in rows]
            picks = draw_tokens(samplers[0].probabilities(logits[:, -1]), numbers)  # (B,)
        else:
            picks = most_probable(logits[:, -1])
        advance(sum(is_unfinished))
        for row, token in zip(rows, picks.tolist(), strict=True):
            if is_unfinished[row]:
                answers[row].append(token)
                is_unfinished[row] = token not in base.eos and len(answers[row]) < max_new_tokens[row]
        unfinished = [place for place, row in enumerate(rows) if is_unfinished[row]]
        if not unfinished:
            break
        positions = positions[:, -1:] + 1
        if len(unfinished) <= SHRINK * len(rows):
            rows, places = [rows[place] for place in unfinished], torch.tensor(unfinished, device=device)
            picks, positions, attended = picks[places], positions[places], attended[places]
            for states in (states for pair in cache.views for states in pair):
                states[: len(rows)] = states[places]
            cache.views = [(keys[: len(rows)], values[: len(rows)]) for keys, values in cache.views]
        fed = picks[:, None]
    return answers


# ---- a server


@dataclass(frozen=True)
class ServerReply(Completion):
    """An answer of a server, or the reason why it refuses this one request."""

    refused: str = ""
    is_failing: bool = False  # whether it is the server's own fault that it refuses


class ServerAnswerer:
    """A model on an OpenAI-compatible server, see `OpenAIServer`; a reply is the fields of a `ServerReply`.

    Turns are asked as chats, for which ``template_arguments``, such as enable_thinking, are passed to the server's chat
    template. Without a name, the first model that the server lists answers.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        max_length: int = 0,
        template_arguments: Mapping[str, bool] | None = None,
        concurrency: int = 16,
    ) -> None:
        self.server = OpenAIServer(url, model, MAX_RETRIES)
        self.max_length, self.concurrency = max_length, concurrency  # tokens of a prompt and its answer; requests
        self.template_arguments = dict(template_arguments or {})
        if model is None and (length := self.server.find_model()):
            self.max_length = min(self.max_length, length)

    @property
    def weights(self) -> str:
        """Identifies the weights in a journal."""
        return f"{self.server.model} on a server"

    def answer(self, requests: Sequence[Request], advance: Callable[[int], None]) -> list[dict[str, Any]]:
        """Send the requests, up to ``concurrency`` of them at the same time, and report the tokens of each reply.

        Raises ValueError if the server fails at every request, or `ask` finds that no request can succeed.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            replies = []
            for reply in pool.map(self.ask, requests):  # an error cancels the requests that wait
                replies.append(reply)
                advance(reply.num_written or 0)
        if len(replies) > 1 and all(reply.is_failing for reply in replies):
            raise ValueError(
                f"{self.server.root} fails at all of {len(replies)} requests ({replies[0].refused}): "
                "repair the server, then repeat the command to continue"
            )
        return list(map(vars, replies))

    def ask(self, request: Request) -> ServerReply:
        """Return the answer to one request, or the reason why the server cannot answer it.

        Raises ValueError if no request can succeed: the key, the model name or the address is wrong, or nobody answers.
        """
        sampling = request.sampling
        options: dict[str, Any] = {"temperature": sampling.temperature, "max_tokens": request.max_new_tokens}
        options["timeout"] = TIMEOUT + request.max_new_tokens  # nothing arrives before the last token: one a second
        if sampling.temperature:
            options |= {"top_p": sampling.top_p, "seed": sampling.seed}
        if request.messages:
            options["messages"] = request.messages
        else:
            options |= {"prompt": request.prompt, "stop": [request.stop]}
        extensions = {"top_k": sampling.top_k, "chat_template_kwargs": self.template_arguments}  # of vLLM
        extra = {name: value for name, value in extensions.items() if value}
        try:
            return ServerReply(**vars(self.server.complete(extra, **options)))
        except ServerError as error:
            if error.concerns_every_request:
                raise
            return ServerReply(refused=error.reason, is_failing=error.status >= 500)

    def read(self, reply: Any) -> dict[str, Any]:
        """Return a reply that a journal holds, with all its fields; raises ValueError if it is none."""
        return vars(validated(ServerReply, reply))

    def add(self, dialogue: Dialogue, prompt: list[int], reply: dict[str, Any], counts: AnswerCounts) -> None:
        """Add the answer's text to its conversation, or leave the conversation if the server refused it."""
        if reply["refused"]:
            return dialogue.stop(f"the server refuses: {reply['refused']}", counts)
        counts.num_other_prompts += reply["num_read"] not in (None, len(prompt))
        if reply["tokens"] and not reply["reasoning"]:
            added = dialogue.tokenizer.added_tokens_decoder
            ends = {*dialogue.tokenizer.all_special_ids, *(number for number in added if added[number].special)}
            return dialogue.add_tokens(prompt, reply["tokens"], frozenset(ends), counts)
        return dialogue.add_text(reply["text"], reply["is_cut"], reply["num_written"], counts, reply["reasoning"])


Answerer = LocalAnswerer | ServerAnswerer
"""Answers requests by `answer`; a reply is a JSON value, so that a journal can hold it."""
