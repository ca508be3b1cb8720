"""Multiple-choice and last-word sets in lm-eval's prompt formats, scored by log-likelihood.

`load` reads a set from plain files, `requests` turns items into token lists, a `Logprobs` function scores them (one
for transformers models is `model_logprobs`; another host or a mapped cache is another function), and `judge` says
which items are right. Lengths for `acc_norm` are UTF-8 bytes of the ending without its leading space. An item with a
single ending (LAMBADA) is right if greedy decoding would write that ending.
"""

from __future__ import annotations

import csv
import errno
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from crosskv.errors import BadInput

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Choice:
    """One item: which of `endings` follows `context`? `answer` is the right one's index.

    WinoGrande asks it the other way round: there `context` has one text per ending, and the endings are equal.
    """

    context: str | tuple[str, ...]
    endings: tuple[str, ...]
    answer: int

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(context, ending) for each ending."""
        contexts = (self.context,) * len(self.endings) if isinstance(self.context, str) else self.context
        return list(zip(contexts, self.endings, strict=True))


@dataclass(frozen=True)
class Problem:
    """One item that is answered in free text: a prompt, and a worked answer that ends with `#### number`."""

    prompt: str
    answer: str


Item = TypeVar("Item")


@dataclass(frozen=True)
class Request:
    """Token ids of a context and its ending; the ending is the last `n` of them."""

    tokens: tuple[int, ...]
    n: int


@dataclass(frozen=True)
class Likelihood:
    """Of a request's ending: the sum of log-probabilities in nats, and whether every token is the most likely one."""

    logprob: float
    greedy: bool


Logprobs = Callable[[Sequence[Request]], list[Likelihood]]


@dataclass(frozen=True)
class Scores:
    """Per item, whether it is right: by log-likelihood, and by log-likelihood per byte of the ending."""

    right: tuple[bool, ...]
    right_norm: tuple[bool, ...]

    @property
    def acc(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def acc_norm(self) -> float:
        return sum(self.right_norm) / len(self.right_norm)

    @property
    def acc_se(self) -> float:
        """Standard error of `acc` over items."""
        return standard_error(self.acc, len(self.right))

    @property
    def acc_norm_se(self) -> float:
        """Standard error of `acc_norm` over items."""
        return standard_error(self.acc_norm, len(self.right_norm))

    def row(self) -> dict[str, float | int]:
        """The four numbers and the item count, to be written into a result."""
        return {
            "n": len(self.right),
            "acc": round(self.acc, 4),
            "acc_se": round(self.acc_se, 4),
            "acc_norm": round(self.acc_norm, 4),
            "acc_norm_se": round(self.acc_norm_se, 4),
        }


def standard_error(rate: float, n: int) -> float:
    """Of the mean of n zeros and ones: sqrt(p (1 - p) / (n - 1)), as lm-eval has it; nan for n = 1."""
    return math.sqrt(rate * (1 - rate) / (n - 1)) if n > 1 else math.nan


# ---- the sets -------------------------------------------------------------------------------------------------------


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]


def read_hellaswag(file: Path) -> list[Choice]:
    """Six lines an item: `activity: context`, label, four endings."""
    lines = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    if len(lines) % 6:
        raise BadInput(f"{file} has {len(lines)} lines; expected six for each item")
    return [
        Choice(clean_hellaswag(capitalise_last(context)), tuple(" " + clean_hellaswag(e) for e in endings), int(label))
        for context, label, *endings in (lines[i : i + 6] for i in range(0, len(lines), 6))
    ]


def clean_hellaswag(text: str) -> str:
    """lm-eval's `preprocess`: WikiHow's bracketed marks out, double spaces once replaced."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub("\\[.*?\\]", "", text).replace("  ", " ")


def capitalise_last(context: str) -> str:
    """The context with its unfinished last sentence capitalised, as lm-eval does with the field ctx_b.

    The file joins ctx_a and ctx_b. ctx_b is what follows the last full stop, where that starts in lower case.
    """
    start = max(context.rfind(mark) + len(mark) if mark in context else 0 for mark in (". ", "! ", "? "))
    last = context[start:]
    return context[:start] + last.capitalize() if start and last[:1].islower() else context


def read_arc(file: Path) -> list[Choice]:
    return [
        Choice(f"Question: {r['query']}\nAnswer:", tuple(" " + c for c in r["choices"]), r["gold"])
        for r in _records(file)
    ]


def read_piqa(file: Path) -> list[Choice]:
    labels = [int(line) for line in _lines(file.with_name(file.stem + "-labels.lst"))]
    return [
        Choice(f"Question: {r['goal']}\nAnswer:", (" " + r["sol1"], " " + r["sol2"]), label)
        for r, label in zip(_records(file), labels, strict=True)
    ]


def read_lambada(file: Path) -> list[Choice]:
    """The last word, split off at the last space."""
    split = (r["text"].rsplit(" ", 1) for r in _records(file))
    return [Choice(context, (" " + word,), 0) for context, word in split]


def read_winogrande(file: Path) -> list[Choice]:
    """Partial scoring: the same ending after each of two contexts."""
    return [
        Choice(tuple(r["context_options"]), (" " + r["continuation"],) * len(r["context_options"]), r["gold"])
        for r in _records(file)
    ]


def read_openbookqa(file: Path) -> list[Choice]:
    items = []
    with file.open(encoding="utf-8", newline="") as f:
        for row in csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE):
            endings = re.split(r"\s*\([A-D]\)\s*", row["Choices"])[1:]
            items.append(Choice(row["Question Stem"], tuple(" " + e for e in endings), "ABCD".index(row["Answer Key"])))
    return items


def read_boolq(file: Path) -> list[Choice]:
    return [
        Choice(
            f"{r['title']} -- {r['passage']}\nQuestion: {r['question']}?\nAnswer:",
            (" no", " yes"),
            int(str(r["answer"]).lower() == "true"),
        )
        for r in _records(file)
    ]


def read_mmlu(folder: Path) -> list[Choice]:
    """A folder of one CSV file for each subject, asked without examples."""
    files = sorted(folder.glob("*_test.csv"))
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no *_test.csv", str(folder))
    return [item for file in files for item in _mmlu_subject(file)]


def _mmlu_subject(file: Path) -> list[Choice]:
    subject = file.stem.removesuffix("_test").replace("_", " ")
    before = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    with file.open(encoding="utf-8", newline="") as f:
        rows = list(csv.DictReader(f))
    items = []
    for row in rows:
        options = "".join(f"\n{letter}. {row[f'choice{i}']}" for i, letter in enumerate("ABCD"))
        question = f"{before}{row['question'].strip()}{options}\nAnswer:"
        items.append(Choice(question, (" A", " B", " C", " D"), int(row["answer"])))
    return items


def read_gsm8k(file: Path) -> list[Problem]:
    return [Problem(f"Question: {r['question']}\nAnswer:", r["answer"]) for r in _records(file)]


@dataclass(frozen=True)
class Source(Generic[Item]):
    """Where a set lies under the evaluation folder, how many items it has, and how it is read."""

    file: str
    items: int
    read: Callable[[Path], list[Item]]


SETS = {
    "hellaswag": Source("hellaswag/hellaswag_val_full.txt", 10_042, read_hellaswag),
    "arc_easy": Source("arc/arc-easy_test.clean.jsonl", 2_376, read_arc),
    "arc_challenge": Source("arc/arc-challenge_test.clean.jsonl", 1_172, read_arc),
    "piqa": Source("piqa/valid.jsonl", 1_838, read_piqa),
    "lambada": Source("lambada/lambada_test.jsonl", 5_153, read_lambada),
    "winogrande": Source("winogrande/winogrande_dev.mc.jsonl", 1_267, read_winogrande),
    "openbookqa": Source("openbookqa/test.tsv", 500, read_openbookqa),
    "boolq": Source("boolq/dev.jsonl", 3_270, read_boolq),
    "mmlu": Source("mmlu/test", 14_042, read_mmlu),
}
LENGTHS_DIFFER = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "openbookqa")
"""Sets for which lm-eval also reports acc_norm."""
PROBLEMS = {"gsm8k": Source("gsm8k/test.jsonl", 1_319, read_gsm8k)}


def load(name: str, root: Path, limit: int | None = None) -> list[Choice]:
    """The items of a set under the evaluation folder `root`, or `limit` of them, evenly spread.

    Evenly, because HellaSwag's first half comes from another source than its second. Raises BadInput for an unknown
    set, a missing or malformed file, and an item count other than the published one.
    """
    return _load(name, SETS, root, limit)


def load_problems(name: str, root: Path, limit: int | None = None) -> list[Problem]:
    """As `load`, the items of a set that is answered in free text."""
    return _load(name, PROBLEMS, root, limit)


def _load(name: str, sets: Mapping[str, Source[Item]], root: Path, limit: int | None) -> list[Item]:
    if name not in sets:
        raise BadInput(f"the sets are {', '.join(sets)}; got {name!r}")
    source = sets[name]
    file = Path(root) / source.file
    try:
        items = source.read(file)
    except FileNotFoundError as e:
        raise BadInput(f"{name}: {e.filename} is missing; give the folder that holds {source.file}") from None
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise BadInput(f"{name}: {file} is not in the expected format ({e})") from e
    if len(items) != source.items:
        raise BadInput(f"{name}: {file} has {len(items)} items, expected {source.items}; fetch it again")
    return [items[i] for i in spread(len(items), limit)]


def spread(n: int, limit: int | None) -> list[int]:
    """Which of n items are taken: `limit` of them, evenly spread, or all."""
    if limit is None or limit >= n:
        return list(range(n))
    if limit < 1:
        raise BadInput(f"limit must be at least 1, got {limit}")
    return [i * n // limit for i in range(limit)]


# ---- scoring --------------------------------------------------------------------------------------------------------


def encoder(tokenizer: Any) -> Encode:
    """Text to ids with a Hugging Face tokenizer: its beginning-of-text token first if it adds one, nothing after."""
    own = tokenizer("")["input_ids"]
    start = own[:1] if own[:1] == [tokenizer.bos_token_id] else []
    return lambda text: start + tokenizer(text, add_special_tokens=False)["input_ids"]


def requests(items: Iterable[Choice], encode: Encode) -> list[Request]:
    """One request for each ending of each item, in order.

    Context and ending are encoded together and cut where the context's own tokens end, as lm-eval does; spaces at
    the context's end count to the ending. Raises BadInput where context or ending has no token of its own.
    """
    return [_request(*pair, encode) for item in items for pair in item.pairs]


def _request(context: str, ending: str, encode: Encode) -> Request:
    stripped = context.rstrip()
    ending = context[len(stripped) :] + ending
    start, whole = len(encode(stripped)), encode(stripped + ending)
    if not 0 < start < len(whole):
        raise BadInput(f"context {context[-40:]!r} and ending {ending[:40]!r} need a token each; got {start}, {whole}")
    return Request(tuple(whole), len(whole) - start)


def judge(items: Sequence[Choice], likelihoods: Sequence[Likelihood]) -> Scores:
    """Scores from the likelihoods of `requests(items, ...)`, in its order. Ties go to the first ending."""
    expected = sum(len(item.endings) for item in items)
    if not items or len(likelihoods) != expected:
        raise BadInput(f"expected {expected} likelihoods for {len(items)} items (at least 1); got {len(likelihoods)}")
    given = iter(likelihoods)
    right, right_norm = [], []
    for item in items:
        got = [next(given) for _ in item.endings]
        if len(got) == 1:
            right.append(got[0].greedy)
            right_norm.append(got[0].greedy)
            continue
        plain = [g.logprob for g in got]
        norm = [g.logprob / len(e.strip().encode()) for g, e in zip(got, item.endings, strict=True)]
        right.append(plain.index(max(plain)) == item.answer)
        right_norm.append(norm.index(max(norm)) == item.answer)
    return Scores(tuple(right), tuple(right_norm))


def score(items: Sequence[Choice], encode: Encode, logprobs: Logprobs) -> Scores:
    """Whether each item is right."""
    return judge(items, logprobs(requests(items, encode)))


def batches(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in groups of similar size, largest first: in a group, count x largest size <= budget (or count is 1)."""
    groups: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if groups and (len(groups[-1]) + 1) * sizes[groups[-1][0]] <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def model_logprobs(model: Any, batch_tokens: int = 4096) -> Logprobs:
    """Scores requests with a transformers causal LM, on its own device and in its own dtype; log-softmax in float32.

    A batch holds requests of similar length, padded on the right to at most `batch_tokens` tokens in all: a causal
    model's earlier positions do not see the padding, so no mask is needed. Logits of one batch take
    batch_tokens * vocabulary numbers. Raises BadInput for a request longer than the model's context: nothing is cut.
    """
    weight = next(model.parameters())
    xp = importlib.import_module(type(weight.data).__module__)  # the framework is the model's, never named here
    longest = getattr(model.config, "max_position_embeddings", None)

    def one(batch: Sequence[Request]) -> list[Likelihood]:
        width = max(len(r.tokens) for r in batch)
        ids = xp.tensor([list(r.tokens) + [0] * (width - len(r.tokens)) for r in batch], device=weight.device)
        rows = [i for i, r in enumerate(batch) for _ in range(r.n)]
        at = [len(r.tokens) - r.n + k for r in batch for k in range(r.n)]
        row, column = xp.tensor(rows, device=weight.device), xp.tensor(at, device=weight.device)
        logits = model(input_ids=ids, use_cache=False).logits[row, column - 1].float()
        want = ids[row, column]
        logp = logits.gather(-1, want[:, None])[:, 0] - logits.logsumexp(-1)
        sums = xp.zeros(len(batch), device=weight.device).index_add(0, row, logp).tolist()
        misses = xp.zeros(len(batch), device=weight.device).index_add(0, row, (logits.argmax(-1) != want).float())
        if not all(map(math.isfinite, sums)):
            raise BadInput("the model's logits are not finite; load it in float32 or bfloat16")
        return [Likelihood(s, m == 0) for s, m in zip(sums, misses.tolist(), strict=True)]

    def logprobs(asked: Sequence[Request]) -> list[Likelihood]:
        for r in asked:
            if longest is not None and len(r.tokens) > longest:
                raise BadInput(f"a request has {len(r.tokens)} tokens, the model reads {longest}; leave that item out")
        out: dict[int, Likelihood] = {}
        with xp.inference_mode():
            for group in batches([len(r.tokens) for r in asked], batch_tokens):
                out.update(zip(group, one([asked[i] for i in group]), strict=True))
        return [out[i] for i in range(len(asked))]

    return logprobs
