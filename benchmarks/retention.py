"""What transfers keep of the target's own answers: NLL, context tasks, drift over many turns, choice sets; all arms.

    python benchmarks/retention.py                              # S -> L, M -> L, L -> S; about 40 minutes on two cores
    python benchmarks/retention.py --pairs smollm2-sibling:smollm2 --sets ../shared/data/eval --text DIR --device cuda
    python benchmarks/retention.py --table                      # the tables, from the committed rows

One case row per case and arm (`crosskv/evals/suite.py`), into results/retention.jsonl; an interrupted run goes on.
Mappers are fitted with k = all and the penalty chosen on held-out rows, and kept in --mappers. The family's text is the
shipped one; otherwise --text names a folder of text files: every fifth is held out whole, for passages and filler, the
rest is calibrated on. `--shard 2/6` takes a sixth of the choice items, so that several processes can share a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import crosskv
from crosskv import family
from crosskv.cli import open_model
from crosskv.evals import choices, drift, pages, retention, rows, suite
from crosskv.evals.answers import Answers

RESULTS = Path(__file__).parent.parent / "results" / "retention.jsonl"
PAIRS = ("family:S:family:L", "family:M:family:L", "family:L:family:S")
TASKS = ("nll", "needle", "multikey", "variables", "common", "dialogue")
SETS = ("hellaswag", "arc_easy", "piqa", "lambada")
HOLD_BACK, SINKS, PREFIX, CHARS, TURNS = 32, 1, 512, 1600, 15


def texts(folder: Path | None) -> tuple[str, str]:
    """(calibration, held out)."""
    if folder is None:
        return family.text("calibration"), family.text("heldout")
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    read = [f.read_text(encoding="utf-8", errors="replace") for f in files]
    return "\n\n".join(x for i, x in enumerate(read) if i % 5), "\n\n".join(read[::5])


def mapper_of(names: tuple[str, str], models: tuple[Any, Any], tokenizer: Any, text: str, a: Any) -> crosskv.Mapper:
    """The pair's mapper from --mappers, fitted when it is not there."""
    path = a.mappers / "-".join(n.removeprefix("family:") for n in names)
    if not (path / "mapper.json").exists():
        config = crosskv.MapperConfig(k="all", ridge_lambda="auto", n_calib_sequences=a.sequences, calib_seq_len=512,
                                      stride=1)  # fmt: skip
        fitted = crosskv.fit(*models, text, tokenizer, config)
        fitted.provenance["models"] = list(names)
        fitted.save(path)
    return crosskv.load(path)


def choice_rows(made: list[Any], tokenizer: Any, name: str, cases: suite.Cases, a: Any) -> None:
    """Items of a choice set as case rows; `Answers` is what the lm-eval adapter scores with."""
    items = choices.load(name, a.sets, a.items_of_sets)
    shard, shards = (int(x) for x in a.shard.split("/"))
    mine = [i for i in range(len(items)) if i % shards == shard - 1]
    answers = Answers(made, tokenizer)
    for at in range(0, len(mine), 16):  # neighbours: each other's wrong documents
        suite.choice_cases(answers, name, mine[at : at + 16], items, cases)


def pair_rows(pair: str, a: argparse.Namespace) -> None:
    parts = pair.split(":")
    names = (":".join(parts[: len(parts) // 2]), ":".join(parts[len(parts) // 2 :]))
    (source, tokenizer), (target, _) = (open_model(n, "torch") for n in names)
    if a.device != "cpu":
        source, target = source.to(a.device), target.to(a.device)
    calibration, heldout = texts(a.text)
    there = mapper_of(names, (source, target), tokenizer, calibration, a)
    back = mapper_of(names[::-1], (target, source), tokenizer, calibration, a) if "drift" in a.tasks else None
    setting = {"pair": "->".join(names), "host": "torch", "device": a.device, "k": "all", "sinks": SINKS}
    setting |= {"prefix": PREFIX, "chars": CHARS}
    if back is not None:
        cases = suite.Cases(a.out, setting | {"turns": TURNS})
        drift.measure(there, back, source, target, tokenizer.encode, heldout, cases, count=a.dialogues, turns=TURNS,
                      chars=CHARS, sinks=SINKS)  # fmt: skip
    made = suite.transfer(there, source, target, HOLD_BACK, SINKS, another=None)
    cases = suite.Cases(a.out, setting | {"hold_back": HOLD_BACK})
    suite.evaluate(made, tokenizer, [t for t in a.tasks if t in TASKS], cases, text=heldout, count=a.items,
                   prefix=PREFIX, chars=CHARS)  # fmt: skip
    if a.sets is not None:
        for name in (t for t in a.tasks if t in SETS):
            choice_rows(made, tokenizer, name, cases, a)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pairs", nargs="+", default=PAIRS)
    p.add_argument("--tasks", nargs="+", default=[*TASKS, "drift", *SETS])
    p.add_argument("--items", type=int, default=32, help="cases of nll and of each generated task")
    p.add_argument("--dialogues", type=int, default=20)
    p.add_argument("--sets", type=Path, help="folder of the choice sets")
    p.add_argument("--items-of-sets", type=int, default=500)
    p.add_argument("--shard", default="1/1")
    p.add_argument("--text", type=Path)
    p.add_argument("--sequences", type=int, default=256, help="of 512 tokens, for the fit")
    p.add_argument("--mappers", type=Path, default=Path("out/mappers"))
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--table", action="store_true")
    a = p.parse_args()
    if a.table:
        print(pages.markdown(retention.summary(rows.read(a.out))))
        return
    for pair in a.pairs:
        pair_rows(pair, a)


if __name__ == "__main__":
    main()
