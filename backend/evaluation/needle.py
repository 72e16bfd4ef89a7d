"""Needle prompts: a made-up secret in a text that says nothing else of it, and exactly which token is what.

Asks of a model that it reads the secret out again. Whoever explains that answer should point at the needle, so the
truth is planted and not a matter of taste. Knows text and tokens; knows nothing of methods.

A prompt is system text, distractor sentences, the needle sentence, more distractor sentences, and the query. Its
length in tokens is exact. The answer is one token (or several, one per word) that stands nowhere else in the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from backend.errors import BadRequest, NotApplicable
from backend.evaluation.distractors import SECRETS, sentences
from backend.evaluation.needle_metrics import TokenSets
from backend.evaluation.needle_text import Story, fill, frame_words, made_up_name
from backend.models.characters import encode, token_text
from backend.models.language import LanguageModel
from backend.models.passage import append_answer, encode_prompt, encode_text
from backend.saliency.passes import logits_at
from backend.settings import Settings
from backend.types import Passage, Prompt

_LEAD_ROOM = 15  # tokens of a chat's lead
_ROUNDS = 24  # attempts to hit a length with a tokenizer that joins or splits at borders
_FEW = 8  # secrets from the list that a vocabulary must hold whole; else words are sought in the vocabulary itself


@dataclass(frozen=True, slots=True)
class NeedleSpec:
    """Which prompt to make.

    Attributes:
        length: Tokens of the prompt, all included.
        depth: Where the needle stands in the distractor, in percent of its tokens.
        case: Number of the case; another number makes another entity, secret and text.
        chat: Whether the model's chat template renders it.
        words: Words of the secret, one token each.
    """

    length: int = 256
    depth: int = 50
    case: int = 0
    chat: bool = False
    words: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Needle:
    """A planted needle.

    Attributes:
        spec: As asked.
        prompt: The prompt.
        passage: Its tokens, followed by the expected answer.
        target: Half-open span of the secret in the answer; before it stands the lead of a chat.
        sets: Which prompt token is what.
        entity: The made-up name.
        secret: The secret's words.
        depth_reached: Where the needle really stands, in percent; sentences cannot be cut.
    """

    spec: NeedleSpec
    prompt: Prompt
    passage: Passage
    target: tuple[int, int]
    sets: TokenSets
    entity: str
    secret: str
    depth_reached: float

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """Ids of lead and secret."""
        return tuple(token.id for token in self.passage.answer_tokens)


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether the model answers with the secret.

    Attributes:
        passed: Whether each of the secret's tokens is the model's first choice in its turn.
        probability: Probability of the whole secret.
        said: The model's first choices, as text.
    """

    passed: bool
    probability: float
    said: str


def plant(model: LanguageModel, spec: NeedleSpec, limits: Settings | None = None) -> Needle:
    """Make a needle prompt for a model's tokenizer; the same spec makes the same prompt.

    Args:
        model: Its tokenizer and chat template are used; it is not run.
        spec: Which prompt.
        limits: Bounds on characters and tokens; None for the process-wide settings.

    Raises:
        BadRequest: If the length leaves no room, cannot be met, or the vocabulary holds no word that could be a secret.
        PromptTooLong: If the model or the limits do not allow the length.
        NotApplicable: If a chat is asked for and the model has no template.
    """
    if not (0 <= spec.depth <= 100 and spec.words >= 1):
        raise BadRequest("The needle's depth must lie between 0 and 100 %, and a secret has at least one word.")
    if spec.chat and not model.tokenizer.chat_template:
        raise NotApplicable("This model has no chat template.", "Plant the needle in a plain prompt.")
    rng = random.Random(f"{spec.length}/{spec.depth}/{spec.case}/{spec.words}")  # noqa: S311 - not cryptography
    entity = made_up_name(rng)
    hay = sentences(rng, 60 + spec.length // 6)
    frame = frame_words(entity)
    words = [word for word in _whole_words(model) if word.casefold() not in frame]
    rng.shuffle(words)
    if len(words) < spec.words:
        raise BadRequest(
            f"This model's vocabulary holds {len(words)} words that could be a secret; {spec.words} are needed.",
            "Use a model with a larger vocabulary.",
        )
    for first in range(0, len(words) - spec.words + 1, spec.words):
        chosen = words[first : first + spec.words]
        clean = [s for s in hay if not any(word.casefold() in s.casefold() for word in chosen)]
        found = _fitted(model, spec, Story(entity, " ".join(chosen), spec.chat), clean, rng, limits)
        if found is not None:
            return found
    raise BadRequest(
        f"No needle prompt of exactly {spec.length} tokens was found for this tokenizer.", "Choose a longer prompt."
    )


@torch.no_grad()
def ask_secret(model: LanguageModel, needle: Needle) -> Gate:
    """Let the model answer greedily, and say whether it names the secret. One pass.

    The secret's tokens are given one after the other: each must be the model's first choice behind those before it,
    which is what greedy decoding would write. The start of the sentence ("The secret word of the ... gate is") is given
    too, at the end of a plain prompt and as the start of the model's turn in a chat: SmolLM2-135M ends its answer, or
    opens a quotation, where only "Your answer is:" stands before it.
    """
    ids = needle.passage.ids
    start = needle.passage.prompt_length + needle.target[0]
    secret = ids[start:]
    reads = range(start - 1, start - 1 + len(secret))
    logits = logits_at(model, torch.tensor([ids[:-1]], device=model.device), reads)[0]
    first = logits.argmax(dim=-1).tolist()
    chances = logits.log_softmax(dim=-1)[range(len(secret)), list(secret)]
    said = "".join(token_text(model.tokenizer, i) for i in first)
    return Gate(tuple(first) == secret, float(chances.sum().exp()), said)


# ---------------------------------------------------------------------------------------------- inside


def _whole_words(model: LanguageModel) -> list[str]:
    """Return words that are one token behind a space: ours, or where these are few, the vocabulary's own."""
    ours = [word for word in SECRETS if len(encode_text(model, " " + word)) == 1]
    if len(ours) >= _FEW:
        return ours
    texts = (token_text(model.tokenizer, i) for i in range(min(len(model.tokenizer), model.vocabulary_rows)))
    found = (t[1:] for t in texts if t[:1] == " " and len(t) > 3 and t[1:].isascii() and t[1:].isalpha())
    return list(dict.fromkeys([*ours, *found]))


def _fitted(
    model: LanguageModel, spec: NeedleSpec, story: Story, hay: list[str], rng: random.Random, limits: Settings | None
) -> Needle | None:
    """Fill the prompt to its exact length; None if that does not work with this secret."""
    sizes = [len(encode(model.tokenizer, " " + sentence, control_tokens=False).ids) for sentence in hay]
    empty = len(encode_prompt(model, story.prompt("", ""), limits).tokens)
    room = spec.length - empty
    if room < 0:
        raise BadRequest(
            f"System text, needle and query alone take {empty} tokens, more than {spec.length}.",
            "Choose a longer prompt.",
        )
    for _ in range(_ROUNDS):
        parts = fill(sizes, room, spec.depth, rng)
        if parts is None:
            return None
        before, after = (" ".join(hay[i] for i in part) for part in parts)
        prompt = story.prompt(before, after)
        passage = encode_prompt(model, prompt, limits, room=spec.words + _LEAD_ROOM)
        if len(passage.tokens) == spec.length:
            left, right = (sum(sizes[i] for i in part) for part in parts)
            return _assembled(model, spec, story, prompt, passage, 100 * left / max(left + right, 1))
        room += spec.length - len(passage.tokens)  # borders joined or split tokens
        if room < 0:
            return None
    return None


def _assembled(
    model: LanguageModel, spec: NeedleSpec, story: Story, prompt: Prompt, passage: Passage, depth: float
) -> Needle | None:
    """Name every token and append the answer; None if the secret is not its own tokens."""
    sets = _token_sets(passage, story)
    lead = encode_text(model, story.lead) if story.lead else ()
    secret = encode_text(model, " " + story.secret)
    if len(sets.answer_word) != spec.words or len(secret) != spec.words:
        return None
    passage = append_answer(model, passage, (*lead, *secret))
    ids = passage.ids[: passage.prompt_length]
    if any(ids.count(token) != 1 for token in secret):
        return None
    start, count = passage.prompt_length, len(lead)
    sets = replace(sets, lead=tuple(range(start, start + count + len(secret) - 1)))
    return Needle(spec, prompt, passage, (count, count + len(secret)), sets, story.entity, story.secret, depth)


def _token_sets(passage: Passage, story: Story) -> TokenSets:
    """Sort the prompt's tokens by where their characters lie; a space belongs to the word after it."""
    text = passage.rendered
    needle = text.index(story.needle)
    query = text.rindex(story.query)
    secret, entity = needle + story.needle.index(story.secret), needle + story.needle.index(story.entity)
    found: dict[str, list[int]] = {name: [] for name in ("bos", "template", "system", "distractor", "needle", "query")}
    answer_word, entity_words = [], []
    system_end = text.index(story.system) + len(story.system)
    has_bos = any(token.role == "bos" for token in passage.tokens)
    for position, (begin, end) in enumerate(_character_spans(passage)):
        role = passage.tokens[position].role
        blanks = len(text[begin:end]) - len(text[begin:end].lstrip())
        at = min(begin + blanks, max(end - 1, begin))  # first visible character
        if role == "bos" or (position == 0 and not has_bos):
            name = "bos"
        elif role == "template":
            name = "template"
        elif role == "system" or at < system_end:
            name = "system"
        elif needle <= at < needle + len(story.needle):
            name = "needle"
        else:
            name = "query" if at >= query else "distractor"
        found[name].append(position)
        if name == "needle" and secret <= at < secret + len(story.secret):
            answer_word.append(position)
        if name == "needle" and entity <= at < entity + len(story.entity):
            entity_words.append(position)
    parts = {name: tuple(positions) for name, positions in found.items()}
    return TokenSets(**parts, answer_word=tuple(answer_word), entity=tuple(entity_words))


def _character_spans(passage: Passage) -> Iterator[tuple[int, int]]:
    """Lay the tokens onto the rendered text; tokens that the tokenizer inserted take no characters."""
    at = 0
    for token in passage.tokens[: passage.prompt_length]:
        length = len(token.text) if passage.rendered.startswith(token.text, at) else 0
        yield at, at + length
        at += length
