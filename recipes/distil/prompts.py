"""User turns to distil on: written by the target itself, and by a small grammar of instructions."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from recipes.distil.generation import Generator, Job
from recipes.distil.target import ChatTokenizer

HELD_OUT_IN = 25
"""One prompt in so many is never trained on."""

TURN_TOKENS = 80
"""Longest user turn that is sampled, in tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user turn, and whether it is kept from training."""

    text: str
    held_out: bool


def is_held_out(text: str) -> bool:
    """The split is by the text alone: no run, seed or order can move a prompt across it."""
    digest = hashlib.sha256(" ".join(text.lower().split()).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_IN == 0


TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "the French Revolution", "machine learning", "healthy sleep",
    "the stock market", "climate change", "renewable energy", "the human heart", "volcanoes", "ancient Egypt",
    "the internet", "vaccines", "gravity", "jazz music", "coral reefs", "bread baking", "public speaking",
    "time management", "electric cars", "the solar system", "DNA", "inflation", "democracy", "the Roman Empire",
    "bicycles", "coffee", "gardening", "chess", "meditation", "databases", "recycling", "whales", "earthquakes",
    "the printing press", "antibiotics", "penguins", "remote work", "supply chains", "cryptography", "honey bees",
    "the Great Wall of China", "rainbows", "magnets", "muscles", "poetry", "tea", "rivers", "robots", "dinosaurs",
    "solar panels", "nutrition", "the moon", "sound waves", "glaciers", "habits", "job interviews", "budgets",
    "operating systems", "space travel", "the Industrial Revolution", "yoga", "photography", "cats", "dogs", "owls",
    "mountains", "deserts", "the brain", "memory", "friendship", "leadership", "critical thinking", "marketing",
)  # fmt: skip
AUDIENCES = (
    "a child",
    "a beginner",
    "a student",
    "my grandmother",
    "a manager",
    "an engineer",
    "a tourist",
    "a friend",
)
FORMS = (
    "a short story", "a poem", "a haiku", "an email", "a letter", "a blog post", "a speech", "a dialogue", "a summary",
    "a product description", "a to-do list", "a lesson plan", "a news article", "a review", "a slogan", "an essay",
)  # fmt: skip
SETTINGS = (
    "a lighthouse keeper", "a lost dog", "two old friends", "a robot that learns to paint", "a village by the sea",
    "a young inventor", "a dragon who is afraid of fire", "a detective", "a train journey", "a forgotten library",
    "a chef", "the last tree on earth", "a time traveller", "a shy teacher", "a storm", "a garden at night",
)  # fmt: skip
PLACES = ("Japan", "Brazil", "Egypt", "Canada", "Italy", "India", "Kenya", "Norway", "Mexico", "Australia", "France",
          "Peru", "Greece", "Iceland", "Vietnam", "Spain", "Germany", "South Africa")  # fmt: skip
THINGS = ("books", "rivers", "animals", "fruits", "inventions", "films", "sports", "board games", "vegetables", "birds",
          "cities", "musical instruments", "programming languages", "planets", "desserts", "flowers")  # fmt: skip
TASKS = (
    "reverses a string", "checks if a number is prime", "sorts a list", "counts the words in a text",
    "adds two numbers",
    "finds the largest number in a list", "computes the factorial of a number", "reads a file line by line",
    "removes duplicates from a list", "converts Celsius to Fahrenheit", "checks if a word is a palindrome",
    "prints the first n Fibonacci numbers", "merges two dictionaries", "finds the average of a list",
)  # fmt: skip
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "SQL", "Bash")
SENTENCES = (
    "The meeting was moved to Thursday because the manager was ill.", "She don't like the new office.",
    "The train leaves at nine and arrives at noon.", "He have three brothers and two sister.",
    "Our sales grew in spring but fell in the summer.", "The weather is lovely today.",
    "I can't come to the party because I am working late.", "The cat sat on the warm windowsill.",
    "Please send me the report before Friday.", "The old bridge was closed after the flood.",
)  # fmt: skip
PATTERNS = (
    "What is {topic}?", "Explain {topic} to {audience}.", "How does {topic} work?", "Why is {topic} important?",
    "Write {form} about {topic}.", "Write {form} about {setting}.", "Give me {n} tips about {topic}.",
    "List {n} facts about {topic}.", "Name {n} {things} and say one thing about each.",
    "What is the capital of {place}?",
    "Plan a {n}-day trip to {place}.", "What should I eat in {place}?", "Tell me about the history of {place}.",
    "Write a function in {language} that {task}.", "How do I write {language} code that {task}?",
    "Compare {topic} and {topic2}.", "What are the advantages and disadvantages of {topic}?",
    "Summarize the main ideas of {topic} in {n} sentences.", "Correct the grammar: {sentence}",
    "Rewrite this sentence more formally: {sentence}", "Translate into French: {sentence}",
    "Translate into Spanish: {sentence}", "What is {a} plus {b}?", "What is {a} times {b}?",
    "If I have {a} apples and give away {n}, how many are left?",
    "A shop sells {n} pens for {b} dollars. What does one cost?",
    "Tell me a joke about {topic}.", "Continue the story: {setting_up} woke up and heard a strange noise.",
    "I feel nervous about {topic}. What can I do?", "How can I learn more about {topic}?",
    "What would happen without {topic}?", "Give a step by step guide to {topic} for {audience}.",
    "Write an email to {audience} about {topic}.", "What are the {n} most famous {things} in the world?",
    "Describe {place} in {n} sentences.", "Is {topic} good for you? Explain.", "Make a list of {n} {things}.",
    "Can you help me with {topic}?", "Write a conversation between {audience} and {setting}.",
    "Define {topic} in one sentence.",
    "What are common mistakes people make with {topic}?", "Create a quiz with {n} questions about {topic}.",
    "Who invented {topic}, and when?", "Hi! Can you tell me something about {topic}?",
    "Suggest {n} names for a shop that sells {things}.",
)  # fmt: skip


def written(seed: int) -> Iterator[str]:
    """Instructions of the grammar, without end; the same seed gives the same ones."""
    rng = random.Random(seed)
    while True:
        setting = rng.choice(SETTINGS)
        yield rng.choice(PATTERNS).format(
            topic=rng.choice(TOPICS), topic2=rng.choice(TOPICS), audience=rng.choice(AUDIENCES), form=rng.choice(FORMS),
            setting=setting, setting_up=setting[0].upper() + setting[1:], place=rng.choice(PLACES),
            things=rng.choice(THINGS), task=rng.choice(TASKS), language=rng.choice(LANGUAGES),
            sentence=rng.choice(SENTENCES), n=rng.randint(2, 10), a=rng.randint(3, 99), b=rng.randint(2, 60),
        )  # fmt: skip


def sampled(generator: Generator, tokenizer: ChatTokenizer, seed: int) -> Iterator[str]:
    """User turns that the target writes itself once a user turn is opened, without end."""
    opened = tuple(tokenizer.user_turn_opened())
    jobs = (Job(i, opened, TURN_TOKENS, 0.8 + 0.1 * (i % 3), seed) for i in _count())
    for turn in generator.write(jobs):
        text = tokenizer.decode(turn.tokens[len(opened) : -1]).strip()
        if turn.tokens[-1] in generator.end_tokens and len(text) >= 8:
            yield text


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def make(
    path: Path, generator: Generator, tokenizer: ChatTokenizer, *, count: int, sampled_share: float, seed: int
) -> list[Prompt]:
    """``count`` different prompts, ``sampled_share`` of them sampled; kept in ``path``, made once."""
    if not path.exists():
        from_target, from_grammar = sampled(generator, tokenizer, seed), written(seed)
        texts: dict[str, None] = {}
        number = 0
        while len(texts) < count:
            number += 1
            is_sampled = ceil(number * sampled_share) > ceil((number - 1) * sampled_share)
            texts.setdefault(next(from_target if is_sampled else from_grammar))
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        partial.replace(path)
    texts_kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Prompt(text, is_held_out(text)) for text in texts_kept]
