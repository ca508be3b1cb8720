"""Makes SmolLM2's sibling: the parent cut to fewer layers and healed by distillation, as a LoRA adapter for PEFT.

    python scripts/make_sibling.py --gguf FILE --text DIR --exclude FILE --eval DIR --out OUT            # one H200
    python scripts/make_sibling.py --smoke --gguf FILE --text DIR --exclude FILE --eval DIR --out OUT    # CPU

Steps: (1) read the parent; (2) tokenise books and documentation, whole documents held out; (3) let the parent write
conversations and free text; (4) choose the layers to drop: greedily by KL on text and on generated rows, against the
best contiguous block and an even spread, each healed for a few seconds, and likewise the learning rate and whether
to match hidden states; (5) train: KL to the parent on full logits; (6) save the adapter; (7) measure parent and
sibling on held-out rows and on four public sets. OUT receives adapter_config.json, adapter_model.safetensors,
sibling.json, log.jsonl and loss.png; the first three go to crosskv/family/smollm2_sibling/.

The student's weights are W + scale * B @ A, formed anew in every step and not kept as a side path: the matrices are
small, so one addition to W is cheaper than two thin products for every token, and merging later is the same formula.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

START = time.monotonic()
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
FOLDERS = {"books": "*.md", "peps": "*.rst", "eips": "**/*.md", "18f_blog": "*.md", "openstax": "**/*.txt"}
FOLDERS |= {"rust_book": "**/*.md", "rust_rfcs": "**/*.md", "python_docs": "**/*"}
RECENT = ("Franz_Kafka",)  # translations younger than the originals, left out of everything that ships
END_OF_TEXT, TURN, END_OF_TURN = 0, 1, 2  # <|endoftext|>, <|im_start|>, <|im_end|>
SCALE = 2.0  # lora_alpha / rank
LIMIT = 15_800_000  # bytes of adapter weights


@dataclass(frozen=True)
class Plan:
    """Sizes and budgets. Lengths and rows in tokens and rows, times in seconds."""

    keep: int = 20
    length: int = 1024
    batch: int = 32
    train: float = 255.0
    probe: float = 6.0
    generate: float = 35.0
    streams: int = 4096  # sequences that the parent writes side by side
    written: int = 512  # their length; two make a row
    held: int = 128  # rows of each kind for the held-out NLL
    search: int = 16  # sequences for the layer search
    search_length: int = 512
    lr: float = 2e-3
    hard: float = 0.1  # share of the true next token in the target, on real text only
    documents: int | None = None
    workers: int = 14
    eval_limit: int | None = None


SMOKE = Plan(
    keep=24, length=64, batch=2, train=10, probe=2, generate=4, streams=8, written=64, held=2, search=2,
    search_length=16, documents=12, workers=1, eval_limit=2,
)  # fmt: skip


def say(*what: object) -> None:
    print(f"[{time.monotonic() - START:6.1f} s]", *what, flush=True)


# ---- text -----------------------------------------------------------------------------------------------------------


def documents(root: Path, exclude: Path, most: int | None) -> tuple[dict[str, str], dict[str, str]]:
    """({name: text} to train on, {name: text} held out whole: one document in twenty by its name's hash)."""
    late = set(exclude.read_text().split("\n"))
    train: dict[str, str] = {}
    held: dict[str, str] = {}
    for folder, pattern in FOLDERS.items():
        files = sorted(f for f in (root / folder).glob(pattern) if f.suffix in (".md", ".rst", ".txt"))
        if folder == "books":
            files = [f for f in files if f.name not in late and not f.name.startswith(RECENT)]
        for f in files:
            out = hashlib.sha256(f.name.encode()).digest()[0] % 20 == 0
            if most is not None and sum(k.startswith(folder) for k in (held if out else train)) >= most:
                continue
            text = f.read_text(encoding="utf-8", errors="replace").strip()
            if len(text) >= 1000:
                (held if out else train)[str(f.relative_to(root))] = text
    if not train or not held:
        raise SystemExit(f"--text {root}: no documents found; expected folders {', '.join(FOLDERS)}")
    return train, held


def encode_documents(tokenizer_file: str, texts: Sequence[str]) -> np.ndarray:
    """Ids of texts, each with <|endoftext|> before it. Runs in a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    parts = []
    for text in texts:
        pieces = [p.ids for p in tokenizer.encode_batch(split(text, 20_000), add_special_tokens=False)]
        parts += [np.array([END_OF_TEXT], np.uint16), *(np.array(ids, np.uint16) for ids in pieces)]
    return np.concatenate(parts)


def split(text: str, size: int) -> list[str]:
    """The text in pieces of about `size` characters, cut before a line's end, where tokens do not join."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end
        pieces.append(text[start:end])
        start = end
    return pieces


def cut_rows(ids: np.ndarray, length: int) -> np.ndarray:
    return ids[: len(ids) // length * length].reshape(-1, length).astype(np.int32)


# ---- the model as plain functions -----------------------------------------------------------------------------------


@dataclass
class Parent:
    """Weights as plain tensors: `layers[i]` by short name in the training dtype; `exact` the same in float32."""

    layers: list[dict[str, Any]]
    exact: list[dict[str, Any]]
    embed: Any  # [V, C], tied with the output
    norm: Any
    eps: float
    theta: float
    kv_heads: int
    head_dim: int


def parent_tensors(model: Any, device: str, dtype: Any) -> Parent:
    """The tensors of a transformers Llama-type model with tied embeddings."""
    import torch

    exact: list[dict[str, Any]] = []
    for layer in model.model.layers:
        named = dict(layer.named_parameters())
        exact.append(
            {k.split(".")[-2]: v.detach().to(device, torch.float32).contiguous() for k, v in named.items()}
        )  # "self_attn.q_proj.weight" -> "q_proj"
    c = model.config
    return Parent(
        layers=[{k: v.to(dtype) for k, v in w.items()} for w in exact],
        exact=exact,
        embed=model.model.embed_tokens.weight.detach().to(device, dtype),
        norm=model.model.norm.weight.detach().to(device, torch.float32),
        eps=c.rms_norm_eps,
        theta=c.rope_parameters["rope_theta"],
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
    )


def rms(x: Any, weight: Any, eps: float) -> Any:
    y = x.float()
    return (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """RoPE, half-split pairing; cos and sin [T, D] in float32."""
    import torch

    a, b = x.float().chunk(2, -1)
    return (torch.cat((a, b), -1) * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def rope_tables(parent: Parent, length: int) -> tuple[Any, Any]:
    import torch

    half = torch.arange(0, parent.head_dim, 2, device=parent.embed.device, dtype=torch.float32) / parent.head_dim
    angles = torch.arange(length, device=parent.embed.device, dtype=torch.float32)[:, None] * parent.theta**-half
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def layer(x: Any, w: dict[str, Any], cos: Any, sin: Any, kv_heads: int, head_dim: int, eps: float) -> Any:
    """One decoder layer on [B, T, C] with causal attention."""
    from torch.nn import functional as F  # noqa: N812

    B, T, _ = x.shape
    h = rms(x, w["input_layernorm"], eps)
    q = F.linear(h, w["q_proj"]).view(B, T, -1, head_dim).transpose(1, 2)
    k = F.linear(h, w["k_proj"]).view(B, T, kv_heads, head_dim).transpose(1, 2)
    v = F.linear(h, w["v_proj"]).view(B, T, kv_heads, head_dim).transpose(1, 2)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(a.transpose(1, 2).reshape(B, T, -1), w["o_proj"])
    h = rms(x, w["post_attention_layernorm"], eps)
    return x + F.linear(F.silu(F.linear(h, w["gate_proj"])) * F.linear(h, w["up_proj"]), w["down_proj"])


def healed(exact: dict[str, Any], lora: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """The student's weights of one layer: W + SCALE * B @ A, and its own norms."""
    w = {k: (exact[k] + SCALE * (lora[k + ".B"] @ lora[k + ".A"])).to(dtype) for k in LINEAR}
    return w | {k: lora[k] for k in NORMS}


def student_layer(x: Any, exact: dict[str, Any], lora: dict[str, Any], cos: Any, sin: Any, **shape: Any) -> Any:
    return layer(x, healed(exact, lora, x.dtype), cos, sin, **shape)


def mismatch(student: Any, parent: Any) -> Any:
    """Squared distance of hidden states relative to the parent's own size, mean over tokens."""
    d, p = (student.float() - parent.float()).square().mean(-1), parent.float().square().mean(-1)
    return (d / (p + 1e-6)).mean()


def kl_chunk(hs: Any, ht: Any, embed: Any, labels: Any, hard: Any) -> tuple[Any, Any, Any]:
    """(sum of KL(target | student) + entropy terms' excess, sum of KL(parent | student), gradient to `hs`).

    The target is (1 - hard) * parent + hard * one-hot label, `hard` given per token.
    """
    import torch

    zs, zt = torch.mm(hs, embed.mT).float(), torch.mm(ht, embed.mT).float()
    ls, lt = zs.log_softmax(-1), zt.log_softmax(-1)
    pt = lt.exp()
    kl = (pt * (lt - ls)).sum(-1)
    nll = -ls.gather(-1, labels[:, None])[:, 0]
    loss = (1 - hard) * kl + hard * nll
    hot = torch.arange(zs.shape[-1], device=zs.device) == labels[:, None]
    grad = ls.exp() - (1 - hard)[:, None] * pt - torch.where(hot, hard[:, None], 0.0)
    return loss.sum(), kl.sum(), torch.mm(grad.to(hs.dtype), embed)


# ---- training machinery ---------------------------------------------------------------------------------------------


class Machine:
    """Parent and student on one device: their forward passes and one training step, compiled where that works."""

    def __init__(self, parent: Parent, plan: Plan, rank: int) -> None:
        import torch

        self.parent, self.plan, self.rank = parent, plan, rank
        self.device = parent.embed.device
        self.shape: dict[str, Any] = {"kv_heads": parent.kv_heads, "head_dim": parent.head_dim, "eps": parent.eps}
        self.cos, self.sin = rope_tables(parent, max(plan.length, plan.written))
        self.kept = list(range(plan.keep))
        self.layer, self.student_layer, self.kl, self.mismatch = layer, student_layer, kl_chunk, mismatch
        self.compiled = False
        f32 = {"device": self.device, "dtype": torch.float32}
        shapes = {k: parent.exact[0][k].shape for k in LINEAR}
        self.lora: list[dict[str, Any]] = [
            {f"{k}.A": torch.zeros(rank, shapes[k][1], **f32) for k in LINEAR}
            | {f"{k}.B": torch.zeros(shapes[k][0], rank, **f32) for k in LINEAR}
            | {k: torch.zeros_like(parent.exact[0][k]) for k in NORMS}
            for _ in range(plan.keep)
        ]
        self.norm = torch.zeros_like(parent.norm)
        for p in self.parameters():
            p.requires_grad_(True)
        self.reset(self.kept)

    def parameters(self) -> list[Any]:
        return [p for one in self.lora for p in one.values()] + [self.norm]

    def reset(self, kept: Sequence[int]) -> None:
        """A fresh student made of the parent's layers `kept`: B zero, norms the parent's. In place: no recompiling."""
        import torch

        self.kept = list(kept)
        seeded = torch.Generator("cpu").manual_seed(0)
        with torch.no_grad():
            for i, one in zip(self.kept, self.lora, strict=True):
                for k, p in one.items():
                    if k.endswith(".A"):
                        bound = 1 / math.sqrt(p.shape[1])
                        p.copy_(torch.empty(p.shape).uniform_(-bound, bound, generator=seeded))
                    elif k.endswith(".B"):
                        p.zero_()
                    else:
                        p.copy_(self.parent.exact[i][k])
            self.norm.copy_(self.parent.norm)

    def compile(self) -> None:
        """Compiles layers and losses and tries one step; stays with eager functions, and says so, if that fails."""
        import torch

        eager = (self.layer, self.student_layer, self.kl, self.mismatch)
        c = partial(torch.compile, dynamic=False)
        self.layer, self.student_layer, self.kl, self.mismatch = (c(f) for f in eager)
        ids = torch.randint(100, 1000, (self.plan.batch, self.plan.length), device=self.device)
        try:
            self.loss(ids, torch.zeros(self.plan.batch, device=self.device), 1.0)[0].backward()
            self.measure(ids)
            self.compiled = True
        except Exception as e:  # any compiler failure at all: a slower run is better than none
            say("torch.compile failed, going on without it:", repr(e)[:500])
            self.layer, self.student_layer, self.kl, self.mismatch = eager
        for p in self.parameters():
            p.grad = None

    def parent_states(self, ids: Any) -> list[Any]:
        """Inputs of every layer and the last one's output."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        states = [self.parent.embed[ids]]
        for w in self.parent.layers:
            states.append(self.layer(states[-1], w, cos, sin, **self.shape))
        return states

    def student_states(self, ids: Any) -> list[Any]:
        """Output of every layer."""
        import torch

        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        # As in every later layer, so that one compiled graph serves all of them.
        x = self.parent.embed[ids].requires_grad_(torch.is_grad_enabled())
        states = []
        for i, one in zip(self.kept, self.lora, strict=True):
            exact = {k: self.parent.exact[i][k] for k in LINEAR}
            x = self.student_layer(x, exact, one, cos, sin, **self.shape)
            states.append(x)
        return states

    def loss(self, ids: Any, hard: Any, match: float) -> tuple[Any, Any]:
        """(loss to train on, KL to the parent in nats a token). `hard` [B]; `match` weighs the hidden states."""
        import torch

        with torch.no_grad():
            theirs = self.parent_states(ids)
            goal = rms(theirs[-1], self.parent.norm, self.parent.eps)
        ours = self.student_states(ids)
        out = rms(ours[-1], self.norm, self.parent.eps)
        flat = partial(torch.flatten, start_dim=0, end_dim=1)
        every = hard[:, None].expand(-1, ids.shape[1] - 1).flatten()
        loss, kl = Distance.apply(
            flat(out[:, :-1]), flat(goal[:, :-1]), self.parent.embed, ids[:, 1:].flatten(), every, self.kl
        )
        if match:  # a kept layer answers for the dropped ones after it: it aims at the next kept layer's input
            aims = [*self.kept[1:], len(theirs) - 1]
            loss = loss + match * sum(self.mismatch(o, theirs[a]) for o, a in zip(ours, aims, strict=True)) / len(aims)
        return loss, kl

    def measure(self, rows: Any) -> dict[str, tuple[float, float]]:
        """Means and standard errors over rows, in nats a token: NLL of parent and student, and KL between them."""
        import torch
        from torch.nn import functional as F  # noqa: N812

        got: dict[str, list[float]] = {"parent": [], "sibling": [], "kl": []}
        embed = self.parent.embed.float()
        for ids in full_batches(rows, self.plan.batch):
            with torch.no_grad():
                ht = rms(self.parent_states(ids)[-1], self.parent.norm, self.parent.eps)
                hs = rms(self.student_states(ids)[-1], self.norm, self.parent.eps)
                for row in range(len(ids)):
                    lt = F.log_softmax(ht[row, :-1].float() @ embed.mT, -1)
                    ls = F.log_softmax(hs[row, :-1].float() @ embed.mT, -1)
                    got["parent"].append(F.nll_loss(lt, ids[row, 1:]).item())
                    got["sibling"].append(F.nll_loss(ls, ids[row, 1:]).item())
                    got["kl"].append((lt.exp() * (lt - ls)).sum(-1).mean().item())
        n = min(len(rows), len(got["kl"]))
        return {k: (float(np.mean(v[:n])), float(np.std(v[:n]) / math.sqrt(max(n - 1, 1)))) for k, v in got.items()}


def full_batches(rows: Any, batch: int) -> Iterator[Any]:
    """Rows in batches of one size (compiled code knows no other); the last is filled up with the first rows."""
    import torch

    for i in range(0, len(rows), batch):
        part = rows[i : i + batch].long()
        while len(part) < batch:
            part = torch.cat((part, rows[: batch - len(part)].long()))
        yield part


def _distance() -> Any:
    """Defined in a function because torch is imported late: worker processes that tokenise need none."""
    import torch

    class Distance(torch.autograd.Function):
        """Mean loss and mean KL over tokens; logits exist for one chunk of tokens at a time, gradients are kept."""

        @staticmethod
        def forward(ctx: Any, hs: Any, ht: Any, embed: Any, labels: Any, hard: Any, chunk: Callable) -> Any:
            loss, kl, grads, n = 0.0, 0.0, [], len(hs)
            pieces = max(1, -(-n // 8192))
            while n % pieces:  # equal pieces: one compiled shape
                pieces += 1
            for part in zip(*(x.chunk(pieces) for x in (hs, ht, labels, hard)), strict=True):
                one, two, grad = chunk(part[0], part[1], embed, part[2], part[3])
                loss, kl = loss + one, kl + two
                grads.append(grad)
            ctx.save_for_backward(torch.cat(grads).div_(n))
            ctx.mark_non_differentiable(kl)
            return loss / n, kl / n

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return ctx.saved_tensors[0] * grads[0], None, None, None, None, None

    return Distance


Distance: Any = None


def train(machine: Machine, data: Feed, seconds: float, lr: float, match: float, log: Path | None = None) -> int:
    """Trains for `seconds` of wall time: warm-up over 3 %, then linear to 0. Returns the number of steps.

    The match of hidden states fades out over the first half. A loss that is not finite goes back to the last good
    copy and halves the learning rate.
    """
    import torch

    cuda = machine.device.type == "cuda"
    norms = [p for p in machine.parameters() if p.ndim == 1]
    groups = [{"params": [p for p in machine.parameters() if p.ndim == 2], "share": 1.0}]
    groups += [{"params": norms, "share": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.97), weight_decay=0.0, fused=cuda)
    good = [p.detach().clone() for p in machine.parameters()]
    start, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        rate = lr * min(done / 0.03, 1.0, (1 - done) / 0.97) if step else lr * 0.01
        for g in optimizer.param_groups:
            g["lr"] = rate * g["share"]
        ids, hard = data.batch(step)
        loss, kl = machine.loss(ids, hard, match * max(0.0, 1 - 2 * done))
        loss.backward()
        size = torch.nn.utils.clip_grad_norm_(machine.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0:
            row = {"step": step, "seconds": time.monotonic() - start, "lr": rate}
            row |= {"loss": loss.item(), "kl": kl.item(), "grad": size.item()}
            if log:
                with log.open("a") as f:
                    f.write(json.dumps({k: round(v, 6) for k, v in row.items()}) + "\n")
            if log and step % 250 == 0:
                say(row)
            if math.isfinite(row["loss"] + row["grad"]):
                good = [p.detach().clone() for p in machine.parameters()]
            else:
                lr /= 2
                say(f"loss {row['loss']} is not finite: back to the last good weights, learning rate {lr}")
                with torch.no_grad():
                    for p, q in zip(machine.parameters(), good, strict=True):
                        p.copy_(q)
                optimizer.state.clear()
        step += 1
        done = (time.monotonic() - start) / seconds
    if cuda:
        torch.cuda.synchronize()
    return step


class Feed:
    """Training rows on the device: half of a batch real text, half written by the parent, each in its own order."""

    def __init__(self, text: Any, written: Any, plan: Plan) -> None:
        import torch

        self.text, self.written, self.plan = text, written, plan
        g = torch.Generator().manual_seed(1)
        self.order = [torch.randperm(len(rows), generator=g).to(rows.device) for rows in (text, written)]
        half = plan.batch // 2
        self.hard = torch.tensor([plan.hard] * half + [0.0] * (plan.batch - half), device=text.device)

    def batch(self, step: int) -> tuple[Any, Any]:
        """(ids [B, T], share of the hard label [B]) of a step."""
        import torch

        half = self.plan.batch // 2
        parts = []
        for rows, order, n in zip((self.text, self.written), self.order, (half, self.plan.batch - half), strict=True):
            at = (torch.arange(n, device=rows.device) + step * n) % len(rows)
            parts.append(rows[order[at]])
        return torch.cat(parts).long(), self.hard


# ---- the parent writes ----------------------------------------------------------------------------------------------


def write(parent: Parent, tokenizer: Any, plan: Plan, seed: int) -> Any:
    """[streams, written] ids sampled from the parent: even rows conversations, odd rows free text, no padding.

    A conversation starts as the chat template does; whenever the parent ends a turn, the next role's header is forced
    on it, so that it writes both sides. All rows have one length, so attention needs no mask.
    """
    import torch
    from torch.nn import functional as F  # noqa: N812

    device, dtype = parent.embed.device, parent.embed.dtype
    B, H, D = plan.streams, parent.kv_heads, parent.head_dim
    cos, sin = rope_tables(parent, plan.written)
    cache = [torch.empty(2, B, H, plan.written, D, device=device, dtype=dtype) for _ in parent.layers]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    chat = tokenizer(chat[: chat.rindex("<|im_end|>")])["input_ids"]
    headers = [tokenizer(f"\n<|im_start|>{role}\n")["input_ids"] for role in ("user", "assistant")]
    width = max(len(chat), *map(len, headers)) + 1

    def padded(rows: list[list[int]]) -> Any:
        return torch.tensor([r + [-1] * (width - len(r)) for r in rows], device=device)

    chats = torch.arange(B, device=device) % 2 == 0
    forced = torch.where(chats[:, None], padded([chat]), padded([[END_OF_TEXT]]))
    header = padded(headers)
    at = torch.zeros(B, dtype=torch.long, device=device)
    assistant = torch.zeros(B, dtype=torch.long, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    out = torch.empty(B, plan.written, dtype=torch.int32, device=device)
    logits = torch.zeros(B, parent.embed.shape[0], device=device)
    for t in range(plan.written):
        p = logits.softmax(-1)
        p = torch.where(p < 0.02 * p.amax(-1, keepdim=True), 0.0, p)  # min-p: a small model's tail is noise
        noise = torch.empty_like(p).exponential_(generator=generator)
        sampled = (p / noise).argmax(-1)
        must = forced.gather(1, at[:, None])[:, 0]
        token = torch.where(must >= 0, must, sampled)
        at = torch.where(must >= 0, at + 1, at)
        ended = (must < 0) & (token == END_OF_TURN) & chats
        assistant = torch.where(ended, 1 - assistant, assistant)
        forced = torch.where(ended[:, None], header[assistant], forced)
        at = torch.where(ended, 0, at)
        out[:, t] = token
        x = parent.embed[token]
        for w, kv in zip(parent.layers, cache, strict=True):
            h = rms(x, w["input_layernorm"], parent.eps)
            q = rotate(F.linear(h, w["q_proj"]).view(B, H, -1, D), cos[t], sin[t])  # [B, H, queries of a head, D]
            kv[0, :, :, t] = rotate(F.linear(h, w["k_proj"]).view(B, H, D), cos[t], sin[t])
            kv[1, :, :, t] = F.linear(h, w["v_proj"]).view(B, H, D)
            a = F.scaled_dot_product_attention(q, kv[0, :, :, : t + 1], kv[1, :, :, : t + 1])
            x = x + F.linear(a.reshape(B, -1), w["o_proj"])
            h = rms(x, w["post_attention_layernorm"], parent.eps)
            x = x + F.linear(F.silu(F.linear(h, w["gate_proj"])) * F.linear(h, w["up_proj"]), w["down_proj"])
        logits = F.linear(rms(x, parent.norm, parent.eps), parent.embed).float()
    return out


def write_rows(parent: Parent, tokenizer: Any, plan: Plan) -> Any:
    """Rows of `plan.length` ids written by the parent for about `plan.generate` seconds, at least one round."""
    import torch

    start = time.monotonic()
    rounds: list[Any] = []
    with torch.inference_mode():
        while True:
            ids = write(parent, tokenizer, plan, seed=len(rounds))
            rounds.append(ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).to(ids.device)])
            spent = time.monotonic() - start
            if len(rounds) == 1:
                for row in (*ids[:4].tolist(), *ids[-2:].tolist()):
                    print("   |", tokenizer.decode(row)[-400:].replace("\n", "\n   |   "))
            if spent + spent / len(rounds) > plan.generate:
                break
    return torch.cat(rounds).reshape(-1, plan.length).clone()


# ---- which layers ---------------------------------------------------------------------------------------------------


def search(machine: Machine, rows: Any) -> dict[str, list[int]]:
    """Candidates for the kept layers, chosen by KL to the whole parent on `rows`, without healing.

    The first and the last layer always stay. "greedy" drops the least missed layer, again and again; "block" drops
    the least missed contiguous block; "spread" drops evenly spaced layers.
    """
    import torch
    from torch.nn import functional as F  # noqa: N812

    parent, ids = machine.parent, rows.long()
    cos, sin = machine.cos[: ids.shape[1]], machine.sin[: ids.shape[1]]

    def log_probs(kept: Sequence[int]) -> Any:
        x = parent.embed[ids]
        for i in kept:
            x = layer(x, parent.layers[i], cos, sin, **machine.shape)
        return F.log_softmax(F.linear(rms(x, parent.norm, parent.eps), parent.embed).float(), -1)

    n, drop = len(parent.layers), len(parent.layers) - machine.plan.keep
    with torch.inference_mode():
        whole = log_probs(range(n))

        def cost(kept: Sequence[int]) -> float:
            return (whole.exp() * (whole - log_probs(kept))).sum(-1).mean().item()

        kept = list(range(n))
        for _ in range(drop):
            kept = min(([k for k in kept if k != i] for i in kept[1:-1]), key=cost)
        blocks = [[i for i in range(n) if not s <= i < s + drop] for s in range(1, n - drop)]
        block = min(blocks, key=cost)
        gone = {round(2 + (n - 4) * (i + 0.5) / drop) for i in range(drop)}
        found = {"greedy": kept, "block": block, "spread": [i for i in range(n) if i not in gone]}
        for name, one in found.items():
            say(f"{name}: KL {cost(one):.3f} before healing, dropped {sorted(set(range(n)) - set(one))}")
    return {k: v for k, v in found.items() if len(v) == machine.plan.keep}


def choose(machine: Machine, data: Feed, rows: Any, held: Any, plan: Plan) -> dict[str, Any]:
    """Kept layers, learning rate and weight of the hidden-state match, each the best after a short training."""
    tried: list[dict[str, Any]] = []

    def probe(name: str, kept: list[int], lr: float, match: float) -> float:
        machine.reset(kept)
        steps = train(machine, data, plan.probe, lr, match)
        got = machine.measure(held)["kl"][0]
        tried.append({"cut": name, "kept": kept, "lr": lr, "match": match, "steps": steps, "kl": round(got, 4)})
        say("probe", tried[-1])
        return got if math.isfinite(got) else math.inf

    cuts = search(machine, rows)
    costs = {name: probe(name, kept, plan.lr, 1.0) for name, kept in cuts.items()}
    name = min(costs, key=lambda k: costs[k])
    rates = {plan.lr: costs[name]}
    rates |= {lr: probe(name, cuts[name], lr, 1.0) for lr in (plan.lr / 2, plan.lr * 2)}
    lr = min(rates, key=lambda k: rates[k])
    match = 0.0 if probe(name, cuts[name], lr, 0.0) < rates[lr] else 1.0
    # A longer run wants a somewhat lower rate than a short one.
    return {"cut": name, "kept": cuts[name], "lr": 0.7 * lr, "match": match, "probes": tried}


# ---- saving and measuring -------------------------------------------------------------------------------------------


def export(machine: Machine, out: Path) -> None:
    """The adapter in PEFT's format, float16: LoRA on every linear layer; norms as modules_to_save."""
    import torch
    from safetensors.torch import save_file

    tensors = {"base_model.model.model.norm.weight": machine.norm}
    for i, one in enumerate(machine.lora):
        for k, p in one.items():
            name, _, side = k.partition(".")
            block = "" if name in NORMS else "self_attn." if name[0] in "qkvo" else "mlp."
            name = f"base_model.model.model.layers.{i}.{block}{name}.{f'lora_{side}.' if side else ''}weight"
            tensors[name] = p
    half = {k: v.detach().to(torch.float16).cpu().contiguous() for k, v in tensors.items()}
    save_file(half, out / "adapter_model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():  # what is measured from here on is what was saved
        for p in machine.parameters():
            p.copy_(p.to(torch.float16).float())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "SmolLM2-135M-Instruct, layers as listed in sibling.json",
        "r": machine.rank,
        "lora_alpha": SCALE * machine.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "target_modules": list(LINEAR),
        "modules_to_save": [*NORMS, "norm"],
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_facts(out: Path, facts: dict[str, Any]) -> None:
    files = ("adapter_config.json", "adapter_model.safetensors")
    facts["sha256"] = {f: hashlib.sha256((out / f).read_bytes()).hexdigest() for f in files}
    (out / "sibling.json").write_text(json.dumps(facts, indent=1) + "\n")


def whole_model(model: Any, machine: Machine) -> Any:
    """The merged sibling as a transformers model in float32, put together without PEFT."""
    import torch

    from crosskv.family.smollm2 import cut

    sibling = cut(model, machine.kept)
    with torch.no_grad():
        for i, one in zip(range(len(machine.kept)), machine.lora, strict=True):
            w = healed(machine.parent.exact[machine.kept[i]], one, torch.float32)
            for name, p in sibling.model.layers[i].named_parameters():
                p.copy_(w[name.split(".")[-2]])
        sibling.model.norm.weight.copy_(machine.norm)
    return sibling


def evaluate(models: dict[str, Any], tokenizer: Any, root: Path, limit: int | None, left: Callable[[], float]) -> dict:
    """Scores of each model on the four sets. With less than 40 s left, a thinned set; with none left, no more sets."""
    from crosskv.evals import choices

    results: dict[str, dict[str, Any]] = {name: {} for name in models}
    for task in ("arc_easy", "piqa", "lambada", "hellaswag"):
        if left() <= 0:
            say(f"no time left for {task}")
            continue
        items = choices.load(task, root, limit if left() > 40 else 1000)
        asked = choices.requests(items, choices.encoder(tokenizer))
        for name, model in models.items():
            budget = 32_768 if model.device.type == "cuda" else 512
            results[name][task] = choices.judge(items, choices.model_logprobs(model, budget)(asked)).row()
            say(task, name, results[name][task])
    return results


def plot(log: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    fig, ax = plt.subplots(figsize=(6, 3.5))
    ax.plot([r["step"] for r in rows], [r["kl"] for r in rows], linewidth=0.8)
    ax.set(xlabel="step", ylabel="KL to the parent (nats a token)", yscale="log", title="Healing the sibling")
    fig.tight_layout()
    fig.savefig(out / "loss.png", dpi=110)


# ---- all of it ------------------------------------------------------------------------------------------------------


def read_parent(source: Path) -> tuple[Any, Any]:
    """(float32 model, tokenizer) of a GGUF file or a Hugging Face directory, weights rounded as `smollm2()` does."""
    import torch

    from crosskv.family.smollm2 import load_gguf, load_gguf_tokenizer

    if source.is_dir():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(source)
    return load_gguf(source).half().float(), load_gguf_tokenizer(source)


def tokenise(pool: ProcessPoolExecutor, tokenizer: Any, folder: Path, texts: list[str], seed: int) -> list[Any]:
    """Futures of id arrays, documents shuffled and dealt to tasks of about a megabyte."""
    file = folder / "tokenizer.json"
    if not file.exists():
        tokenizer.backend_tokenizer.save(str(file))
    texts = texts.copy()
    random.Random(seed).shuffle(texts)
    futures, bag, size = [], [], 0
    for text in texts:
        bag.append(text)
        size += len(text)
        if size > 1_000_000 or text is texts[-1]:
            futures.append(pool.submit(encode_documents, str(file), bag))
            bag, size = [], 0
    return futures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the GGUF file, or a directory made by smollm2()")
    parser.add_argument("--text", type=Path, required=True, help=f"folder with {', '.join(FOLDERS)}")
    parser.add_argument("--exclude", type=Path, required=True, help="file with the names of books to leave out")
    parser.add_argument("--eval", type=Path, required=True, help="folder with hellaswag, arc, piqa, lambada")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, help="of training, probes not counted (default 4.25)")
    parser.add_argument("--total-minutes", type=float, default=8.5, help="after which the evaluation is cut short")
    parser.add_argument("--keep", type=int, help="layers of the parent's 30 that stay (default 20)")
    parser.add_argument("--kept", type=int, nargs="+", help="their ids, instead of a search and probes")
    parser.add_argument("--lr", type=float, help="with --kept: the learning rate")
    parser.add_argument("--smoke", action="store_true", help="every step, tiny, on the CPU")
    args = parser.parse_args()
    plan = SMOKE if args.smoke else Plan()
    plan = replace(plan, keep=len(args.kept) if args.kept else args.keep or plan.keep)
    if args.minutes:
        plan = replace(plan, train=args.minutes * 60)
    if args.lr:
        plan = replace(plan, lr=args.lr)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "log.jsonl").unlink(missing_ok=True)
    make(args, plan)


def make(args: argparse.Namespace, plan: Plan) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    global Distance
    Distance = _distance()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # bf16 products are 50 times slower than float32 ones on most CPUs.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_float32_matmul_precision("high")
    if args.smoke:
        torch.set_num_threads(1)
    model, tokenizer = read_parent(args.gguf)
    parent = parent_tensors(model, device, dtype)
    say(f"parent read: {len(parent.layers)} layers on {device}")
    check_forward(model, parent)

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(plan.workers, mp_context=context) as pool:
        train_docs, held_docs = documents(args.text, args.exclude, plan.documents)
        size = sum(map(len, train_docs.values())) / 1e6
        say(f"{len(train_docs)} documents, {size:.1f} M characters; {len(held_docs)} held out")
        waiting = tokenise(pool, tokenizer, Path(folder), list(train_docs.values()), 0)
        kinds = {"books": True, "documentation": False}
        held_waiting = {
            kind: tokenise(
                pool, tokenizer, Path(folder), [t for k, t in held_docs.items() if k.startswith("books") == books], 1
            )
            for kind, books in kinds.items()
        }
        written = write_rows(parent, tokenizer, plan)
        say(f"the parent wrote {written.numel() / 1e6:.2f} M tokens")
        text = np.concatenate([f.result() for f in waiting])
        held_ids = {kind: np.concatenate([f.result() for f in fs]) for kind, fs in held_waiting.items()}
    text_rows = torch.from_numpy(cut_rows(text, plan.length)).to(device)
    held = {k: spread(torch.from_numpy(cut_rows(v, plan.length)).to(device), plan.held) for k, v in held_ids.items()}
    few = min(plan.held, len(written) // 4)
    held["generated"], written = written[-few:], written[:-few]
    say(f"text {text_rows.numel() / 1e6:.1f} M tokens; held-out rows { {k: len(v) for k, v in held.items()} }")

    rank = LIMIT // (2 * plan.keep * sum(sum(parent.exact[0][k].shape) for k in LINEAR))
    machine = Machine(parent, plan, rank)
    data = Feed(text_rows, written, plan)
    if device == "cuda":
        machine.compile()
        say(f"compiled: {machine.compiled}, rank {rank}, {sum(p.numel() for p in machine.parameters()) / 1e6:.2f} M")
    mixed = torch.cat([v[: max(1, plan.batch // 2)] for v in held.values()])
    sample = torch.cat((text_rows[: plan.search // 2], written[: plan.search // 2]))[:, : plan.search_length]
    if args.kept:
        picked = {"cut": "given", "kept": args.kept, "lr": plan.lr, "match": 1.0, "probes": []}
    else:
        picked = choose(machine, data, sample, mixed, plan)
    say("picked", {k: v for k, v in picked.items() if k != "probes"})

    machine.reset(picked["kept"])
    cut_only = {k: machine.measure(v)["sibling"][0] for k, v in held.items()}
    began = time.monotonic()
    steps = train(machine, data, plan.train, picked["lr"], picked["match"], args.out / "log.jsonl")
    seconds = time.monotonic() - began
    export(machine, args.out)
    facts: dict[str, Any] = {
        "kept": machine.kept,
        "parent": parent_facts(args.gguf),
        "rank": rank,
        "training": {
            "plan": asdict(plan),
            "picked": picked,
            "steps": steps,
            "tokens": steps * plan.batch * plan.length,
            "text_tokens": text_rows.numel(),
            "generated_tokens": written.numel(),
            "seconds": round(seconds, 1),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "compiled": machine.compiled,
            "torch": torch.__version__,
        },
    }
    write_facts(args.out, facts)
    say(f"{steps} steps, {facts['training']['tokens'] / 1e6:.1f} M tokens in {seconds:.0f} s; adapter saved")
    plot(args.out / "log.jsonl", args.out)

    facts["heldout"] = {"rows": {k: len(v) for k, v in held.items()}, "row_tokens": plan.length, "nats a token": {}}
    for kind, rows in held.items():
        got = {k: [round(x, 4) for x in v] for k, v in machine.measure(rows).items()}
        facts["heldout"]["nats a token"][kind] = got | {"cut only": round(cut_only[kind], 4)}
        say(f"held-out {kind}: {got}, NLL {100 * (got['sibling'][0] / got['parent'][0] - 1):+.1f} %")
    write_facts(args.out, facts)
    if device == "cuda":
        say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    models = {"parent": model.to(device), "sibling": whole_model(model, machine).to(device)}
    deadline = START + args.total_minutes * 60
    left = lambda: deadline - time.monotonic()  # noqa: E731
    facts["choices"] = evaluate(models, tokenizer, args.eval, plan.eval_limit, left)
    write_facts(args.out, facts)
    if args.smoke:  # what the test of the merge compares with
        ids = held["books"][:1].long()
        with torch.no_grad():
            np.save(args.out / "smoke_logits.npy", models["sibling"](ids).logits[0].numpy())
            ours = rms(machine.student_states(ids)[-1], machine.norm, parent.eps) @ parent.embed.mT
        np.save(args.out / "smoke_ids.npy", ids.numpy())
        worst = (ours - models["sibling"](ids).logits).abs().max().item()
        say(f"trained student and merged model differ by at most {worst:.1e}")
    say("done")


def spread(rows: Any, count: int) -> Any:
    """`count` rows evenly spaced over all rows, so that many documents are among them."""
    import torch

    count = min(count, len(rows))
    return rows[torch.arange(count, device=rows.device) * len(rows) // count]


def check_forward(model: Any, parent: Parent) -> None:
    """Stops unless our plain functions give transformers' own logits (float32, on the CPU)."""
    import torch

    ids = torch.arange(100, 124)[None]
    with torch.no_grad():
        want = model(ids).logits
        plain = parent_tensors(model, "cpu", torch.float32)
        cos, sin = rope_tables(plain, ids.shape[1])
        x = plain.embed[ids]
        for w in plain.layers:
            x = layer(x, w, cos, sin, kv_heads=plain.kv_heads, head_dim=plain.head_dim, eps=plain.eps)
        got = rms(x, plain.norm, plain.eps) @ plain.embed.mT
    worst = ((got - want).abs().max() / want.abs().max()).item()
    if not worst < 1e-3:
        raise SystemExit(f"the plain forward pass differs from transformers' by {worst:.1e} of the largest logit")
    say(f"plain forward pass agrees with transformers: {worst:.1e} of the largest logit")


def parent_facts(source: Path) -> dict[str, str]:
    from crosskv.family.smollm2 import WHEEL, WHEEL_SHA256

    facts = {"name": "SmolLM2-135M-Instruct", "wheel": WHEEL, "wheel_sha256": WHEEL_SHA256}
    if source.is_file():
        facts["gguf_sha256"] = hashlib.sha256(source.read_bytes()).hexdigest()
    return facts


if __name__ == "__main__":
    main()
