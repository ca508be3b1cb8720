"""Trains the shipped family S, M, L: tokenizer, training rows, models, and what their cards report.

    python scripts/train_family.py text  --text DIR --exclude FILE            # CPU: tokenizer and shipped texts
    python scripts/train_family.py train --text DIR --exclude FILE --out OUT  # one H200: S, M, L in half an hour
    python scripts/train_family.py train --smoke --text DIR --exclude FILE --out OUT   # CPU: a minute
    python scripts/train_family.py card  --text DIR --exclude FILE --out OUT  # CPU: cards, plots, checksums

Text is public domain or CC0: books (those in the exclude list, first published after 1930, left out), peps, eips and
18f_blog. One book in twenty is held out whole. Half of the rows are text; the other half are generated context-use
tasks (crosskv.evals.tasks, split "train") of mixed lengths packed into rows, answers weighted four times in the loss:
a model of this size needs many short and dense examples before it looks things up over a thousand tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from crosskv.evals import run, tasks

FAMILY = Path(__file__).parent.parent / "crosskv" / "family"
VOCABULARY = 4096
ROW = 2048
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
ANSWER_WEIGHT = 4.0
RECENT = ("Franz_Kafka",)  # the books are old, but these translations are not in the public domain


@dataclass(frozen=True)
class Plan:
    """One model: its shape, its RoPE, and how it is trained."""

    name: str
    seed: int
    layers: int
    width: int
    heads: int
    mlp: int
    rope: dict
    steps: int
    lr: float
    batch: int = 32
    kv_heads: int = 4
    head_dim: int = 64


YARN = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": ROW // 4}
# S stops early: from about 1,000 steps on it looks things up as well as L does (docs/log.md).
PLANS = (
    Plan("S", 101, 4, 160, 4, 384, {"rope_type": "default", "rope_theta": 1e4}, 900, 3e-3),
    Plan("M", 202, 6, 224, 8, 448, YARN, 2000, 3e-3),
    Plan("L", 303, 12, 320, 8, 448, {"rope_type": "default", "rope_theta": 5e5}, 2700, 3e-3),
)


# ---- text -----------------------------------------------------------------------------------------------------------


def read_text(root: Path, exclude: Path) -> tuple[dict[str, str], dict[str, str]]:
    """({name: text} to train on, {name: text} of the held-out books)."""
    late = set(exclude.read_text().split("\n"))
    files = [f for f in sorted((root / "books").glob("*.md")) if f.name not in late and not f.name.startswith(RECENT)]
    for folder, pattern in (("peps", "*.rst"), ("eips", "**/*.md"), ("18f_blog", "*.md")):
        files += sorted((root / folder).glob(pattern))
    train, held = {}, {}
    for f in files:
        text = f.read_text(encoding="utf-8", errors="replace").strip()
        if len(text) >= 1000:
            (held if is_held_out(f) else train)[f"{f.parent.name}/{f.name}"] = text
    return train, held


def is_held_out(file: Path) -> bool:
    return file.parent.name == "books" and hashlib.sha256(file.name.encode()).digest()[0] % 20 == 0


def excerpts(texts: dict[str, str], each: int, total: int) -> str:
    """Passages of `each` characters from the middle of documents until `total`, whole paragraphs, in name order."""
    out: list[str] = []
    size = 0
    for name, text in texts.items():
        start = text.find("\n", len(text) // 3) + 1
        passage = text[start : text.rfind("\n", start, start + each)].strip()
        if len(passage) < each // 2:
            continue
        out.append(f"[{name}]\n\n{passage}\n")
        size += len(passage)
        if size >= total:
            break
    return "\n\n".join(out)


def train_tokenizer(texts: list[str]):
    """Byte-level BPE with single digits, <|bos|> put in front of every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))]),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def write_text(args: argparse.Namespace) -> None:
    """Writes the shipped texts and one tokenizer into each model's directory."""
    train, held = read_text(args.text, args.exclude)
    (FAMILY / "text").mkdir(exist_ok=True)
    books = {k: v for k, v in train.items() if k.startswith("books/")}
    rest = {k: v for k, v in train.items() if not k.startswith("books/")}
    calibration = excerpts(books, 8000, 900_000) + "\n\n" + excerpts(rest, 8000, 200_000)
    (FAMILY / "text" / "calibration.txt").write_text(calibration, encoding="utf-8")
    (FAMILY / "text" / "heldout.txt").write_text(excerpts(held, 30_000, 400_000), encoding="utf-8")
    rng = random.Random(0)
    filler = tasks.Filler(calibration)
    sample = [t[i : i + 20_000] for t in train.values() for i in range(0, len(t), 80_000)]
    sample += [
        tasks.make(rng.choice(list(tasks.TASKS)), i, filler, split="train", chars=1000).prompt for i in range(3000)
    ]
    tokenizer = train_tokenizer(sample)
    for plan in PLANS:
        tokenizer.save_pretrained(FAMILY / plan.name)
    print(f"{len(train)} documents, {len(held)} held out: {', '.join(held)}")


# ---- rows -----------------------------------------------------------------------------------------------------------


def text_rows(texts: list[str], tokenizer, length: int) -> np.ndarray:
    """[rows, length] token ids: each row starts with <|bos|>; a document goes on in the next row, ends with <|eos|>."""
    stream: list[int] = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id, tokenizer.bos_token_id]
    usable = len(stream) // (length - 1) * (length - 1)
    rows = np.asarray(stream[:usable], np.uint16).reshape(-1, length - 1)
    return np.concatenate([np.full((len(rows), 1), tokenizer.bos_token_id, np.uint16), rows], axis=1)


def task_row(seed: int, filler: tasks.Filler, tokenizer, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, 1 where the token belongs to an answer), both [length]: whole task documents, then filler text."""
    rng = random.Random(f"row/{seed}")
    tokens: list[int] = []
    marks: list[int] = []
    part = partial(tokenizer, add_special_tokens=False)
    while length - len(tokens) > 200:
        room = length - len(tokens) - 60
        want = math.exp(rng.uniform(math.log(140), math.log(room)))
        task = rng.choice(list(tasks.TASKS))
        document = (rng.getrandbits(48), filler)
        context, questions = tasks.document(task, *document, split="train", chars=max(470, int(want * 3.3)))
        pieces = [(context, 0)]
        for question, answer in questions[: rng.randint(1, 4)]:
            pieces += [(question, 0), (answer, 1)]
        ids, flags = [tokenizer.bos_token_id], [0]
        for text, flag in pieces:
            new = part(text)["input_ids"]
            ids += new
            flags += [flag] * len(new)
        ids.append(tokenizer.eos_token_id)
        flags.append(1)  # that the answer ends here is part of the answer
        if len(tokens) + len(ids) <= length:
            tokens += ids
            marks += flags
        else:
            break
    rest = part(" ".join(filler.cut(rng, 600 + (length - len(tokens)) * 8, 1)))["input_ids"]
    tokens += [tokenizer.bos_token_id, *rest]
    marks += [0] * (1 + len(rest))
    return np.asarray(tokens[:length], np.uint16), np.asarray(marks[:length], np.uint8)


def _task_rows(seeds: range, text: str, directory: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    from transformers import AutoTokenizer

    tokenizer, filler = AutoTokenizer.from_pretrained(directory), tasks.Filler(text)
    rows = [task_row(seed, filler, tokenizer, length) for seed in seeds]
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


def make_rows(args: argparse.Namespace, plan: Plan, workers: int) -> dict[str, np.ndarray]:
    """{"text", "tasks", "marks", "held"}: made once and kept in args.out/rows.npz for the other models."""
    cache = args.out / "rows.npz"
    if cache.exists():
        with np.load(cache) as saved:
            return dict(saved)
    directory = str(FAMILY / plan.name)
    train, held = read_text(args.text, args.exclude)
    if args.smoke:
        train, held = dict(list(train.items())[:3]), dict(list(held.items())[:1])
    texts = [t[i : i + 200_000] for t in train.values() for i in range(0, len(t), 200_000)]
    chunks = [texts[i::workers] for i in range(workers)]
    books = [v for k, v in train.items() if k.startswith("books/")]
    random.Random(1).shuffle(books)
    fillers = ["\n".join(books[i::workers])[:4_000_000] for i in range(workers)]
    per = max(1, (16 if args.smoke else args.task_rows) // workers)
    with ProcessPoolExecutor(workers) as pool:
        jobs = [
            pool.submit(_task_rows, range(i * per, (i + 1) * per), fillers[i], directory, ROW) for i in range(workers)
        ]
        parts = list(pool.map(_text_rows, chunks, [directory] * workers, [ROW] * workers))
        made = [j.result() for j in jobs]
        rows = {
            "text": np.concatenate(parts),
            "tasks": np.concatenate([t for t, _ in made]),
            "marks": np.concatenate([m for _, m in made]),
            "held": _text_rows(list(held.values()), directory, ROW),
        }
    args.out.mkdir(parents=True, exist_ok=True)
    np.savez(cache, **rows)
    return rows


def _text_rows(texts: list[str], directory: str, length: int) -> np.ndarray:
    from transformers import AutoTokenizer

    return text_rows(texts, AutoTokenizer.from_pretrained(directory), length)


# ---- training -------------------------------------------------------------------------------------------------------


def build(plan: Plan, tokenizer):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(plan.seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=plan.width,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        intermediate_size=plan.mlp,
        max_position_embeddings=ROW,
        rope_parameters=plan.rope,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def optimizers(model, plan: Plan) -> list:
    """Muon for the hidden matrices, Adam for embeddings and norms; both scaled so that one learning rate serves."""
    import torch

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=plan.lr, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=plan.lr, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def schedule(step: int, steps: int) -> float:
    """Warm-up over 100 steps, then constant, then a linear descent over the last half."""
    return min((step + 1) / 100, 1.0, 2 * (steps - step) / steps)


def train_one(plan: Plan, rows: dict[str, np.ndarray], tokenizer, device: str, log: Path):
    """The trained model, its weights rounded to bf16 as they are shipped; one JSON line per 50 steps in `log`."""
    import torch

    model = build(plan, tokenizer).to(device)
    data = {k: torch.from_numpy(rows[k].astype(np.int16 if k != "marks" else np.uint8)).to(device) for k in rows}
    opts = optimizers(model, plan)

    def loss_of(tokens, weights):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens, use_cache=False).logits
        nll = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
        )
        return nll, (nll * weights).sum() / weights.sum()

    step_loss = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
    draw = np.random.default_rng(plan.seed)
    half = plan.batch // 2
    start = time.monotonic()
    with log.open("w") as f:
        for step in range(plan.steps):
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = plan.lr * schedule(step, plan.steps)
            t = torch.from_numpy(draw.integers(0, len(data["text"]), plan.batch - half)).to(device)
            k = torch.from_numpy(draw.integers(0, len(data["tasks"]), half)).to(device)
            tokens = torch.cat([data["text"][t], data["tasks"][k]]).long()
            marks = torch.cat([torch.zeros_like(data["text"][t]), data["marks"][k].to(torch.int16)])
            weights = 1.0 + (ANSWER_WEIGHT - 1.0) * marks[:, 1:].flatten().float()
            nll, loss = step_loss(tokens, weights)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
            model.zero_grad(set_to_none=True)
            if step % 50 == 0 or step == plan.steps - 1:
                per, answer = nll.detach().reshape(len(tokens), -1), marks[:, 1:] > 0
                row = {
                    "step": step,
                    "text": per[: plan.batch - half].mean().item(),
                    "answers": per[answer].mean().item() if answer.any() else None,
                    "seconds": round(time.monotonic() - start, 1),
                }
                f.write(json.dumps(row) + "\n")
                f.flush()
                if step % 250 == 0 or step == plan.steps - 1:
                    print(plan.name, row, flush=True)
    return model.to(torch.bfloat16).eval()


# ---- measuring ------------------------------------------------------------------------------------------------------


def logits_of(model) -> run.Logits:
    import torch

    device = next(model.parameters()).device

    @torch.inference_mode()
    def logits(ids) -> np.ndarray:
        return model(torch.tensor([list(ids)], device=device)).logits[0].float().cpu().numpy()

    return logits


def train(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    heldout_text = (FAMILY / "text" / "heldout.txt").read_text()
    for plan in [p for p in PLANS if p.name in args.models]:
        plan = replace(plan, steps=2, batch=2) if args.smoke else plan
        if args.steps:
            plan = replace(plan, steps=args.steps)
        tokenizer = AutoTokenizer.from_pretrained(FAMILY / plan.name)
        start = time.monotonic()
        rows = make_rows(args, plan, args.workers)
        print({k: v.shape for k, v in rows.items()}, f"rows in {time.monotonic() - start:.0f} s", flush=True)
        start = time.monotonic()
        model = train_one(plan, rows, tokenizer, device, args.out / f"{plan.name}.log.jsonl")
        trained = time.monotonic() - start
        directory = args.out / plan.name
        model.save_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)
        cases = 2 if args.smoke else args.cases
        held = rows["held"][:: max(1, len(rows["held"]) // cases)]
        result = run.measure(logits_of(model), tokenizer.encode, held, heldout_text, cases=cases)
        facts = {
            "plan": asdict(plan),
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": plan.steps * plan.batch * ROW,
            "seconds": round(trained, 1),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "full": result,
        }
        (args.out / f"{plan.name}.json").write_text(json.dumps(facts, indent=1))
        print(plan.name, f"{trained:.0f} s", json.dumps(result), flush=True)
        del model


# ---- cards ----------------------------------------------------------------------------------------------------------


def write_cards(args: argparse.Namespace) -> None:
    """Installs the trained models into the package with card.json (checksums, results), README.md and loss curves."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, held = read_text(args.text, args.exclude)
    heldout = (FAMILY / "text" / "heldout.txt").read_text()
    for plan in [p for p in PLANS if p.name in args.models]:
        source, directory = args.out / plan.name, FAMILY / plan.name
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            (directory / file).write_bytes((source / file).read_bytes())
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        score = partial(run.measure, logits_of(model), tokenizer.encode, text=heldout)
        books = text_rows(list(held.values()), tokenizer, ROW)
        facts = json.loads((args.out / f"{plan.name}.json").read_text())
        facts["full"] = score(rows=books[:: len(books) // args.cases], cases=args.cases)
        facts["sample"] = score(rows=run.rows(tokenizer.encode, heldout, **SAMPLE_ROWS), **SAMPLE)
        names = (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
        sums = {n: hashlib.sha256((directory / n).read_bytes()).hexdigest() for n in names}
        card = {"name": plan.name, **facts, "sha256": sums}
        (directory / "card.json").write_text(json.dumps(card, indent=1) + "\n")
        plot_loss(args.out / f"{plan.name}.log.jsonl", directory / "loss.png", plan)
        (directory / "README.md").write_text(describe(card))


SAMPLE_ROWS = {"count": 8, "length": 512}
SAMPLE = {"cases": 4, "lengths": (500,)}


def plot_loss(log: Path, out: Path, plan: Plan) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(6, 3.2), dpi=110)
    tokens = [p["step"] * plan.batch * ROW / 1e6 for p in points]
    axes.plot(tokens, [p["text"] for p in points], label="text")
    axes.plot(tokens, [p["answers"] for p in points], label="answers of tasks")
    axes.set(xlabel="million tokens", ylabel="training loss, nats per token", title=f"Model {plan.name}")
    axes.set_ylim(0, 6)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)


def describe(card: dict) -> str:
    """The model card: what the model is, what it was trained on, what it reaches, what it is not for."""
    plan, full, sample = card["plan"], card["full"], card["sample"]
    lengths = sorted({int(k.split("@")[1]) for k in full["accuracy"]})
    table = [
        f"| {task} | " + " | ".join(f"{full['accuracy'][f'{task}@{n}']:.2f}" for n in lengths) + " |"
        for task in tasks.TASKS
    ]
    return f"""---
license: cc0-1.0
library_name: transformers
---
# crosskv family, model {card["name"]}

A Qwen3-type decoder of {card["parameters"] / 1e6:.1f} million parameters for showing and testing KV-cache transfer and
compression: {plan["layers"]} layers, width {plan["width"]}, {plan["heads"]} query heads, {plan["kv_heads"]} KV heads x
{plan["head_dim"]}, MLP {plan["mlp"]}, RoPE `{json.dumps(plan["rope"])}`, context {ROW:,} tokens, {VOCABULARY:,} tokens
of byte-level BPE shared by S, M and L. Weights are bf16; results are for these weights in float32.

**Data.** {card["tokens"] / 1e6:.0f} million tokens, half of them public-domain or CC0 text (novels and essays published
before 1931, Python's PEPs, Ethereum's EIPs, 18F's blog) and half generated context-use tasks over sentences of the
same books (`crosskv/evals/tasks.py`, split "train"). One book in twenty was held out whole.

**Training.** {plan["steps"]:,} steps of {plan["batch"]} x {ROW:,} tokens, seed {plan["seed"]}, Muon and Adam,
{card["seconds"]:.0f} s on one {card["device"]}, torch {card["torch"]}, `scripts/train_family.py`.

![training loss](loss.png)

**Results.** NLL on held-out books: {full["nll"]:.4f} nats per token (standard error {full["nll_se"]:.4f} over
{full["passages"]} passages of {full["passage_tokens"]:,} tokens). Exact-match accuracy,
{full["cases"]} cases each, split "test":

| task | {" | ".join(f"{n:,} tokens" for n in lengths)} |
|---|{"---|" * len(lengths)}
{chr(10).join(table)}

`tests/test_family.py` recomputes a small sample of this: NLL {sample["nll"]:.4f} on {sample["passages"]} passages.

**Licence.** The weights are dedicated to the public domain (CC0 1.0). Not meant for any use but showing caches at
work: the model writes like an old novel and knows nothing.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="do", required=True)
    for name, do in (("text", write_text), ("train", train), ("card", write_cards)):
        p = sub.add_parser(name)
        p.set_defaults(do=do)
        p.add_argument("--text", type=Path, required=True, help="folder with books, peps, eips, 18f_blog")
        p.add_argument("--exclude", type=Path, required=True, help="file with the names of books to leave out")
        if name == "text":
            continue
        p.add_argument("--out", type=Path, required=True, help="folder of the training runs")
        p.add_argument("--models", nargs="+", default=[p.name for p in PLANS])
        p.add_argument("--cases", type=int, default=50, help="per task and length, and rows of held-out books")
        if name == "train":
            p.add_argument("--workers", type=int, default=2)
            p.add_argument("--task-rows", type=int, default=60_000)
            p.add_argument("--steps", type=int, help="instead of each model's own number")
            p.add_argument("--smoke", action="store_true", help="a few steps on a few rows")
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
