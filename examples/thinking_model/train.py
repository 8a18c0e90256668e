"""Trains the thinking model and its length-value model: ``python -m examples.thinking_model.train --out DIRECTORY``.

See docs/generation.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from examples.demo_models.base import Progress, descend, make_optimizer, set_learning_rate
from examples.demo_models.forward import causal_hidden
from examples.demo_models.generate import generate
from examples.demo_models.lenvm import Text, train_lenvm
from examples.demo_models.prompts import END
from examples.demo_models.shapes import CONTEXT, initialise, length_config
from examples.demo_models.text import save_tokenizer, train_tokenizer
from examples.demo_models.train import STORED, bfloat16_products, save_lenvm_model, terminal
from examples.thinking_model import task
from yardstick_llm.engine.models.decoder import Decoder
from yardstick_llm.engine.models.loader import load_model, write_checkpoint

VOCABULARY = 384
ROWS = 32
LEARNING_RATE = 2e-3
LIMIT = 400
"""Tokens at which a text for the length-value model is abandoned."""


def make_tokenizer(seed: int) -> Tokenizer:
    """Train the tokeniser on 4,000 texts. The tags of the thinking section are tokens, but not special ones, as in Qwen3."""
    rng = Random(seed)
    questions = [task.draw_question(rng) for _ in range(4000)]
    texts = (question.prompt + task.draw_text(question, rng) for question in questions)
    tokenizer = train_tokenizer(texts, size=VOCABULARY, min_frequency=0)
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in (task.THINK, task.ANSWER)])
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of an added token."""
    id = tokenizer.token_to_id(text)
    assert id is not None, text
    return id


def train_base(tokenizer: Tokenizer, *, steps: int, seed: int, progress: Progress) -> Decoder:
    """Train the model from random weights on questions that are not held out."""
    eos = token_id(tokenizer, END)
    config = length_config(tokenizer.get_vocab_size(), eos)
    decoder = Decoder(config)
    initialise(decoder, config.num_layers, seed)
    optimizer = make_optimizer(decoder, LEARNING_RATE)
    rng = Random(seed + 1)
    for step in range(steps):
        set_learning_rate(optimizer, LEARNING_RATE, step, steps)
        tokens, answers = _batch(tokenizer, rng)
        logits = decoder.logits(causal_hidden(decoder, tokens[:, :-1])[answers[:, 1:]])
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:][answers[:, 1:]])
        descend(optimizer, decoder, loss)
        progress(step + 1, steps, loss.item())
    return decoder.eval()


def _batch(tokenizer: Tokenizer, rng: Random) -> tuple[Tensor, Tensor]:
    """Draw texts. Returns the tokens, [rows, time], and which of them are learned: those behind the prompt."""
    questions = [draw_training_question(rng) for _ in range(ROWS)]
    prompts = tokenizer.encode_batch_fast([question.prompt for question in questions])
    outputs = tokenizer.encode_batch_fast([task.draw_text(question, rng) for question in questions])
    rows = [(prompt.ids, output.ids) for prompt, output in zip(prompts, outputs, strict=True)]
    time = max(len(prompt) + len(output) for prompt, output in rows)
    tokens, answers = torch.zeros(ROWS, time, dtype=torch.int64), torch.zeros(ROWS, time, dtype=torch.bool)
    for row, (prompt, output) in enumerate(rows):
        end = len(prompt) + len(output)
        tokens[row, :end] = torch.tensor(prompt + output)
        answers[row, len(prompt) : end] = True
    return tokens, answers


def draw_training_question(rng: Random) -> task.Question:
    """Draw a question that is not held out."""
    while task.held_out(question := task.draw_question(rng)):
        pass
    return question


def write_texts(base: Decoder, tokenizer: Tokenizer, *, count: int, seed: int, stray: float) -> list[Text]:
    """Generate the texts that the length-value model learns from, without those that did not end."""
    rng = Random(seed)
    prompts = [tokenizer.encode(draw_training_question(rng).prompt).ids for _ in range(count)]
    outputs = generate(base, prompts, seed=seed, limit=LIMIT, stray=stray)
    pairs = zip(prompts, outputs, strict=True)
    return [Text(prompt, output) for prompt, output in pairs if output[-1] in base.config.eos_token_ids]


def make_models(out: Path, *, steps: int, length_steps: int, texts: int, seed: int) -> None:
    """Write ``out/base`` and ``out/lenvm``."""
    begin = terminal()
    tokenizer = make_tokenizer(seed)
    with bfloat16_products():
        base = train_base(tokenizer, steps=steps, seed=seed, progress=begin("thinking model"))
    write_checkpoint(base.checkpoint_views(), base.config, out / "base", STORED)
    stored = load_model(out / "base")
    assert isinstance(stored, Decoder)
    learned = [
        *write_texts(stored, tokenizer, count=texts, seed=seed + 2, stray=0.0),
        *write_texts(stored, tokenizer, count=texts, seed=seed + 3, stray=0.03),
    ]
    with bfloat16_products():
        config = length_config(tokenizer.get_vocab_size(), token_id(tokenizer, END))
        lenvm = train_lenvm(config, learned, steps=length_steps, seed=seed, progress=begin("length-value model"))
    save_lenvm_model(lenvm, out / "lenvm")
    for name in ("base", "lenvm"):
        save_tokenizer(tokenizer, out / name, context=CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write base/ and lenvm/ to")
    parser.add_argument("--steps", type=int, default=2000, help="training steps of the thinking model")
    parser.add_argument("--length-steps", type=int, default=500, help="training steps of the length-value model")
    parser.add_argument("--texts", type=int, default=2000, help="texts of each kind that the length-value model learns from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of the training")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make_models(
        arguments.out,
        steps=arguments.steps,
        length_steps=arguments.length_steps,
        texts=arguments.texts,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
