"""PUT /api: the interface of Megatron-LM's text generation server."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron.common.errors import raise_if_any
from megatron.inference.engine.beam_search import Search
from megatron.inference.engine.request import Completion, Request
from megatron.inference.engine.sampling import Sampling
from megatron.inference.loading.incremental_detokenizer import texts_of_each
from megatron.inference.server.pending_requests import InFlight
from megatron.inference.server.schemas import MegatronBody
from megatron.inference.server.served_model import ServedModel

Record = dict[str, Any]

_USUAL_NEW_TOKENS = 64


async def answer(served: ServedModel, body: MegatronBody) -> Record:
    """Return the object that answers `body`.

    Raises:
        ConfigError, DataError: it asks for what cannot be done.
        Unavailable: nothing more can be taken on now.
    """
    raise_if_any(_problems(served, body))
    prompts = [_tokens(served, body, text) for text in body.prompts]
    new_tokens = served.new_tokens(prompts, body.tokens_to_generate, _USUAL_NEW_TOKENS)
    served.require_room(prompts, new_tokens, body.beam_width or 1)
    if body.beam_width is not None:
        search = _search(served, body, prompts[0], body.beam_width, new_tokens)
        return await _likeliest(served, search)
    requests = _requests(served, body, prompts, new_tokens)
    served.require_possible(requests)
    with InFlight(served.engine_loop, requests) as jobs:
        return _written(served, body, await jobs.completions())


def _problems(served: ServedModel, body: MegatronBody) -> Iterator[str]:
    if body.tokens_to_generate == 0 and not body.logprobs:
        yield "tokens_to_generate: 0 needs logprobs: there is nothing else to tell"
    if body.top_k and body.top_p:
        yield "top_k and top_p exclude each other: give one of them"
    if (body.top_k or 0) > served.vocab_size:
        yield f"top_k: {body.top_k} is more than the vocabulary's {served.vocab_size} tokens"
    if (body.top_p_decay or body.top_p_bound) and not body.top_p:
        yield "top_p_decay and top_p_bound need a top_p to begin with"
    elif body.top_p_bound > (body.top_p or 0):
        yield f"top_p_bound: {body.top_p_bound} is more than top_p {body.top_p}"
    if not body.add_BOS and "" in body.prompts:
        yield "prompts: an empty text needs add_BOS"
    if body.beam_width is None:
        return
    if len(body.prompts) != 1:
        yield f"beam_width: a search needs exactly 1 prompt, and there are {len(body.prompts)}"
    if body.tokens_to_generate == 0:
        yield "beam_width: a search needs tokens_to_generate of at least 1"
    if (body.stop_token or 0) >= served.vocab_size:
        yield f"stop_token: {body.stop_token} is not in the vocabulary of {served.vocab_size}"


def _tokens(served: ServedModel, body: MegatronBody, text: str) -> list[int]:
    tokens = served.tokenizer.encode(text)
    if not body.add_BOS:
        return tokens
    ids = served.tokenizer.special_ids
    begin = ids["bos"] if "bos" in ids else served.tokenizer.eod  # noqa: SIM401 (no eod is an error)
    # Some tokenizers put it in front by themselves.
    return tokens if tokens[:1] == [begin] else [begin, *tokens]


def _sampling(served: ServedModel, body: MegatronBody) -> Sampling:
    temperature = served.sampling.temperature if body.temperature is None else body.temperature
    if body.top_k is None and body.top_p is None:
        top_k, top_p = served.sampling.top_k, served.sampling.top_p
    else:
        top_k, top_p = body.top_k or 0, body.top_p or 0.0
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        top_p_decay=body.top_p_decay,
        top_p_bound=body.top_p_bound,
    )


def _requests(
    served: ServedModel, body: MegatronBody, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Request]:
    tokenizer = served.tokenizer
    ends = {"\n": body.stop_on_eol, "\n\n": body.stop_on_double_eol}
    barred = []
    if body.prevent_newline_after_colon:
        barred.append((tokenizer.encode(":")[-1], tokenizer.encode("\n")[-1]))
    asked = Request(
        prompt=(),
        max_new_tokens=new_tokens,
        sampling=_sampling(served, body),
        stop_tokens=frozenset({tokenizer.eod}),
        stop_strings=tuple(text for text, is_one in ends.items() if is_one),
        barred=frozenset(barred),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs,
    )
    seeds = served.seeds(body.random_seed, len(prompts))
    return [
        replace(asked, prompt=tuple(prompt), seed=seed)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def _search(
    served: ServedModel, body: MegatronBody, prompt: Sequence[int], width: int, new_tokens: int
) -> Search:
    stop = served.tokenizer.eod if body.stop_token is None else body.stop_token
    return Search(
        prompt=tuple(prompt),
        width=width,
        max_new_tokens=new_tokens,
        stop_tokens=frozenset({stop}),
        length_penalty=body.length_penalty,
    )


async def _likeliest(served: ServedModel, search: Search) -> Record:
    with InFlight(served.engine_loop, [search]) as jobs:
        beams = await jobs.beams()
    whole = [[*search.prompt, *beam.tokens] for beam in beams]
    return {**_texts(served, whole), "scores": [beam.score for beam in beams]}


def _written(served: ServedModel, body: MegatronBody, done: Sequence[Completion]) -> Record:
    logprobs = [[*one.prompt_logprobs, *(choice.logprob for choice in one.choices)] for one in done]
    texts = _texts(served, [[*one.prompt, *one.tokens] for one in done])
    return {**texts, "logprobs": logprobs if body.logprobs else None}


def _texts(served: ServedModel, sequences: Sequence[Sequence[int]]) -> Record:
    return {
        "text": [served.tokenizer.decode(tokens) for tokens in sequences],
        "segments": [texts_of_each(served.tokenizer, tokens) for tokens in sequences],
    }
